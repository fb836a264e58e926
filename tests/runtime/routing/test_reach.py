"""Which neighbors could continue a request."""

import pytest

from ls_edge.runtime.routing.reach import able_to_run, candidates_for
from ls_edge.runtime.routing.state.held_request import HeldRequest
from tests.runtime.routing.driver import new_peer, run_of


@pytest.fixture
def peer():
    """A peer linked with ``b``, which holds block 2, and ``relay``, which leads to a holder of block 3."""
    one = new_peer()
    one.meets("b", [2])
    one.meets("relay", [], reach_blocks=(3,))
    return one


def able(peer, **itinerary):
    run = run_of(policy="fastest", **itinerary)
    request = HeldRequest(run.transfer, run.itinerary, (), peer.now + 5.0, "laptop", peer.now)
    turn = peer.machine.turn
    return [n.name for n in able_to_run(turn, request, candidates_for(turn, request))]


@pytest.mark.parametrize(
    ("itinerary", "names"),
    [
        ({"remaining": (2, 3)}, ["b"]),
        ({"remaining": (3,)}, ["relay"]),
        ({"remaining": (3,), "relays": ("x",)}, []),  # one process may pass the tokens on between two blocks
        ({"remaining": (2, 3), "relays": ("x",)}, ["b"]),
    ],
)
def test_holders_are_able_and_relays_only_without_any(peer, itinerary, names):
    assert able(peer, **itinerary) == names
