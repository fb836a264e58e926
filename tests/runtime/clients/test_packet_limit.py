"""A path that loses large packets, as through a VPN: the link is up, and tokens never arrive."""

import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded
from ls_edge.core.peers_file import load_peers
from ls_edge.core.records import PeerState
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


@pytest.mark.parametrize("largest", [1280, 1500])
def test_status_and_doctor_name_a_board_to_which_large_packets_do_not_pass(largest, tmp_path, tiny_bundle, serve):
    @in_own_network
    def look():
        file = far_peer(tmp_path)
        with FarSide(largest=largest):
            serve(Peer(file, "far", Bundle.open(tiny_bundle)))
            with Observer(file) as observer:
                return observer.look(20.0)["far"], observer.inspect(20.0)["far"]

    status, found = look()
    if largest == 1280:
        assert (status.state, status.reason) == (PeerState.SILENT, found)
        assert "large packets do not pass (MTU)" in found
    else:
        assert status.state == PeerState.ALIVE
        assert "MTU" not in str(found)


@pytest.mark.slow
def test_a_source_names_the_board_and_does_not_offer_it_tokens_again_and_again(tmp_path, tiny_bundle, serve, images):
    bundle, events = Bundle.open(tiny_bundle), []

    @in_own_network
    def ask():
        file = far_peer(tmp_path, sources=[{"name": "laptop"}])
        with FarSide(largest=1280):
            serve(Peer(file, "far", bundle))
            with Source.open(file, bundle, budget_ms=9_000, on_event=events.append) as source:
                assert source.wait_ready(20) == ()
                with pytest.raises(BudgetExceeded) as raised:
                    source.submit(images(1)[0]).result(30)
                return str(raised.value)

    assert "the link to far ends each time that tokens are sent; large packets do not pass (MTU)" in ask()
    assert CUTS <= sum(event.state == PeerState.LOST for event in events) <= CUTS + 2
