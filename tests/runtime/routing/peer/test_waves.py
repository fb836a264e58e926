"""A peer's machine begins waves, joins what comes back, and goes on without what does not."""

import gc

import msgspec
import pytest

from ls_edge.core.peer_reports import Visit
from ls_edge.runtime.protocol.messages import Accept, Progress, Refuse, Release, Run, TrackRef
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Complete,
    Compute,
    Forward,
    NeighborDown,
    Send,
    Unsendable,
)
from ls_edge.runtime.routing.state.held_request import HeldRequest
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.pause import PauseReason
from ls_edge.runtime.simulator.simulation import join_tuples
from tests.faults.simulation import FaultySimulation
from tests.runtime.routing.driver import cancel, new_peer, request_id, run_of, transfer

ALL = range(4)


def joiner(limits=None, **state):
    """Peer ``a`` with all blocks, neighbor ``b`` with all blocks, and blocks of 10 ms."""
    peer = new_peer(ALL, limits=limits or Limits())
    peer.machine.rules.joins.join = join_tuples
    peer.machine.rules.engine.block_us = 10_000
    peer.meets("b", ALL, block_us=10_000, **state)
    return peer


@pytest.fixture
def peer():
    return joiner()


def open_waves(peer):
    return [request.wave for request in peer.machine.held.values() if request.wave is not None]


def begins(peer, *, waves=1, budget=5.0, **more):
    peer.gets(
        "laptop",
        run_of(policy="parallel", waves_wanted=waves, budget=budget, **more),
        ("t",),
    )
    (sent,) = peer.sent(Forward, "b")
    peer.compute = peer.only(Compute)
    return sent


def back(sent, blocks=None, why="done", **changes):
    """The RUN by which ``b`` gives a track back, and its tokens."""
    it = sent.itinerary
    ran = tuple((block, "b") for block in (it.remaining if blocks is None else blocks))
    left = tuple(block for block in it.remaining if block not in dict(ran))
    visit = Visit("b", tuple(dict(ran)), 100, 20_000, 30)
    way = changed(it, waves=((ran,),) if ran else (), remaining=left, visits=(visit,), **changes)
    transfer = sent.transfer._replace(hop=sent.transfer.hop + 1)
    run = Run(transfer, sent.budget_us, way, "raw", 1, 1, why)
    return run, ("t", *dict(ran))


def changed(value, **changes):

    return msgspec.structs.replace(value, **changes)


def test_a_wave_is_begun_joined_and_goes_home(peer):
    sent = begins(peer)
    assert sent.itinerary.source == "a"
    assert sent.itinerary.track.before == 0
    assert sent.transfer.request == request_id(0)
    assert sent.itinerary.remaining == (1, 3)
    compute = peer.compute
    assert compute.blocks == (0, 2)
    assert sorted(item.stage.value for item in peer.machine.held.values()) == ["joining", "offered", "running"]
    peer.hears("b", Accept(sent.transfer, 8))
    assert not peer.sent(Release)
    peer.computes(compute, after=0.02)
    assert not peer.sent(Forward)
    run, tokens = back(sent)
    peer.gets("b", run, tokens)
    assert peer.sent(Accept, "b") == [Accept(run.transfer, peer.machine.turn.limits.credits)]
    (home,) = peer.sent(Forward, "laptop")
    assert home.returning == "done"
    assert home.itinerary.waves == ((((0, "a"), (2, "a")), ((1, "b"), (3, "b"))),)
    assert [s.tokens for s in peer.said if isinstance(s, Forward) and s is home] == [("t", 0, 2, 1, 3)]
    (visit,) = home.itinerary.visits
    own, other = visit.tracks
    assert (own.holder, own.blocks, own.engine_us) == ("a", (0, 2), 1000)
    assert (other.holder, other.blocks, other.queue_us, other.engine_us, other.codec_us) == (
        "b",
        (1, 3),
        100,
        20_000,
        30,
    )
    assert other.end_us > other.begin_us == 0
    assert not open_waves(peer)
    peer.hears("laptop", Accept(home.transfer, 1))
    assert not peer.machine.held


def test_slots_of_a_track_count_what_ran_before(peer):
    sent = begins(peer, remaining=(2, 3), waves=2)
    assert sent.itinerary.blocks_done == 0
    before = ((((0, "x"), (1, "x")),),)
    other = joiner()
    other.gets("laptop", changed(
        run_of(policy="parallel", remaining=(2, 3)),
        itinerary=changed(run_of(policy="parallel", remaining=(2, 3)).itinerary, waves=before, waves_wanted=1),
    ), ("t",))  # fmt: skip
    (sent,) = other.sent(Forward, "b")
    assert sent.itinerary.blocks_done == sent.itinerary.track.before == 2
    assert other.only(Compute).slots == (2,)


@pytest.mark.parametrize("how", ["lost", "refused", "unsendable", "late"])
def test_blocks_of_a_track_that_fails_run_later(peer, how):
    sent = begins(peer)
    peer.computes(peer.compute, after=0.02)
    if how == "lost":
        peer(NeighborDown("b", "killed"))
    elif how == "refused":
        peer.hears("b", Refuse(sent.transfer, "busy"))
    elif how == "unsendable":
        peer(Unsendable(sent))
        peer.hears_state("b", credit=0)
    else:
        peer.hears("b", Accept(sent.transfer, 8))
        peer.passes(0.4)
        assert "suspect" in peer.notes()
    compute = peer.only(Compute)
    assert compute.blocks == (1, 3)
    assert compute.tokens == (("t", 0, 2),)
    peer.computes(compute, after=0.02)
    (home,) = peer.sent(Forward, "laptop")
    assert home.itinerary.waves == ((tuple((block, "a") for block in (0, 2, 1, 3)),),)
    assert home.itinerary.skipped == ()
    rows = [row for row in home.itinerary.visits[0].tracks if not row.blocks]
    assert [(row.holder, row.why) for row in rows] == [("b", "refused" if how == "unsendable" else how)]


