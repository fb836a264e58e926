"""A path that loses large packets, as through a VPN: the link is up, and tokens never arrive."""

import time

import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.routing.state.neighbors import CUTS
from ls_edge.runtime.source.source import Source
from tests.faults.own_network import FarSide, in_own_network, needs_own_network

pytestmark = needs_own_network
PORT = 5555


def far_peer(tmp_path, **more):
    """A file in which one peer is behind the far side."""
    far = {"name": "far", "address": f"tcp://{FarSide.ADDRESS}:{PORT}", "bind": f"tcp://0.0.0.0:{PORT}"}
    path = tmp_path / "peers.yaml"
    path.write_text(yaml.safe_dump({"peers": [{**far, "blocks": "all", "threads": 1}], "insecure": True, **more}))
    return load_peers(path)


ONE_WAY = [(1280, 1500), (1500, 1280)]
"""Largest packets to a board, and from it."""


@pytest.mark.parametrize(("there", "back"), [*ONE_WAY, (1500, 1500)])
def test_status_and_doctor_name_a_board_to_or_from_which_large_packets_do_not_pass(
    there, back, tmp_path, tiny_bundle, serve
):
    @in_own_network
    def look():
        file = far_peer(tmp_path)
        with FarSide(largest=there, largest_back=back):
            serve(Peer(file, "far", Bundle.open(tiny_bundle)))
            with Observer(file) as observer:
                return observer.look(20.0)["far"], observer.inspect(20.0)["far"]

    status, found = look()
    if min(there, back) == 1280:
        assert (status.state, status.reason) == (PeerState.SILENT, found)
        assert "large packets do not pass (MTU)" in found
    else:
        assert status.state in (PeerState.COLD, PeerState.ALIVE)  # a slow machine may still load the engines
        assert "MTU" not in str(found)


@pytest.mark.release
@pytest.mark.parametrize(("there", "back"), [(1280, 1280), *ONE_WAY])
def test_a_source_names_the_board_and_does_not_offer_it_tokens_again_and_again(
    there, back, tmp_path, tiny_bundle, serve, images
):
    bundle, events = Bundle.open(tiny_bundle), []

    @in_own_network
    def ask():
        file = far_peer(tmp_path, sources=[{"name": "laptop"}])
        with FarSide(largest=there, largest_back=back):
            serve(Peer(file, "far", bundle))
            with Source.open(file, bundle, budget_ms=9_000, on_event=events.append) as source:
                assert source.wait_ready(20) == ()
                with pytest.raises(BudgetExceeded) as raised:
                    source.submit(images(1)[0]).result(30)
                return str(raised.value)

    assert "the link to far ends each time that tokens are sent; large packets do not pass (MTU)" in ask()
    assert sum(event.state == PeerState.LOST for event in events) <= CUTS + 2


@pytest.mark.release
@pytest.mark.parametrize(("there", "back"), ONE_WAY)
def test_another_board_answers_and_both_ends_name_the_link(there, back, tmp_path, tiny_bundle, serve, images, caplog):
    """A request waits for one deadline of a hop, and not until the link ends."""
    bundle, events, by_far = Bundle.open(tiny_bundle), [], []
    near = {"name": "near", "address": "tcp://127.0.0.1:5556", "blocks": "all", "threads": 1}

    @in_own_network
    def ask():
        path = far_peer(tmp_path).path
        content = yaml.safe_load(path.read_text())
        path.write_text(
            yaml.safe_dump({**content, "peers": [*content["peers"], near], "sources": [{"name": "laptop"}]})
        )
        file = load_peers(path)
        with FarSide(largest=there, largest_back=back):
            for name in ("far", "near"):
                serve(Peer(file, name, bundle))
            with Source.open(file, bundle, budget_ms=9_000, on_event=events.append) as source:
                assert source.wait_ready(20) == ()
                end = time.monotonic() + 40
                while not any("MTU" in event.why for event in events) and time.monotonic() < end:
                    answer = source.submit(images(1)[0]).result(30)
                    by_far.append("far" in {visit.holder for visit in answer.record.visits})

    ask()
    assert not all(by_far)
    assert {event.peer for event in events if event.state == PeerState.LOST} <= {"far"}
    named = {record.peer for record in caplog.records if "MTU" in getattr(record, "why", "")}
    assert "far" in named
    assert len(named) == (1 if there < back else 2), "who cannot send tokens home names the source"
