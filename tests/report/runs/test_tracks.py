"""Waves of tracks in reports: intervals, critical path, and statistics of tracks by peer."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_edge.core.records import RequestRecord, RunContext, TrackSpan, Visit
from ls_edge.core.text import NOTHING
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report import charts
from ls_edge.report.html import write_report
from ls_edge.report.runs.intervals import Span, intervals_of
from ls_edge.report.runs.statistics import RunData
from ls_edge.report.runs.tracks import track_table

OWN = TrackSpan(0, "a", (0, 1), 1000, 4000, 3500, 500, 2500)
OTHER = TrackSpan(0, "b", (2, 3), 1000, 8000, 5000, 500, 4000, 500)
UNUSED = TrackSpan(0, "c", (), 1000, 1000, 9000, why="no gain")


def record(*tracks, visit=None, waves=None, latency_us=13_000, **changes):
    visit = visit or Visit("a", (0, 1), 1500, 2500, 500, 4000, tracks)
    waves = waves or ((((0, "a"), (1, "a")), ((2, "b"), (3, "b"))),)
    base = RequestRecord(
        id=0, image="a.png", label=1, prediction=1, latency_us=latency_us, degraded=False, error=None,
        skipped=(), attempts=1, logits=None, waves=waves, submitted_us=100_000, stem_us=1000, head_us=500,
        visits=(visit,),
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def data_of(*records):
    return RunData(summarize(records, [], RunContext()), records, [])


def critical(way):
    return sorted((span for span in way.spans if span.critical), key=lambda span: span.start)


def test_a_wave_is_laid_out_by_its_joiners_clock():
    way = intervals_of(record(OWN, OTHER, UNUSED))
    assert way.rows == ["a", "b"]
    # Arrival at 102.5; its clock counts from there.
    assert critical(way) == [
        Span("stem", 100000, 101000),
        Span("wire", 101000, 102500, "a"),
        Span("queue", 102500, 103500, "a"),
        Span("wire", 103500, 104500, "b", None, 1),
        Span("queue", 104500, 105000, "b", None, 1),
        Span("codec", 105000, 105500, "b", None, 1),
        Span("engine", 105500, 107500, "b", 2, 1),
        Span("engine", 107500, 109500, "b", 3, 1),
        Span("wire", 109500, 110500, "b", None, 1),
        Span("codec", 110500, 111000, "a"),
        Span("wire", 111000, 112500),
        Span("head", 112500, 113000),
    ]
    assert [span for span in way.spans if not span.critical] == [
        Span("queue", 103500, 104000, "a", critical=False),
        Span("engine", 104000, 105250, "a", 0, critical=False),
        Span("engine", 105250, 106500, "a", 1, critical=False),
        Span("wait", 106500, 110500, "a", critical=False),
    ]


def test_an_answer_counts_its_critical_path_and_each_holder_its_own_times():
    data = data_of(record(OWN, OTHER, UNUSED))
    rows = {(group, name): means for group, name, _, means in data.stage_means}
    whole = {"stem": 1.0, "wire": 5.0, "queue": 1.5, "codec": 1.0, "engine": 4.0, "head": 0.5}
    assert rows["All answers", "one request"] == whole
    assert sum(whole.values()) == 13.0
    assert sum(rows["By hop", "hop 1"].values()) == 13.0 - 1.0 - 0.5 - 1.5
    assert rows["By holder, visits", "a"] == {"wire": 1.5, "queue": 1.5, "codec": 0.5, "engine": 2.5, "wait": 4.0}
    assert rows["By holder, tracks", "b"] == {"wire": 2.0, "queue": 0.5, "codec": 0.5, "engine": 4.0}
    assert {data.lanes[lane] for lane in data.engines.lane} == {"a", "b"}
    assert data.summary.peers["b"].busy == pytest.approx(4.0 / 13.0)
    assert data.summary.peers["a"].busy == pytest.approx(2.5 / 13.0)


def test_the_joiners_own_track_may_be_the_critical_one():
    own = msgspec.structs.replace(OWN, end_us=8500, engine_us=7000)
    visit = Visit("a", (0, 1), 1500, 7000, 500, 0, (own, OTHER))
    way = intervals_of(record(visit=visit))
    assert [span.block for span in critical(way) if span.block is not None] == [0, 1]
    assert not any(span.stage == "wait" for span in way.spans)


@pytest.mark.parametrize("why", ["lost", "late", "refused"])
def test_waiting_for_a_track_that_does_not_come_is_waiting(why):
    gone = TrackSpan(0, "b", (), 1000, 8000, 5000, why=why)
    way = intervals_of(record(OWN, gone, waves=((((0, "a"), (1, "a")),),)))
    assert [span for span in critical(way) if span.stage == "wait"] == [
        Span("wait", 103500, 110500, "b", None, 1, True, why)
    ]
    assert Span("wait", 106500, 110500, "a", critical=False) in way.spans


def test_a_track_that_others_run_after_it_was_lost_follows_it_on_the_path():
    gone = TrackSpan(0, "b", (), 1000, 5000, 5000, why="lost")
    again = TrackSpan(0, "c", (2, 3), 5000, 8000, 3000, 0, 3000)
    path = critical(intervals_of(record(OWN, gone, again)))
    assert [(span.stage, span.holder) for span in path if span.row] == [("wait", "b"), ("engine", "c"), ("engine", "c")]


def test_blocks_outside_of_tracks_stand_between_the_waves():
    tracks = (
        TrackSpan(0, "a", (0,), 1000, 3000, 2000, 0, 2000),
        TrackSpan(0, "b", (1,), 1000, 4000, 2000, 0, 2000),
        TrackSpan(1, "a", (3,), 6000, 8000, 2000, 0, 2000),
        TrackSpan(1, "b", (4,), 6000, 9000, 2000, 0, 2000),
    )
    waves = (
        (((0, "a"),), ((1, "b"),)), (((2, "a"),),), (((3, "a"),), ((4, "b"),)), (((5, "a"), (6, "a")),)
    )  # fmt: skip
    visit = Visit("a", (0, 2, 3, 5, 6), 1000, 10000, 0, 2000, tracks)
    way = intervals_of(record(visit=visit, waves=waves, latency_us=16_500))
    engines = [(span.block, span.start, span.end) for span in critical(way) if span.block is not None]
    assert engines == [
        (1, 103500, 105500), (2, 106000, 108000), (4, 108500, 110500), (5, 111000, 113000), (6, 113000, 115000)
    ]  # fmt: skip


def test_a_holder_that_does_two_things_at_once_has_two_rows_that_stand_together():
    both = [
        TrackSpan(0, holder, (block,), 1000, end, 2000, 0, 1000)
        for holder, block, end in [("b", 2, 8000), ("c", 3, 7000), ("b", 4, 6000)]
    ]
    way = intervals_of(record(OWN, *both))
    assert way.rows == ["a", "b", "b", "c"]
    assert {span.block: span.row for span in way.spans if span.block is not None} == {0: 0, 1: 0, 2: 1, 4: 2, 3: 3}


def test_where_tracks_add_up_to_more_than_durations_the_wire_has_less():
    visit = Visit("a", (0, 1), 1000, 2500, 0, 3500, (OWN, OTHER))
    path = critical(intervals_of(record(visit=visit)))
    assert sum(span.end - span.start for span in path) == 13_000
    assert (path[1].stage, path[1].end - path[1].start) == ("wire", (13_000 - 1500 - 8000) / 2)


times = st.integers(0, 1_000_000)


@st.composite
def consistent(draw):
    """Draw a record as a source makes it: the wire is what remains of the latency."""
    visits = []
    for _ in range(draw(st.integers(1, 3))):
        joiner = draw(st.sampled_from("abc"))
        rows = []
        for wave in range(draw(st.integers(0, 3))):
            begin = draw(times)
            for _ in range(draw(st.integers(1, 4))):
                why = draw(st.sampled_from(["", "", "", "lost", "late", "no gain"]))
                blocks = () if why else tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
                inside = [draw(times) for _ in range(3)]
                end = begin + sum(inside) + draw(times)
                rows.append(TrackSpan(wave, draw(st.sampled_from("abc")), blocks, begin, end, 1000, *inside, why))
        parts = [draw(times) for _ in range(4)]
        visits.append(Visit(joiner, tuple(draw(st.lists(st.integers(0, 11), max_size=4))), *parts,
                            tuple(rows)))  # fmt: skip
    inside = sum(max([visit.total_us, *(track.end_us for track in visit.tracks)]) for visit in visits)
    wire, stem, head = (draw(times) for _ in range(3))
    return record(latency_us=stem + head + inside + wire, stem_us=stem, head_us=head, visits=tuple(visits))


@given(consistent())
@settings(max_examples=120, deadline=None)
def test_critical_spans_follow_each_other_and_add_up_to_the_latency(one):
    way = intervals_of(one)
    clock = one.submitted_us
    for span in critical(way):
        assert span.start == pytest.approx(clock, abs=1e-3)
        clock = span.end
    assert clock == pytest.approx(one.submitted_us + one.latency_us, rel=1e-9)
    for span in way.spans:
        assert way.rows[span.row] == span.holder or (span.holder == "" or way.rows == [""])
        assert one.submitted_us - 1e-3 <= span.start <= span.end


def rows_of(chart):
    return [row for rows in charts.spec_of(chart)["datasets"].values() for row in rows]


def test_the_chart_marks_the_path_by_a_line_and_not_by_colour_alone(run_in_waves):
    data = RunData(run_in_waves.summary, run_in_waves.records, run_in_waves.events)
    chosen = dict(data.chosen)
    assert any(track.why in ("lost", "late") for v in chosen["A track did not come back"].visits for track in v.tracks)
    drawn = {why: rows_of(chart) for why, _, chart in charts.request_timelines(data)}
    assert any(row.get("why") == "lost" for row in drawn["A track did not come back"])
    one = chosen["Median"]
    line = sorted((row for row in drawn["Median"] if "order" in row), key=lambda row: row["order"])
    assert [row["ms"] for row in line] == sorted(row["ms"] for row in line)
    # It visits a row for each holder on the path, from the source's first row back to it.
    rows = {row["y0"] for row in line}
    assert len(rows) == len({span.row for span in critical(intervals_of(one))})
    assert line[0]["y0"] == line[-1]["y0"] == min(rows)
    assert {row["path"] for row in drawn["Median"] if "path" in row} == {"yes", "no"}


def test_a_run_of_plain_orders_has_none_of_it(tmp_path, run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    for _, _, chart in charts.request_timelines(data):
        assert not [row for row in rows_of(chart) if "order" in row]
    assert track_table(run_with_loss.records, data.lanes)[1] == []


def test_how_tracks_fared():
    late = TrackSpan(0, "b", (), 1000, 8000, 5000, why="late")
    records = [record(OWN, OTHER, UNUSED), record(OWN, OTHER, UNUSED), record(OWN, late)]
    head, rows = track_table(records, ["b", "nobody"])
    assert head == ("Peer", "Tracks", "Own", "Blocks", "Expected", "Took", "Not summed", "Given none")
    assert rows == [
        ("b", "2", "0", "4", "5.0 ms", "7.0 ms", "1 late", NOTHING),
        ("a", "3", "3", "6", "3.5 ms", "3.0 ms", NOTHING, NOTHING),
        ("c", "0", "0", "0", NOTHING, NOTHING, NOTHING, "no gain 2 times: a block there 9.0 ms, the wave took 7.0 ms"),
    ]  # fmt: skip


@pytest.mark.parametrize(("waves", "took"), [(1, "12.0 ms"), (2, "6.0 ms"), (3, "4.0 ms")])
def test_where_nothing_was_split_the_wave_took_what_its_blocks_took(waves, took):
    visit = Visit("a", (0, 1, 2, 3, 4, 5), 500, 12000, 0, 0, (UNUSED,))
    one = record(visit=visit, latency_us=15_000, waves=((tuple((block, "a") for block in range(6)),),))
    assert intervals_of(one).rows == [""]
    _, rows = track_table([one], [], waves)
    assert [row[-1] for row in rows] == [f"no gain once: a block there 9.0 ms, the wave took {took}"]


def test_a_report_of_waves_says_so(tmp_path, run_in_waves):
    path = tmp_path / "r.html"
    write_report(path, run_in_waves.summary, run_in_waves.records, run_in_waves.events)
    text = path.read_text().replace("\u00a0", " ")
    for said in ("Tracks", "3 lost", "2 late", "times: a block there 2.40 ms", "the line below the bars follows"):
        assert said in text
    data = RunData(run_in_waves.summary, run_in_waves.records, run_in_waves.events)
    assert f"In {len(run_in_waves.records)} answers, blocks ran in parallel, in up to 3 tracks at a time" in text
    means = data.stage_means[0][3]
    assert sum(means.values()) == pytest.approx(data.summary.latency_ms.mean, rel=0.006)
