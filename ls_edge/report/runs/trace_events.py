"""Chrome trace events of a run, for https://ui.perfetto.dev and chrome://tracing.

The format is the JSON Object Format of the "Trace Event Format" of Chromium's trace viewer. The source and each peer
have a process row. The work of a process on a request occupies one lane (a "thread"). A process that works on two
requests or two tracks at the same time has several lanes, so slices in a lane overlap only if one contains the other.

Times are those of :mod:`ls_edge.report.runs.intervals`, on the source's clock. Durations are measured; their positions
within a visit and the time on the wire are inferred, as ``otherData`` in the file states.

Events are generated and written one by one; memory holds only the records of the run and the events of the requests in
flight.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.errors import printable
from ls_edge.core.files import open_output
from ls_edge.core.parts import part_name
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.runs.intervals import SOURCE, Work, work_of
from ls_edge.version import __version__

_SOURCE_PID = 1
_NOTES = {
    "clock": "the source's, microseconds since the start of the run; clocks of devices are not compared",
    "measured": "submission and latency of each request, stem and head, by the source; queue, engine, codec and wait "
    "of each visit and track, by its holder, as durations; begin and end of the tracks of others, by the joiner",
    "inferred": "wire: the rest of a latency, in equal parts over its hops, and the time of a track that its holder "
    "does not account for, in equal parts there and back; the start of a visit follows from it. Within a visit: "
    "queue, codec, engine, wait, one after the other; blocks of one visit or track share its engine time in equal "
    "parts",
    "not_recorded": "the size of the batch in which an engine ran a block",
}

_Event = dict[str, Any]


def write_trace_events(
    path: str | Path, summary: RunSummary, records: Sequence[RequestRecord], events: Sequence[PeerEvent]
) -> None:
    """Write the trace events of a run atomically; raise as :func:`ls_edge.core.files.write_output` does."""
    about = {
        "ls_edge": __version__,
        "bundle_id": summary.bundle_id,
        "model": summary.model,
        "policy": summary.policy,
        **_NOTES,
    }
    encode = msgspec.json.encode
    with open_output(path) as stream:
        stream.write('{"displayTimeUnit":"ms",\n"otherData":' + encode(about).decode() + ',\n"traceEvents":[\n')
        between = ""
        for event in trace_events(records, events, summary.peers):
            stream.write(between + encode(event).decode())
            between = ",\n"
        stream.write("\n]}\n")


def trace_events(
    records: Sequence[RequestRecord], events: Sequence[PeerEvent] = (), peers: Iterable[str] = ()
) -> Iterator[_Event]:
    """Yield the events of a run; ``peers`` get the first process rows, other processes follow as they appear."""
    rows = _ProcessRows()
    for name in (SOURCE, *peers):
        yield from rows.process(name)
    for event in events:
        yield from rows.process(event.peer)
        mark = {"name": event.state.value, "cat": "peer", "ph": "i", "s": "p", "ts": event.at_us, "tid": 0}
        yield {**mark, "pid": rows.pids[event.peer], "args": {"why": printable(event.why)}}
    # Later requests have later work, so all work that begin before the next submission can be assigned to lanes.
    waiting: list[tuple[int, int, RequestRecord, Work]] = []
    count = itertools.count()
    for record in sorted(records, key=lambda one: one.submitted_us):
        while waiting and waiting[0][0] < record.submitted_us * 1000:
            yield from rows.slices(*heapq.heappop(waiting)[2:])
        yield from _request(record)
        for work in work_of(record):
            if work.spans:
                heapq.heappush(waiting, (_ns(work.spans[0].start), next(count), record, work))
    while waiting:
        yield from rows.slices(*heapq.heappop(waiting)[2:])


class _ProcessRows:
    """Process numbers and their lanes."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}
        """Time in ns from which each lane is free, by process."""

    def process(self, name: str) -> Iterator[_Event]:
        """Yield the metadata of a new process."""
        if name not in self.pids:
            pid = self.pids[name] = len(self.pids) + _SOURCE_PID
            self._free[name] = []
            yield _metadata("process_name", pid, 0, {"name": printable(name) or "source"})
            yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})

    def slices(self, record: RequestRecord, work: Work) -> Iterator[_Event]:
        """Yield the slices of some work in a free lane, preceded by the metadata of a new process or lane."""
        yield from self.process(work.holder)
        pid, free, spans = self.pids[work.holder], self._free[work.holder], work.spans
        start, end = _ns(spans[0].start), _ns(spans[-1].end)
        lane = next((lane for lane, since in enumerate(free) if since <= start), len(free))
        if lane == len(free):
            free.append(end)
            yield _metadata("thread_name", pid, lane + 1, {"name": f"lane {lane + 1}"})
        free[lane] = end
        place = {"pid": pid, "tid": lane + 1}
        if work.holder != SOURCE:
            blocks = [span.block for span in spans if span.block is not None]
            about = {"request": record.id, "blocks": blocks, "attempts": record.attempts}
            name = f"request {record.id}" + (f" ({work.why})" if work.why else "")
            yield _slice(name, "visit", start, end, place, about)
        for span in spans:
            name, about = span.stage, {"request": record.id}
            if span.block is not None:
                name = part_name(span.block)
                about |= {"block": span.block, "attempts": record.attempts}
            yield _slice(name, span.stage, _ns(span.start), _ns(span.end), place, about)
        # An arrow from the stem through all processes to the head.
        flow = {"name": "request", "cat": "flow", "id": record.id, **place}
        if work.holder != SOURCE or spans[0].stage == "stem":
            yield {**flow, "ph": "t" if work.holder != SOURCE else "s", "ts": start / 1000}
        else:
            yield {**flow, "ph": "f", "bp": "e", "ts": _ns(spans[-1].start) / 1000}


def _metadata(kind: str, pid: int, tid: int, arguments: Mapping[str, Any]) -> _Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _slice(name: str, category: str, start: int, end: int, place: Mapping[str, int], arguments: _Event) -> _Event:
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"name": name, "cat": category, "ph": "X", **times, **place, "args": arguments}


def _request(record: RequestRecord) -> Iterator[_Event]:
    """Yield a request as an asynchronous slice of the source, linked to its parts by its id."""
    about: dict[str, Any] = {
        "request": record.id,
        "image": printable(record.image),
        "attempts": record.attempts,
        "degraded": record.degraded,
        "skipped": record.skipped,
    }
    if record.error is not None:
        about["error"] = printable(record.error)
    common = {"name": "request", "cat": "request", "id": record.id, "pid": _SOURCE_PID, "tid": 0}
    yield {**common, "ph": "b", "ts": record.submitted_us, "args": about}
    yield {**common, "ph": "e", "ts": record.submitted_us + record.latency_us}


def _ns(microseconds: float) -> int:
    """Return whole nanoseconds, so that consecutive slices do not overlap after rounding."""
    return round(microseconds * 1000)
