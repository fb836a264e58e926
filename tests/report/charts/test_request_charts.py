from ls_edge.core.text import show_ms
from ls_edge.report import charts
from ls_edge.report.runs.intervals import intervals_of
from tests.report.drawing import data_of_run, rows_of, spec_of
from tests.report.waves import critical


def test_a_request_chart_has_all_its_spans(run_in_waves):
    data = data_of_run(run_in_waves)
    found = charts.request_timelines(data)
    assert [why for why, _, _ in found] == [why for why, _ in data.chosen]
    for (_, about, chart), (_, one) in zip(found, data.chosen, strict=True):
        rows = [row for row in rows_of(spec_of(chart)) if "took" in row]
        assert len(rows) == len(intervals_of(one).spans)
        assert {row["block"] for row in rows} - {None} == {block for block, _ in one.steps}
        assert about.startswith(show_ms(one.latency_us / 1e3))


def test_the_chart_marks_the_critical_path_by_a_line_and_not_by_color_alone(run_in_waves):
    data = data_of_run(run_in_waves)
    chosen = dict(data.chosen)
    assert any(track.why in ("lost", "late") for v in chosen["A track did not come back"].visits for track in v.tracks)
    drawn = {why: rows_of(spec_of(chart)) for why, _, chart in charts.request_timelines(data)}
    assert any(row.get("why") == "lost" for row in drawn["A track did not come back"])
    one = chosen["Median"]
    line = sorted((row for row in drawn["Median"] if "order" in row), key=lambda row: row["order"])
    assert [row["ms"] for row in line] == sorted(row["ms"] for row in line)
    # It visits a row for each holder on the path, from the source's first row back to it.
    rows = {row["y0"] for row in line}
    assert len(rows) == len({span.row for span in critical(intervals_of(one))})
    assert line[0]["y0"] == line[-1]["y0"] == min(rows)
    assert {row["path"] for row in drawn["Median"] if "path" in row} == {"yes", "no"}
