"""``--strict-bundle`` of a source holds along the whole way: only peers that serve its bundle compute its answers."""

import dataclasses
import random

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import RequestError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.messages import Accept, Hello, Refuse, State
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import Arrived, Compute, Forward, NeighborState, NeighborUp
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import join_tuples
from ls_edge.runtime.source.source import Source
from tests.runtime.routing.driver import BY_X, Driver, new_peer, run_of, submits, transfer

MINE, OTHER = "m" * 64, "o" * 64


def meets(driver, name, blocks, *, bundle_id=MINE, **state):
    driver(NeighborUp(Hello(name, "peer", 1, 0, "model", bundle_id, tuple(blocks))))
    base = {"warm": True, "draining": False, "stuck": False, "credits": 9, "queue": 0, "calls": 0, "block_us": 1000}
    driver(NeighborState(name, State(**(base | state))))


def demanding(run, bundle_id=MINE):
    return msgspec.structs.replace(run, bundle_id=bundle_id)


@pytest.fixture
def peer():
    return new_peer(model=Model(bundle_id=MINE))


def test_tokens_go_only_to_peers_that_serve_the_bundle(peer):
    meets(peer, "b", [2, 3], bundle_id=OTHER)
    meets(peer, "r", [], reach_blocks=(2, 3), bundle_id=OTHER)
    peer.gets("laptop", demanding(run_of(remaining=(2, 3), waves=BY_X)))
    (home,) = peer.sent(Forward)
    assert (home.to, home.returning) == ("laptop", "unreachable")
    peer.gets("laptop", run_of(transfer(1), remaining=(2, 3), waves=BY_X))
    assert peer.sent(Forward, "b")
    meets(peer, "c", [2, 3], wait_us=10**6)
    peer.gets("laptop", demanding(run_of(transfer(2), remaining=(2, 3), waves=BY_X)))
    (sent,) = peer.sent(Forward, "c")
    assert sent.run("raw", 1, 1).bundle_id == MINE


def test_a_peer_of_another_bundle_refuses_them_and_brings_them_home(peer):
    peer.gets("laptop", demanding(run_of(), OTHER))
    assert [message.reason for message in peer.sent(Refuse)] == ["other bundle"]
    peer.gets("x", demanding(run_of(transfer(1), returning="done", remaining=(), waves=BY_X), OTHER))
    assert peer.sent(Accept, "x")


def test_tracks_keep_the_demand():
    peer = new_peer(range(4), limits=Limits(), model=Model(bundle_id=MINE))
    peer.machine.rules.joins.join = join_tuples
    peer.machine.rules.engine.block_us = 10_000
    meets(peer, "b", range(4), block_us=10_000)
    meets(peer, "c", range(4), block_us=10_000, bundle_id=OTHER)
    peer.gets("laptop", demanding(run_of(policy="parallel", waves_wanted=1)), ("t",))
    (track,) = peer.sent(Forward)
    assert (track.to, track.bundle_id, track.itinerary.track is None) == ("b", MINE, False)
    assert peer.only(Compute)


def test_a_source_demands_it_again_of_what_came_back():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0), model=Model(bundle_id=MINE)))
    meets(source, "a", [0, 1])
    meets(source, "b", [2, 3], bundle_id=OTHER)
    submits(source)
    (run,) = source.sent(Forward, "a")
    source.hears("a", Accept(run.transfer, 8))
    source.gets("a", run_of(run.transfer, returning="unreachable", remaining=(2, 3), waves=((((0, "a"), (1, "a")),),)))
    assert not source.sent(Forward)
    meets(source, "c", [2, 3])
    (again,) = source.sent(Forward, "c")
    assert (run.bundle_id, again.bundle_id) == (MINE, MINE)


def test_a_source_skips_what_only_other_bundles_have():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0), model=Model(bundle_id=MINE)))
    meets(source, "a", [0, 1, 2], reach_blocks=(3,))
    submits(source, max_skips=1, budget=60)
    (run,) = source.sent(Forward, "a")
    ran = run_of(run.transfer, returning="unreachable", remaining=(3,), waves=((((0, "a"), (1, "a"), (2, "a")),),))
    source.gets("a", ran)
    (relayed,) = source.sent(Forward, "a")
    source(Arrived("a", msgspec.structs.replace(ran, transfer=relayed.transfer), ()), 0.3)  # it was never in reach
    assert not source.machine.rules.requests


# Processes.


@pytest.fixture
def bundle(tiny_bundle):
    return Bundle.open(tiny_bundle)


@pytest.fixture
def other(bundle):
    return dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, bundle_id=OTHER))


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["nearest", "parallel"])
def test_no_answer_is_partly_computed_by_another_bundle(bundle, other, serve, write_peers, images, policy):
    """Peers without the flag handed on to any peer of the model."""
    file = load_peers(write_peers({"a": range(3), "b": range(3, 6), "c": range(3, 6)}, sources=["laptop"]))
    for name, served in (("a", bundle), ("b", other), ("c", bundle)):
        serve(Peer(file, name, served))
    holders = {False: set(), True: set()}
    for strict in (False, True):
        with Source.open(file, bundle, policy=policy, strict_bundle=strict, max_skips=0) as source:
            assert source.wait_ready(10) == ()
            for _ in range(1 if strict else 20):  # on a loaded machine, c alone may seem faster for a while
                for future in [source.submit(image) for image in images(24)]:
                    holders[strict] |= future.result(10).record.holders
                if "b" in holders[strict]:
                    break
    assert "b" in holders[False]
    assert "a" in holders[True] <= {"a", "c"}


@pytest.mark.processes
def test_without_a_peer_of_the_bundle_a_request_fails(bundle, other, serve, write_peers, images):
    file = load_peers(write_peers({"a": range(3), "b": range(3, 6)}, sources=["laptop"]))
    serve(Peer(file, "a", bundle))
    serve(Peer(file, "b", other))
    with Source.open(file, bundle, strict_bundle=True, max_skips=0, budget_ms=800) as source:
        assert source.wait_ready(10) == ()
        with pytest.raises(RequestError, match="blocks 3-5"):
            source.submit(images(1)[0]).result(5)
