import json

import pytest

from ls_edge.evaluation.evaluate import Arbitrary, Evaluation, Freedom, Models, SequentialAccuracy
from ls_edge.report import charts
from tests.report.drawing import rows_of, spec_of


def test_a_comparison_holds_accuracy_and_interval(run_with_loss):
    spec = spec_of(charts.accuracy_comparison([("one", run_with_loss.summary)]))
    (row,) = {json.dumps(row) for row in rows_of(spec) if "answers" in row}
    row = json.loads(row)
    low, high = run_with_loss.summary.top1_interval
    assert (row["top1"], row["low"], row["high"]) == pytest.approx((run_with_loss.summary.top1, low, high), abs=1e-4)


def test_figures_show_one_sample_deviation_and_say_of_how_many():
    a = Arbitrary(top1_mean=0.5, top1_std=0.1, top1_p5=0.2, top1_worst=0.1, orders=16)
    settings = {"method": "shuffle", "blocks": 4, "data": "digits" * 20}
    found = Evaluation(
        SequentialAccuracy(0.9), a, {}, None, 359, settings=settings, models=Models(3, 0.1, 0.1, []),
        freedom=[Freedom([list(range(12))], 479_001_600.0, 4, 0.5, 0.1, 0.4, own=True)],
    )  # fmt: skip
    assert ">full<" in charts.svg_of(charts.freedom_figure([found]))
    spec = spec_of(charts.accuracy_figure([found]))
    (row,) = (row for row in rows_of(spec) if "low" in row)
    assert (row["low"], row["high"]) == pytest.approx((0.4, 0.6))
    lines = next(title["subtitle"] for title in (one["title"] for one in spec["hconcat"]) if "order" in title["text"])
    assert [lines[-2][:20], lines[-1]] == ["359 images of digits", "16 random orders, 3 trained models each"]
    assert max(map(len, lines)) < 65, "longer ones run into the chart on the right"
