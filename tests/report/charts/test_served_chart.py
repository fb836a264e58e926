import pytest

from ls_edge.core.records import PeerState
from ls_edge.report import charts
from tests.report.drawing import data_of_run, rows_of, spec_of


def test_the_brush_of_the_overview_is_the_time_axis_of_the_detail(run_with_loss):
    data = data_of_run(run_with_loss)
    spec = spec_of(charts.served(data))
    overview, detail = spec["vconcat"]
    (brush,) = [param for param in spec["params"] if param["name"] == "brush"]
    assert set(brush["views"]) <= {layer.get("name") for layer in overview["layer"]}
    domains = [
        layer["encoding"]["x"]["scale"]["domain"] for layer in detail["layer"] if "scale" in layer["encoding"]["x"]
    ]
    assert domains
    assert all(domain["param"] == "brush" for domain in domains)
    lost = next(event.at_us / 1e6 for event in data.changes if event.state == PeerState.LOST)
    begin, end = brush["value"]["x"]
    assert begin < lost < end
    spans = [row for row in rows_of(spec) if "request" in row]
    kept = charts.served_window(data)
    inside = (data.engines.end > kept.start) & (data.engines.start < kept.end)
    assert len(spans) == inside.sum() <= charts.MOST_SPANS * 1.05


def test_the_overview_adds_up_to_the_busy_time_of_the_engines(run_with_loss):
    data = data_of_run(run_with_loss)
    cells = [row for row in rows_of(spec_of(charts.served(data))) if "share" in row]
    busy = dict.fromkeys(range(3), 0.0)
    for row in cells:
        busy[int(row["y1"])] += row["share"] * (row["to"] - row["t"]) * 1e3
    for lane, name in enumerate(data.lanes):
        length = data.end_ms - data.start_ms
        assert busy[lane] / length == pytest.approx(data.summary.peers[name].busy, abs=0.02)
