import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_edge.core.records import TrackSpan, Visit
from ls_edge.report.runs.intervals import Span, intervals_of
from tests.report.drawing import record
from tests.report.waves import OTHER, OWN, UNUSED, critical, joined_record


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


def test_a_wave_is_laid_out_by_its_joiners_clock():
    way = intervals_of(joined_record(OWN, OTHER, UNUSED))
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


@pytest.mark.parametrize("why", ["lost", "late", "refused"])
def test_the_time_of_a_track_that_does_not_return_is_waiting(why):
    gone = TrackSpan(0, "b", (), 1000, 8000, 5000, why=why)
    way = intervals_of(joined_record(OWN, gone, waves=((((0, "a"), (1, "a")),),)))
    assert [span for span in critical(way) if span.stage == "wait"] == [
        Span("wait", 103500, 110500, "b", None, 1, True, why)
    ]
    assert Span("wait", 106500, 110500, "a", critical=False) in way.spans


def test_blocks_outside_of_tracks_lie_between_the_waves():
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
    way = intervals_of(joined_record(visit=visit, waves=waves, latency_us=16_500))
    engines = [(span.block, span.start, span.end) for span in critical(way) if span.block is not None]
    assert engines == [
        (1, 103500, 105500), (2, 106000, 108000), (4, 108500, 110500), (5, 111000, 113000), (6, 113000, 115000)
    ]  # fmt: skip


def test_a_holder_that_does_two_things_at_the_same_time_has_two_adjacent_rows():
    both = [
        TrackSpan(0, holder, (block,), 1000, end, 2000, 0, 1000)
        for holder, block, end in [("b", 2, 8000), ("c", 3, 7000), ("b", 4, 6000)]
    ]
    way = intervals_of(joined_record(OWN, *both))
    assert way.rows == ["a", "b", "b", "c"]
    assert {span.block: span.row for span in way.spans if span.block is not None} == {0: 0, 1: 0, 2: 1, 4: 2, 3: 3}


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
    return joined_record(latency_us=stem + head + inside + wire, stem_us=stem, head_us=head, visits=tuple(visits))


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
