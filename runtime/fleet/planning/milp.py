"""Mixed-integer linear programs, solved by HiGHS in a process of its own.

A solver is a large library in C++: a process can be given a time limit and ended, and what becomes of it does not touch
ours. Run as a program, this module reads programs as JSON from standard input and writes their solutions to standard
output. Symmetry detection is off: equal devices are counted, not told apart, so there is nothing for it to find, and it
can take longer than the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

GRACE_S = 2.0
"""What the process may take beyond its time limit, to start and to answer, until it is killed."""


class LinearProgram(msgspec.Struct):
    """Minimise ``cost . x`` with ``lower <= x <= upper`` and ``row_lower <= A x <= row_upper``; None is no limit."""

    cost: list[float] = []
    upper: list[float | None] = []
    integer: list[bool] = []
    rows: list[dict[int, float]] = []
    row_lower: list[float | None] = []
    row_upper: list[float | None] = []

    def column(self, cost: float, upper: float | None, *, integer: bool = True) -> int:
        """Add a variable of at least 0 and return its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, entries: dict[int, float], *, lower: float | None = None, upper: float | None = None) -> None:
        """Add a constraint on the sum of ``entries``, factors by variable."""
        self.rows.append(entries)
        self.row_lower.append(lower)
        self.row_upper.append(upper)


class Solution(msgspec.Struct, frozen=True):
    """What the solver found for one program."""

    status: str
    """``optimal``, ``feasible`` (the time was over), ``infeasible`` or what the solver says."""
    values: list[float] = []


class _Request(msgspec.Struct):
    programs: list[LinearProgram]
    seconds: float


def is_available() -> bool:
    """Whether the solver is installed (extra ``plan``)."""
    return importlib.util.find_spec("highspy") is not None


def solve(
    programs: Sequence[LinearProgram], seconds: float, command: Sequence[str] | None = None
) -> tuple[list[Solution], str | None]:
    """Solve programs one after the other within ``seconds``; a solution each, or none and why not.

    ``command`` starts another solver process than ours. Never raises for what becomes of that process.
    """
    request = msgspec.json.encode(_Request(list(programs), seconds))
    try:
        done = subprocess.run(  # noqa: S603  our own interpreter and module
            [sys.executable, "-m", "ls_edge.runtime.fleet.planning.milp"] if command is None else list(command),
            input=request, capture_output=True, timeout=seconds + GRACE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], f"the solver did not answer within {seconds + GRACE_S:.0f} s and was killed"
    except OSError as error:
        return [], f"the solver does not start: {error.strerror}"
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return [], f"the solver ended with {how}{': ' if last[0] else ''}{last[0][:200]}"
    try:
        solutions = msgspec.json.decode(done.stdout, type=list[Solution])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return [], "the solver's answer cannot be read"
    if len(solutions) != len(programs):
        return [], f"the solver answered {len(solutions)} of {len(programs)} programs"
    return solutions, None


def solve_here(programs: Sequence[LinearProgram], seconds: float) -> tuple[list[Solution], str | None]:
    """As :func:`solve`, in this process: what the process of :func:`solve` does."""
    end = time.monotonic() + seconds
    return [_solve_one(program, max(0.1, end - time.monotonic())) for program in programs], None


def _solve_request(request: _Request) -> list[Solution]:
    return solve_here(request.programs, request.seconds)[0]


def _solve_one(program: LinearProgram, seconds: float) -> Solution:
    import numpy as np

    highspy: Any = importlib.import_module("highspy")  # without types
    highs: Any = highspy.Highs()
    for option, value in (
        ("output_flag", False), ("mip_detect_symmetry", False), ("threads", 1), ("random_seed", 0),
        ("time_limit", seconds), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0),
    ):  # fmt: skip
        highs.setOptionValue(option, value)
    infinity = highspy.kHighsInf
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.rows)
    lp.col_cost_ = np.asarray(program.cost, dtype=float)
    lp.col_lower_ = np.zeros(len(program.cost))
    lp.col_upper_ = np.asarray([infinity if most is None else most for most in program.upper], dtype=float)
    lp.row_lower_ = np.asarray([-infinity if least is None else least for least in program.row_lower], dtype=float)
    lp.row_upper_ = np.asarray([infinity if most is None else most for most in program.row_upper], dtype=float)
    lp.integrality_ = [
        highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous for whole in program.integer
    ]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    starts = np.cumsum([0, *(len(row) for row in program.rows)])
    lp.a_matrix_.start_ = np.asarray(starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.asarray([column for row in program.rows for column in row], dtype=np.int32)
    lp.a_matrix_.value_ = np.asarray([factor for row in program.rows for factor in row.values()], dtype=float)
    highs.passModel(lp)
    highs.run()
    status = highs.getModelStatus()
    values = [float(value) for value in highs.getSolution().col_value]
    if status == highspy.HighsModelStatus.kOptimal:
        return Solution("optimal", values)
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solution("infeasible")
    found = bool(values) and highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Solution("feasible", values) if found else Solution(highs.modelStatusToString(status))


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(_solve_request(msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)))
    )
