"""An inspector answers slow questions on another thread, one after the other."""

import threading

import pytest

from ls_edge.core.errors import EngineError
from ls_edge.runtime.peer import inspector as module
from ls_edge.runtime.peer.inspector import Inspector
from ls_edge.runtime.protocol.messages import FindingRow


class Machine:
    """A machine whose checks wait for ``go``, and the answers that its inspector has sent."""

    rows = (FindingRow("ok", "python", "3.11"),)

    def __init__(self, error=None):
        self.go, self.calls, self.sent = threading.Event(), [], []
        self.error = error
        self.inspector = Inspector(self.examine, self.measure, lambda *answer: self.sent.append(answer), lambda: None)

    def examine(self):
        self.calls.append("check")
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        return self.rows

    def measure(self, seconds):
        self.calls.append(seconds)
        return b"{}"

    def has_sent(self, count):
        self.inspector.step()
        return len(self.sent) == count


@pytest.fixture
def new_machine():
    """A function that returns a new machine, whose thread ends with the test."""
    machines = []

    def new(error=None):
        machines.append(Machine(error))
        return machines[-1]

    yield new
    for machine in machines:
        machine.inspector.close()


def test_different_questions_are_answered_one_after_the_other(wait_until, new_machine):
    machine = new_machine()
    machine.inspector.ask("laptop", 0)
    machine.inspector.ask("desk", 1500)
    wait_until(lambda: machine.calls, what="a check that has begun")
    assert machine.calls == ["check"]
    machine.go.set()
    wait_until(lambda: machine.has_sent(2), what="both answers")
    assert machine.calls == ["check", 1.5]
    assert machine.sent[1][1].document == b"{}"


@pytest.mark.parametrize(
    ("error", "what"), [(EngineError("no engine"), "engines"), (ValueError("x"), "ls-edge doctor")]
)
def test_a_failed_check_is_a_finding(error, what, wait_until, new_machine):
    machine = new_machine(error=error)
    machine.go.set()
    machine.inspector.ask("laptop", 0)
    wait_until(lambda: machine.has_sent(1), what="an answer")
    ((_, findings),) = machine.sent
    assert [(row.status, row.what) for row in findings.rows] == [("bad", what)]
    assert str(error) in findings.rows[0].detail


def test_waiting_processes_are_bounded(wait_until, new_machine):
    machine = new_machine()
    machine.inspector.ask("first", 0)
    wait_until(lambda: machine.calls, what="a check that has begun")
    for number in range(module.MAX_ASKING + 5):
        machine.inspector.ask(f"source-{number}", 0)
    machine.go.set()
    wait_until(lambda: machine.has_sent(1 + module.MAX_ASKING), what="the answers")
