import pytest

from ls_edge.core.records import TrackSpan, Visit
from ls_edge.core.text import NOTHING
from ls_edge.report import charts
from ls_edge.report.html import write_report
from ls_edge.report.runs.intervals import intervals_of
from ls_edge.report.runs.statistics import RunData
from ls_edge.report.runs.tracks import track_table
from tests.report.waves import OTHER, OWN, UNUSED, joined_record


def rows_of(chart):
    return [row for rows in charts.spec_of(chart)["datasets"].values() for row in rows]


def test_a_run_of_plain_orders_has_no_tracks(tmp_path, run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    for _, _, chart in charts.request_timelines(data):
        assert not [row for row in rows_of(chart) if "order" in row]
    assert track_table(run_with_loss.records, data.lanes)[1] == []


def test_the_table_counts_tracks_by_outcome():
    late = TrackSpan(0, "b", (), 1000, 8000, 5000, why="late")
    records = [joined_record(OWN, OTHER, UNUSED), joined_record(OWN, OTHER, UNUSED), joined_record(OWN, late)]
    head, rows = track_table(records, ["b", "nobody"])
    assert head == ("Peer", "Tracks", "Own", "Blocks", "Expected", "Took", "Not summed", "Given none")
    assert rows == [
        ("b", "2", "0", "4", "5.0 ms", "7.0 ms", "1 late", NOTHING),
        ("a", "3", "3", "6", "3.5 ms", "3.0 ms", NOTHING, NOTHING),
        ("c", "0", "0", "0", NOTHING, NOTHING, NOTHING, "no gain 2 times: a block there 9.0 ms, the wave took 7.0 ms"),
    ]  # fmt: skip


@pytest.mark.parametrize(("waves", "took"), [(1, "12.0 ms"), (2, "6.0 ms"), (3, "4.0 ms")])
def test_a_wave_without_tracks_took_the_time_of_its_blocks(waves, took):
    visit = Visit("a", (0, 1, 2, 3, 4, 5), 500, 12000, 0, 0, (UNUSED,))
    one = joined_record(visit=visit, latency_us=15_000, waves=((tuple((block, "a") for block in range(6)),),))
    assert intervals_of(one).rows == [""]
    _, rows = track_table([one], [], waves)
    assert [row[-1] for row in rows] == [f"no gain once: a block there 9.0 ms, the wave took {took}"]


def test_a_page_of_a_run_in_waves_has_a_table_of_tracks(tmp_path, run_in_waves):
    path = tmp_path / "r.html"
    write_report(path, run_in_waves.summary, run_in_waves.records, run_in_waves.events)
    text = path.read_text().replace("\u00a0", " ")
    for said in ("Tracks", "3 lost", "2 late", "times: a block there 2.40 ms", "the line below the bars follows"):
        assert said in text
    data = RunData(run_in_waves.summary, run_in_waves.records, run_in_waves.events)
    assert f"In {len(run_in_waves.records)} answers, blocks ran in parallel, in up to 3 tracks at a time" in text
    means = data.stage_means[0][3]
    assert sum(means.values()) == pytest.approx(data.summary.latency_ms.mean, rel=0.006)
