import json

import pytest

from ls_edge.report import charts
from tests.report.drawing import data_of_run, rows_of, spec_of


def test_the_heat_map_has_the_shares_of_slots_and_skips(run_with_loss):
    data = data_of_run(run_with_loss)
    counts, skipped = data.slots
    rows = {(row["row"], row["column"]): row["value"] for row in rows_of(spec_of(charts.slot_heatmap(data)))}
    assert rows["0", "0"] == pytest.approx(100 * counts[0, 0] / 400, abs=0.1)
    assert sum(share for (_, slot), share in rows.items() if slot == "skipped") * 4 == pytest.approx(
        skipped.sum(), abs=1
    )


def test_a_comparison_holds_accuracy_and_interval(run_with_loss):
    spec = spec_of(charts.accuracy_comparison([("one", run_with_loss.summary)]))
    (row,) = {json.dumps(row) for row in rows_of(spec) if "answers" in row}
    row = json.loads(row)
    low, high = run_with_loss.summary.top1_interval
    assert (row["top1"], row["low"], row["high"]) == pytest.approx((run_with_loss.summary.top1, low, high), abs=1e-4)
