import json

import numpy as np
import pytest

from ls_edge.core.text import show_ms
from ls_edge.evaluation.run_summary import quantiles
from ls_edge.report import charts
from tests.report.drawing import data_of_run, histogram, rows_of, spec_of


def test_the_histogram_counts_every_answer(run_with_loss):
    rows = rows_of(spec_of(histogram(data_of_run(run_with_loss))))
    assert sum(row.get("answers", 0) for row in rows) == len(run_with_loss.records)
    figures = run_with_loss.summary.latency_ms
    assert [row["text"] for row in rows if "text" in row] == [
        f"p50 {show_ms(figures.p50)}", f"p95 {show_ms(figures.p95)}", f"p99 {show_ms(figures.p99)}"
    ]  # fmt: skip


@pytest.mark.parametrize("late", [[8000.0], [8000.0] * 20])
def test_one_late_answer_does_not_leave_one_bar_for_all_others(late):
    values = np.append(np.random.default_rng(0).normal(10.0, 0.7, 1000), late)
    spec = spec_of(charts.latency_histogram(values, quantiles(values)))
    rows = rows_of(spec)
    bars = [row["answers"] for row in rows if row.get("answers")]
    assert sum(bars) == 1000
    assert len(bars) >= 12
    assert max(bars) < 300
    number = f"{len(late)} answers" if len(late) > 1 else "1 answer"
    assert f"not drawn: {number} up to 8.0 s" in json.dumps(spec)
    assert all(row["at"] < 20 for row in rows if "at" in row)


def test_latencies_that_are_equal_or_of_two_kinds_are_all_drawn():
    for values in (np.full(50, 12.0), np.array([5.0]), np.repeat([10.0, 400.0], [900, 100]), np.zeros(9)):
        rows = rows_of(spec_of(charts.latency_histogram(values, quantiles(values))))
        assert sum(row.get("answers", 0) for row in rows) == len(values)


def test_the_chart_over_time_marks_losses_and_returns(run_with_loss):
    rows = rows_of(spec_of(charts.latency_over_time(data_of_run(run_with_loss))))
    assert {row["request"] for row in rows if "request" in row} == {r.id for r in run_with_loss.records}
    assert {row["text"] for row in rows if "kind" in row} == {"board-b lost", "board-b back"}
