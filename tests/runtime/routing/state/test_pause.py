"""Time limit of a neighbor: how long it is given no tokens, and what ends that."""

import msgspec
import pytest

from ls_edge.runtime.routing.state.pause import PauseReason
from tests.runtime.routing.state.test_neighbors import at, neighbor


@pytest.mark.parametrize(
    ("reason", "seconds"),
    [
        (PauseReason.SILENT, [0.3, 0.6, 1.2, 2.4, 4.8, 5.0, 5.0]),
        (PauseReason.UNWILLING, [0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0]),
        (PauseReason.UNABLE, [0.02, 0.04, 0.08, 0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_a_pause_doubles_to_its_limit_and_ends_with_progress(reason, seconds):
    n = at(neighbor(), 100.0)
    assert [round(n.hold_off(reason) - 100.0, 3) for _ in seconds] == seconds
    assert at(n, 100.0 + seconds[-1] - 0.01).credits == 0
    assert n.available == (reason is not PauseReason.SILENT)
    assert at(n, 100.0 + seconds[-1] + 0.01).credits > 0
    n.has_worked()
    assert n.hold_off(reason) == pytest.approx(n.all.now + seconds[0])


@pytest.mark.parametrize(
    ("reason", "calls", "ends"),
    [("SILENT", 0, False), ("SILENT", 1, True), ("UNWILLING", 1, False), ("UNABLE", 0, True)],
)
def test_a_state_ends_a_pause_whose_reason_has_gone(reason, calls, ends):
    n = at(neighbor(), 1.0)
    n.hold_off(PauseReason[reason])
    n.all.update("b", msgspec.structs.replace(n.state, calls=calls))
    assert (n.credits > 0) == ends


def test_a_shorter_pause_for_another_reason_changes_nothing():
    n = at(neighbor(), 1.0)
    assert n.hold_off(PauseReason.SILENT) == n.hold_off(PauseReason.UNABLE) == 1.3
    assert not n.available
