"""Data of the charts: exact spans, shares and windows."""

import copy
import html
import io
import itertools
import json

import msgspec
import numpy as np
import pytest
from altair.utils.schemapi import debug_mode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ls_edge.core.records import PeerEvent, PeerState, RequestRecord, RunContext, TrackSpan, Visit
from ls_edge.core.text import shorten, show, show_ms
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report import charts
from ls_edge.report.charts.specification import svg_of
from ls_edge.report.html import environment
from ls_edge.report.runs.intervals import intervals_of
from ls_edge.report.runs.statistics import Away, RunData, coverage, pick_window
from ls_edge.report.runs.tracks import track_table
from ls_edge.report.tables import summary_table
from ls_edge.report.theme import CHART_CONFIG


def record(**changes):
    base = RequestRecord(
        id=0,
        image="a.png",
        label=1,
        prediction=1,
        latency_us=12_000,
        degraded=False,
        error=None,
        waves=((((0, "a"), (1, "a"), (2, "b")),),),
        skipped=(),
        attempts=1,
        logits=None,
        submitted_us=100_000,
        stem_us=1000,
        head_us=500,
        visits=(Visit("a", (0, 1), 1000, 4000, 500), Visit("b", (2,), 0, 2000, 500)),
    )
    return msgspec.structs.replace(base, **changes)


def narrative(data):
    """Return the sentences that a page opens with."""
    return html.unescape(str(environment().get_template("narrative.html.j2").module.narrative(data)))


def data_of(records, events=()):
    return RunData(summarize(records, events, RunContext()), records, events)


def test_spans_follow_each_other():
    # 2.5 ms of 12 are in no duration: they are those of three hops.
    hop = 2500 / 3
    spans = intervals_of(record()).spans
    assert [(span.stage, span.holder, span.block) for span in spans] == [
        ("stem", "", None), ("wire", "a", None), ("queue", "a", None), ("codec", "a", None), ("engine", "a", 0),
        ("engine", "a", 1), ("wire", "b", None), ("codec", "b", None), ("engine", "b", 2), ("wire", "", None),
        ("head", "", None),
    ]  # fmt: skip
    assert [span.end - span.start for span in spans] == pytest.approx(
        [1000, hop, 1000, 500, 2000, 2000, hop, 500, 2000, hop, 500]
    )
    assert (spans[0].start, spans[-1].end) == (100_000, pytest.approx(112_000))
    assert all(one.end == other.start for one, other in itertools.pairwise(spans))


def test_stage_means_by_hop_and_holder():
    rows = data_of([record(), record(visits=record().visits[:1], latency_us=8500)]).stage_means
    assert [(group, name, count) for group, name, count, _ in rows] == [
        ("All answers", "one request", 2),
        ("By hop", "hop 1", 2),
        ("By hop", "hop 2", 1),
        ("By hop", "back to the source", 2),
        ("By holder, visits", "a", 2),
        ("By holder, visits", "b", 1),
    ]
    assert rows[0][3]["engine"] == pytest.approx(5.0)
    assert sum(rows[0][3].values()) == pytest.approx((12.0 + 8.5) / 2)
    assert rows[4][3] == {"wire": pytest.approx((2.5 / 3 + 0.75) / 2), "queue": 1.0, "codec": 0.5, "engine": 4.0}


def test_slot_counts_for_plain_orders_and_waves():
    data = data_of(
        [
            record(waves=((((2, "a"), (0, "a")),),), skipped=(1,)),
            record(waves=((((0, "a"),), ((1, "b"),)), (((2, "a"),),))),
        ]
    )
    counts, skipped = data.slots
    assert counts.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert skipped.tolist() == [0, 1, 0]


def test_coverage_is_exact_and_adds_overlaps():
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    start, end = np.array([2.0, 5.0, 8.0]), np.array([4.0, 25.0, 9.0])
    assert coverage(start, end, edges).tolist() == pytest.approx([(2 + 5 + 1) / 10, 1.0, 0.5])


