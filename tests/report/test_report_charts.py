"""What the charts are drawn from: exact spans, shares and windows."""

import itertools
import xml.etree.ElementTree as ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ls_edge.evaluation.run_summary import RunContext, summarise
from ls_edge.records import PeerEvent, PeerState, RequestRecord, TrackSpan, Visit
from ls_edge.report import accuracy, timeline
from ls_edge.report import request_timelines as ways
from ls_edge.report import sections as parts
from ls_edge.report.charts import caption_over_time, latency_distribution
from ls_edge.report.data import Away, RunData
from ls_edge.report.narrative import story
from ls_edge.report.spans import spans_of
from ls_edge.report.svg import Scale, Svg, log_ticks, shorten, show, show_ms, ticks
from ls_edge.report.svg_export import PICTURES
from ls_edge.report.terminal_timeline import WIDTH, sketch
from ls_edge.report.theme import block_colour, ink_on


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


def data_of(records, events=()):
    return RunData(summarise(records, events, RunContext()), records, events)


def test_spans_follow_each_other():
    # 2.5 ms of 12 are in no duration: they are those of three hops.
    hop = 2500 / 3
    spans = spans_of(record())
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
        ("By holder, one visit", "a", 2),
        ("By holder, one visit", "b", 1),
    ]
    assert rows[0][3]["engine"] == pytest.approx(5.0)
    assert sum(rows[0][3].values()) == pytest.approx((12.0 + 8.5) / 2)
    assert rows[4][3] == {"wire": pytest.approx((2.5 / 3 + 0.75) / 2), "queue": 1.0, "codec": 0.5, "engine": 4.0}


def test_slot_counts_for_plain_orders_and_waves():
    counts, skipped = accuracy.slot_counts(
        data_of(
            [
                record(waves=((((2, "a"), (0, "a")),),), skipped=(1,)),
                record(waves=((((0, "a"),), ((1, "b"),)), (((2, "a"),),))),
            ]
        )
    )
    assert counts.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert skipped.tolist() == [0, 1, 0]


def test_coverage_is_exact_and_adds_overlaps():
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    start, end = np.array([2.0, 5.0, 8.0]), np.array([4.0, 25.0, 9.0])
    assert timeline.coverage(start, end, edges).tolist() == pytest.approx([(2 + 5 + 1) / 10, 1.0, 0.5])


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
    assert data.away == [Away("a", 5.0, 9.0), Away("b", 20.0, 50.0)]
    assert [event.at_us for event in data.changes] == [5000, 9000, 20_000]
    assert "a was lost at 0.01 s and was back 4.0 ms later" in story(data)
    assert "b was lost at 0.02 s and did not come back" in story(data)


