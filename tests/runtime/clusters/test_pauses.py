"""Pauses of processes have no lasting effect."""

import signal
from concurrent.futures import FIRST_COMPLETED, wait

from ls_edge.core.errors import BudgetExceeded
from ls_edge.core.peer_reports import PeerState
from tests.faults.engines import Faults

BUDGET_MS = 300.0
"""Much less than the pause: requests that come after it must not be measured by it."""


def test_a_peer_that_was_stopped_in_an_engine_call_runs_blocks_again(start_peers, open_source, images, wait_until):
    """Every request outlives the pause, and the peer serves short budgets soon afterwards.

    This does not show that a long call counts little in the usual time of one: the calls after it, and that most of a
    budget is always tried, would do as well; the test of a "black hole" in ``test_machine.py`` shows that.
    """
    peers = start_peers({"a": range(6)})
    peers.set_faults("a", Faults(least_ms=20.0))
    source, (picture,) = open_source(peers.path, max_skips=0, budget_ms=30_000), images(1)
    futures = [source.submit(picture) for _ in range(8)]
    wait(futures, 30, FIRST_COMPLETED)
    peers.signal("a", signal.SIGSTOP)  # in one of its calls of 20 ms
    wait_until(lambda: source.snapshot.peers["a"].state is PeerState.LOST, 30.0, "the heartbeats to end")
    stopped = [source.submit(picture, budget_ms=2_000) for _ in range(2)]
    assert {type(future.exception(30)) for future in stopped} == {BudgetExceeded}  # the pause outlasts two seconds
    peers.signal("a", signal.SIGCONT)
    assert not wait(futures, 30).not_done
    assert {future.exception() for future in futures} == {None}
    peers.set_faults("a", Faults())
    wait_until(lambda: all(answers(source, picture)), 30.0, "five answers in a row within the budget")


def answers(source, picture):
    """Yield whether each of five requests, one after the other, is answered within a short budget."""
    for _ in range(5):
        yield source.submit(picture, budget_ms=BUDGET_MS).exception(10) is None
