"""``ls-edge demo --boards``: a plan that runs on emulated boards."""

import json

import pytest

from ls_edge.cli.board_demo import board_demo, check_boards
from ls_edge.core.errors import UsageError
from ls_edge.report.terminal import open_console


def test_boards_are_listed_by_name():
    assert check_boards("a, b,") == ["a", "b"]
    with pytest.raises(UsageError, match="names no board"):
        check_boards(" ,")


@pytest.mark.slow
def test_a_plan_runs_on_emulated_boards_and_is_compared_with_them(tiny_bundle, tmp_path):
    console = open_console(stderr=True)
    found = board_demo(tmp_path, ["orin-nano", "orin-nano-super"], tiny_bundle, 10, console, slowdown=5)
    plan, compared = found["plan"], found["compared"]
    assert plan.recommendation in ("single", "distribute")
    assert any("is emulated, by NVIDIA's table" in line for line in plan.assumptions)
    assert {"plan.json", "run-alone.json", "run-many.json"} <= {row.name for row in compared.rows}
    assert {(pair.run, pair.figure) for pair in compared.planned_against_measured} == {
        ("run-alone.json", "latency_ms"), ("run-many.json", "throughput"),
    }  # fmt: skip
    run = json.loads((tmp_path / "run-alone.json").read_text(encoding="utf-8"))
    assert (run["answered"], run["degraded"]) == (10, 0)
