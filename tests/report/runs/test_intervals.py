import itertools

import pytest

from ls_edge.core.peer_reports import TrackSpan, Visit
from ls_edge.report.runs.intervals import Span, work_of
from tests.report.drawing import record


def test_spans_follow_each_other():
    # 2.5 ms of 12 are in no duration: they are those of three hops.
    hop = 2500 / 3
    works = list(work_of(record()))
    assert [work.holder for work in works] == ["", "a", "b", ""]
    spans = [span for work in works for span in work.spans]
    assert [(span.stage, span.block) for span in spans] == [
        ("stem", None), ("wire", None), ("queue", None), ("codec", None), ("engine", 0), ("engine", 1),
        ("wire", None), ("codec", None), ("engine", 2), ("wire", None), ("head", None),
    ]  # fmt: skip
    assert [span.end - span.start for span in spans] == pytest.approx(
        [1000, hop, 1000, 500, 2000, 2000, hop, 500, 2000, hop, 500]
    )
    assert (spans[0].start, spans[-1].end) == (100_000, pytest.approx(112_000))
    assert all(one.end == other.start for one, other in itertools.pairwise(spans))


def test_a_track_is_laid_out_by_its_joiners_clock():
    tracks = (
        TrackSpan(0, "a", (0, 1), 1000, 4000, 3500, 500, 2500),
        TrackSpan(0, "b", (2, 3), 1000, 8000, 5000, 500, 4000, 500),
        TrackSpan(0, "c", (), 1000, 5000, 9000, why="lost"),
    )
    visit = Visit("a", (0, 1), 1500, 2500, 500, 4000, tracks)
    works = list(work_of(record(visits=(visit,), latency_us=13_000)))
    assert [(work.holder, work.why) for work in works] == [("", ""), ("a", ""), ("b", ""), ("c", "lost"), ("", "")]
    # Arrival at 102.5; its clock counts from there.
    assert works[2].spans == [
        Span("wire", 103500, 104500),
        Span("queue", 104500, 105000),
        Span("codec", 105000, 105500),
        Span("engine", 105500, 107500, 2),
        Span("engine", 107500, 109500, 3),
        Span("wire", 109500, 110500),
    ]
    assert (works[1].spans[-1].stage, works[1].spans[-1].end) == ("wait", 111000)
    assert works[-1].spans == [Span("wire", 111000, 112500), Span("head", 112500, 113000)]
