import pytest

from ls_edge.core.text import show_ms
from ls_edge.report import charts
from tests.report.drawing import data_of_run, histogram, rows_of, spec_of


def test_the_histogram_counts_every_answer(run_with_loss):
    spec = spec_of(histogram(data_of_run(run_with_loss)))
    rows = rows_of(spec)
    assert sum(row.get("answers", 0) for row in rows) == len(run_with_loss.records)
    figures = run_with_loss.summary.latency_ms
    assert [row["text"] for row in rows if "text" in row] == [
        f"p50 {show_ms(figures.p50)}", f"p95 {show_ms(figures.p95)}", f"p99 {show_ms(figures.p99)}"
    ]  # fmt: skip
    assert max(row["share"] for row in rows if "share" in row) == 1.0


def test_the_chart_over_time_marks_losses_and_returns(run_with_loss):
    rows = rows_of(spec_of(charts.latency_over_time(data_of_run(run_with_loss))))
    assert {row["request"] for row in rows if "request" in row} == {r.id for r in run_with_loss.records}
    assert {row["text"] for row in rows if "kind" in row} == {"board-b lost", "board-b back"}
    (away,) = [row for row in rows if row.get("peer") == "board-b"]
    lost, back = (event.at_us / 1e6 for event in run_with_loss.events[-2:])
    assert (away["t"], away["to"]) == (pytest.approx(lost, abs=1e-4), pytest.approx(back, abs=1e-4))
