"""A small record with tracks, and its critical path."""

import msgspec

from ls_edge.core.records import RequestRecord, TrackSpan, Visit

OWN = TrackSpan(0, "a", (0, 1), 1000, 4000, 3500, 500, 2500)
OTHER = TrackSpan(0, "b", (2, 3), 1000, 8000, 5000, 500, 4000, 500)
UNUSED = TrackSpan(0, "c", (), 1000, 1000, 9000, why="no gain")


def joined_record(*tracks, visit=None, waves=None, latency_us=13_000, **changes):
    visit = visit or Visit("a", (0, 1), 1500, 2500, 500, 4000, tracks)
    waves = waves or ((((0, "a"), (1, "a")), ((2, "b"), (3, "b"))),)
    base = RequestRecord(
        id=0, image="a.png", label=1, prediction=1, latency_us=latency_us, degraded=False, error=None,
        skipped=(), attempts=1, logits=None, waves=waves, submitted_us=100_000, stem_us=1000, head_us=500,
        visits=(visit,),
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def critical(way):
    return sorted((span for span in way.spans if span.critical), key=lambda span: span.start)