def test_why_blocks_were_skipped_is_reported():
    why = "block 1 of band [1-2] (2 of 2) had no reachable holder"
    gone = [record(id=n, degraded=True, skipped=(1,), why_skipped=why) for n in range(3)]
    late = record(id=3, degraded=True, skipped=(2,), why_skipped="block 2 of band [1-2] (2 of 2) did not run in time")
    data = data_of([*gone, late, record(id=4)])
    assert data.summary.skips.reasons == {why: 3, late.why_skipped: 1}
    assert f"4 answers had to skip blocks, 3 of them because {why}." in narrative(data)
    assert f"3 answers had to skip blocks because {why}." in narrative(data_of(gone))
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(data.summary))
    assert f"3 answers: {why}" in console.file.getvalue()


def test_times_away():
    events = [
        PeerEvent(0, "a", PeerState.ALIVE),
        PeerEvent(0, "b", PeerState.ALIVE),
        PeerEvent(5000, "a", PeerState.LOST),
        PeerEvent(6000, "a", PeerState.LOST),
        PeerEvent(9000, "a", PeerState.ALIVE),
        PeerEvent(20000, "b", PeerState.LOST),
    ]
    data = data_of([record(submitted_us=0, latency_us=50_000)], events)
    assert data.away == [Away("a", 5.0, 9.0, returned=True), Away("b", 20.0, 50.0)]
    assert [event.at_us for event in data.changes] == [5000, 9000, 20_000]
    assert "a was lost at 0.01 s and was back 4.0 ms later" in narrative(data)
    assert "b was lost at 0.02 s and did not come back" in narrative(data)