def test_blocks_that_a_track_ran_count_and_the_rest_runs_later(peer):
    sent = begins(peer)
    peer.hears("b", Accept(sent.transfer, 8))
    run, tokens = back(sent, blocks=(1,), why="unreachable")
    peer.gets("b", run, tokens)
    peer.computes(peer.compute, after=0.02)
    assert peer.only(Compute).blocks == (3,)
    assert peer.only(Compute).tokens == (("t", 0, 2, 1),)


def test_a_track_that_is_not_finite_is_not_summed_and_its_blocks_run_later(peer):
    """It made the joiner's tokens NaN, so that the request failed and the joiner was named."""
    sent = begins(peer)
    peer.hears("b", Accept(sent.transfer, 8))
    run, tokens = back(sent)
    peer(Arrived("b", run, tokens, finite=False))
    peer.computes(peer.compute, after=0.02)
    assert peer.only(Compute).blocks == (1, 3)
    assert peer.only(Compute).tokens == (("t", 0, 2),)
    assert peer.machine.neighbors.get("b").pause.reason is PauseReason.UNWILLING
    peer.computes(peer.only(Compute), after=0.02)
    (home,) = peer.sent(Forward, "laptop")
    assert [row.why for row in home.itinerary.visits[0].tracks if row.holder == "b" and not row.blocks] == [
        "not finite"
    ]


@pytest.mark.parametrize("wrong", ["wave", "index", "request", "twice"])
def test_tokens_that_fit_no_track_are_accepted_and_dropped(peer, wrong):
    sent = begins(peer)
    peer.hears("b", Accept(sent.transfer, 8))
    run, tokens = back(sent)
    mark = run.itinerary.track
    if wrong == "twice":
        peer.gets("b", run, tokens)
    elif wrong == "wave":
        run = changed(run, itinerary=changed(run.itinerary, track=changed(mark, wave=1)))
    elif wrong == "index":
        run = changed(run, itinerary=changed(run.itinerary, track=changed(mark, index=9)))
    else:
        run = changed(run, transfer=run.transfer._replace(request=request_id(5)))
    before = dict(peer.machine.held)
    peer.gets("b", run, tokens)
    assert len(peer.sent(Accept, "b")) == 1
    assert peer.machine.held == before
    assert len(open_waves(peer)) == 1


def test_the_holder_before_hears_that_all_is_well_while_tracks_are_away(peer):
    sent = begins(peer)
    peer.hears("b", Accept(sent.transfer, 8))
    peer.computes(peer.compute, after=0.02)
    said = peer.passes(0.2)
    assert [s.to for s in said if isinstance(s, Send) and isinstance(s.message, Progress)].count("laptop") >= 1
    peer.hears("b", Progress(sent.transfer), after=0.1)
    assert peer.sent(Progress, "laptop")


def test_a_canceled_request_takes_its_wave_along(peer):
    begins(peer)
    peer.hears("laptop", cancel(0))
    assert not peer.machine.held
    assert not open_waves(peer)
    assert not list(peer.machine.custody.sent)


def test_the_holder_of_a_track_runs_it_and_gives_back_what_it_cannot():
    peer = new_peer((0, 1))
    peer.meets("j", ALL)

    run = run_of(transfer(), remaining=(1, 3), policy="parallel", track=TrackRef(77, 1, 0, "laptop"))
    run = changed(run, itinerary=changed(run.itinerary, source="j"))
    peer.gets("j", run, ("t",))
    peer.computes(peer.only(Compute))
    (home,) = peer.sent(Forward, "j")
    assert home.returning == "unreachable"
    assert home.itinerary.remaining == (3,)
    assert home.itinerary.track == TrackRef(77, 1, 0, "laptop")
    peer.hears("j", Accept(home.transfer, 9))
    assert not peer.machine.held
    peer.gets("j", changed(run, transfer=transfer(branch=9)), ("t",))
    peer(NeighborDown("j", "killed"))
    peer.computes(peer.calls[-1])
    peer.passes(1.5)
    assert not peer.machine.held


def test_tokens_of_a_closed_wave_are_freed_without_a_garbage_collection():
    """They were in a cycle of references; of a ViT-B each track's are 600 KB."""
    sim = FaultySimulation(dict.fromkeys("abc", ALL), blocks=len(ALL), latency=0.0002, block_seconds=0.005)
    sim.run(0.5)
    gc.collect()
    gc.disable()
    try:
        before = _held_requests()
        for _ in range(5):
            number = sim.submit(policy="parallel", budget=5.0)
            sim.run(0.5)
            (outcome,) = sim.outcomes[number]
            assert isinstance(outcome, Complete)
            assert any(len(wave) > 1 for wave in outcome.itinerary.waves)
        sim.run(1.0)
        assert _held_requests() == before
    finally:
        gc.enable()


def _held_requests():
    return sum(type(one) is HeldRequest for one in gc.get_objects())