def test_the_window_holds_the_first_loss_and_few_enough_blocks(run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    window = timeline.pick_window(data, 120)
    lost = next(event.at_us / 1e3 for event in data.changes if event.state == PeerState.LOST)
    assert window.start < lost < window.end
    inside = ((data.engines.start >= window.start) & (data.engines.start < window.end)).sum()
    assert 90 <= inside <= 120
    assert timeline.pick_window(data, 10**9) == (data.start_ms, data.end_ms)


def test_requests_worth_a_look(run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    chosen = dict(ways.pick_requests(data))
    assert chosen["Retried"].attempts > 1
    assert chosen["Median"].latency_us / 1e3 == pytest.approx(run_with_loss.summary.latency_ms.p50, rel=0.02)
    assert len({id(r) for r in chosen.values()}) == len(chosen)


@pytest.mark.parametrize("run", ["run_with_loss", "run_in_waves"])
@pytest.mark.parametrize("width", [356, 880])
def test_every_text_stays_inside_its_drawing(request, run, width):
    run = request.getfixturevalue(run)
    data = RunData(run.summary, run.records, run.events)
    for draw in PICTURES.values():
        root = ElementTree.fromstring(draw(data, width).render("x"))
        height = float(root.get("viewBox").split()[3])
        for text in root.iter("text"):
            x, y, room = float(text.get("x")), float(text.get("y")), 5.2 * len(text.text)
            left = x - {"middle": room / 2, "end": room}.get(text.get("text-anchor"), 0)
            assert left > -4, (draw.__name__, text.text)
            assert left + room < width + 16, (draw.__name__, text.text)
            assert 0 < y <= height + 1, (draw.__name__, text.text)


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


@given(st.lists(requests, max_size=6), st.lists(events, max_size=6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([record(latency_us=0, visits=(Visit("a", (0,), 0, 0, 0),))], [])
def test_whatever_the_times_are_drawings_hold_only_numbers(records, happened):
    data = data_of(records, happened)
    for draw in PICTURES.values():
        drawing = draw(data, 356)
        if drawing is not None:
            text = drawing.render("x")
            ElementTree.fromstring(text)
            assert "nan" not in text
            assert "inf" not in text
            assert "e+" not in text
    story(data)
    parts.tracks_table(data)
    for one in records:
        assert all(len(line.plain) <= WIDTH for line in sketch(one))
        assert "".join(line.plain for line in sketch(one, ascii_only=True)).isascii()


def test_scales_and_ticks():
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(0, 1, 0, 10)(7) == 10
    assert ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 47, 4) == [20, 40]
    assert log_ticks(0.9, 120, 9) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(0.9, 120, 3) == [1, 10, 100]


def test_figures_in_words():
    assert [show_ms(v) for v in (None, 0.0, 0.424, 9.13, 131.4, 2400.0, 72000.0)] == [
        "\N{EN DASH}", "0 ms", "0.42 ms", "9.1 ms", "131 ms", "2.40 s", "72 s",
    ]  # fmt: skip
    assert show(123456) == "123,456"
    assert shorten("a" * 10 + "b" * 10, 9) == "aaaa…bbbb"


def test_svg_escapes():
    svg = Svg(10, 10, "<t>", "d & d")
    svg.text(0, 0, '<b>"&')
    svg.rect(0, 0, 1, 1, "x", tip="</title>")
    root = ElementTree.fromstring(svg.render("i"))
    assert root[0].text == "<t>"
    assert [element.text for element in root.iter("text")] == ['<b>"&']


def test_block_colours_grow_lighter():
    def luminance(colour):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for blocks in (2, 8, 12, 24):
        values = [luminance(block_colour(b, blocks)) for b in range(blocks)]
        assert values == sorted(values)
        assert len(set(values)) == blocks
    assert block_colour(0, 1).startswith("#")
    assert ink_on("#000000") == "on white"
    assert ink_on("#ffff00") == "on black"


@pytest.mark.parametrize("width", [356, 880])
@pytest.mark.parametrize(
    "figures",
    [(9, 9.2, 9.3), (9, 30, 31), (9, 9.5, 40), (1, 2000, 2300), (9, 120, 1300), (0.4, 0.42, 0.5), (4.5, 5.7, 9.4)],
)  # fmt: skip
def test_percentile_labels_do_not_touch(run_with_loss, figures, width):
    """The narrow drawing is what a phone of 390 pixels shows."""
    steps = [figures[0]] * 360 + [figures[1]] * 34 + [figures[2]] * 6
    records = [
        msgspec.structs.replace(record, latency_us=round(1000 * latency), error=None, prediction=1)
        for record, latency in zip(run_with_loss.records, steps, strict=True)
    ]
    summary = summarise(records, run_with_loss.events, run_with_loss.context)
    svg = latency_distribution(RunData(summary, records, run_with_loss.events), width)
    boxes = []
    for element in ElementTree.fromstring(svg.render("i")).iter("text"):
        if element.text.startswith(("p50", "p95", "p99")):
            room, at = 0.64 * 12 * len(element.text), float(element.get("x"))
            boxes.append((at - room if element.get("text-anchor") == "end" else at, room, float(element.get("y"))))
    assert len(boxes) == 3
    for index, (begin, room, y) in enumerate(boxes):
        assert begin >= 0
        assert begin + room <= width
        for other, other_room, other_y in boxes[index + 1 :]:
            assert abs(y - other_y) >= 12 or begin + room <= other or other + other_room <= begin


def test_one_of_anything_is_singular():
    data = data_of([record()])
    text = story(data) + caption_over_time(data) + latency_distribution(data).description
    assert text.startswith("The one image was answered through 2 peers, in 12.0 ms.")
    assert "The dot is the one answer." in text
    assert "Histogram of 1 answer." in text