def test_the_window_holds_the_first_loss_and_few_enough_blocks(run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    window = pick_window(data, 120)
    lost = next(event.at_us / 1e3 for event in data.changes if event.state == PeerState.LOST)
    assert window.start < lost < window.end
    inside = ((data.engines.start >= window.start) & (data.engines.start < window.end)).sum()
    assert 90 <= inside <= 120
    assert pick_window(data, 10**9) == (data.start_ms, data.end_ms)


def test_requests_worth_a_look(run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    chosen = dict(data.chosen)
    assert chosen["Retried"].attempts > 1
    assert chosen["Median"].latency_us / 1e3 == pytest.approx(run_with_loss.summary.latency_ms.p50, rel=0.02)
    assert len({id(r) for r in chosen.values()}) == len(chosen)


def rows_of(spec):
    """All rows of data that a specification holds."""
    return [row for rows in spec["datasets"].values() for row in rows]


def spec_of(chart):
    """The specification of a chart, which Altair has compared with Vega-Lite's schema."""
    return json.loads(json.dumps(charts.spec_of(chart), allow_nan=False))


def histogram(data):
    return charts.latency_histogram(data.latency, data.summary.latency_ms)


def data_of_run(run):
    return RunData(run.summary, run.records, run.events)


def test_the_histogram_counts_every_answer(run_with_loss):
    spec = spec_of(histogram(data_of_run(run_with_loss)))
    rows = rows_of(spec)
    assert sum(row.get("answers", 0) for row in rows) == len(run_with_loss.records)
    figures = run_with_loss.summary.latency_ms
    assert [row["text"] for row in rows if "text" in row] == [
        f"p50 {show_ms(figures.p50)}", f"p95 {show_ms(figures.p95)}", f"p99 {show_ms(figures.p99)}"
    ]  # fmt: skip
    assert max(row["share"] for row in rows if "share" in row) == 1.0


def test_what_happened_stands_in_the_chart_over_time(run_with_loss):
    rows = rows_of(spec_of(charts.latency_over_time(data_of_run(run_with_loss))))
    assert {row["request"] for row in rows if "request" in row} == {r.id for r in run_with_loss.records}
    assert {row["text"] for row in rows if "kind" in row} == {"board-b lost", "board-b back"}
    (away,) = [row for row in rows if row.get("peer") == "board-b"]
    lost, back = (event.at_us / 1e6 for event in run_with_loss.events[-2:])
    assert (away["t"], away["to"]) == (pytest.approx(lost, abs=1e-4), pytest.approx(back, abs=1e-4))


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


def test_the_overview_adds_up_to_what_the_engines_were_busy(run_with_loss):
    data = data_of_run(run_with_loss)
    cells = [row for row in rows_of(spec_of(charts.served(data))) if "share" in row]
    busy = dict.fromkeys(range(3), 0.0)
    for row in cells:
        busy[int(row["y1"])] += row["share"] * (row["to"] - row["t"]) * 1e3
    for lane, name in enumerate(data.lanes):
        length = data.end_ms - data.start_ms
        assert busy[lane] / length == pytest.approx(data.summary.peers[name].busy, abs=0.02)


def test_a_request_chart_has_all_its_spans(run_in_waves):
    data = data_of_run(run_in_waves)
    found = charts.request_timelines(data)
    assert [why for why, _, _ in found] == [why for why, _ in data.chosen]
    for (_, about, chart), (_, one) in zip(found, data.chosen, strict=True):
        rows = [row for row in rows_of(spec_of(chart)) if "took" in row]
        assert len(rows) == len(intervals_of(one).spans)
        assert {row["block"] for row in rows} - {None} == {block for block, _ in one.steps}
        assert about.startswith(show_ms(one.latency_us / 1e3))


def test_the_slots_in_the_heat_map(run_with_loss):
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


def test_long_runs_make_no_larger_specifications(simulated):
    run = simulated(3000, seed=1)
    data = data_of_run(run)
    for draw, limit in (
        (charts.latency_over_time, 700),
        (charts.served, charts.MOST_SPANS * 1.1 + charts.MOST_CELLS * 1.5),
        (histogram, 300),
    ):
        assert len(rows_of(spec_of(draw(data)))) <= limit


times = st.integers(0, 10**10)
few_blocks = st.lists(st.integers(0, 30), max_size=3).map(tuple)
tracks = st.builds(
    TrackSpan, st.integers(0, 2), st.sampled_from("abc"), few_blocks, times, times, times, times, times, times,
    st.sampled_from(["", "", "no gain", "lost", "late", "refused", "draining"]),
)  # fmt: skip
visits = st.builds(
    Visit, st.sampled_from("abc"), few_blocks, times, times, times, times,
    st.lists(tracks, max_size=5).map(tuple),
)  # fmt: skip
waves = st.just(()) | st.just(((((3, "b"), (1, "b")), ((7, "c"),)), (((0, "a"),),)))
requests = st.builds(
    record,
    latency_us=times,
    submitted_us=times,
    stem_us=times,
    visits=st.lists(visits, max_size=3).map(tuple),
    waves=waves,
    error=st.sampled_from([None, None, "Overloaded: x"]),
    label=st.sampled_from([None, 1, 2]),
    attempts=st.integers(1, 3),
)
events = st.builds(PeerEvent, times, st.sampled_from("abc"), st.sampled_from(PeerState))


DRAWN = (
    histogram, charts.latency_over_time, charts.stage_breakdown, charts.served,
    charts.accuracy_by_skips, charts.slot_heatmap,
)  # fmt: skip


@given(st.lists(requests, max_size=6), st.lists(events, max_size=6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([record(latency_us=0, visits=(Visit("a", (0,), 0, 0, 0),))], [])
def test_whatever_the_times_are_specifications_hold_only_numbers(records, happened):
    """Other tests compare specifications with the schema, which takes most of the time and ignores their values."""
    data = data_of(records, happened)
    with debug_mode(False):
        drawn = [draw(data) for draw in DRAWN]
        drawn += [chart for _, _, chart in charts.request_timelines(data)]
        for chart in drawn:
            if chart is not None:
                json.dumps(chart.to_dict(validate=False), allow_nan=False)
    narrative(data)
    track_table(records, data.lanes)


def test_figures_in_words():
    assert [show_ms(v) for v in (None, 0.0, 0.424, 9.13, 131.4, 2400.0, 72000.0)] == [
        "\N{EN DASH}", "0 ms", "0.42 ms", "9.1 ms", "131 ms", "2.40 s", "72 s",
    ]  # fmt: skip
    assert show(123456) == "123,456"
    assert shorten("a" * 10 + "b" * 10, 9) == "aaaa…bbbb"


def test_one_of_anything_is_singular():
    data = data_of([record()])
    assert narrative(data).startswith("The one image was answered through 2 peers, in 12.0 ms.")
    assert "Histogram of 1 answer." in spec_of(histogram(data))["description"]


def test_a_drawing_leaves_the_charts_of_pages_as_they_are():
    before = copy.deepcopy(CHART_CONFIG)
    svg_of(histogram(data_of([record()])))
    assert before == CHART_CONFIG
