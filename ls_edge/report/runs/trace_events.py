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
from typing import Any, NamedTuple

import msgspec

from ls_edge.core.errors import printable
from ls_edge.core.files import open_output
from ls_edge.core.parts import part_name
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.runs.intervals import Span, intervals_of
from ls_edge.version import __version__

SOURCE = ""
"""Name of the source, as in :attr:`Span.holder`; empty because a peer may be called "source"."""
_SOURCE_PID = 1
_NOTES = {
    "clock": "the source's, microseconds since the start of the run; clocks of devices are not compared",
    "measured": "submission and latency of each request, stem and head, by the source; queue, engine, codec and wait "
    "of each visit and track, by its holder, as durations; begin and end of the tracks of a wave, by its joiner",
    "inferred": "wire: the rest of a latency, in equal parts over its hops, and the time of a track that its holder "
    "does not account for, in equal parts there and back; the start of a visit follows from it. Within a visit: "
    "queue, codec, engine, wait, one after the other; blocks of one visit or track share its engine time in equal "
    "parts. other: not explained by any duration",
    "not_recorded": "the size of the batch in which an engine ran a block",
}

_Event = dict[str, Any]


class _Chain(NamedTuple):
    """Consecutive spans of a request in one process."""

    process: str
    spans: list[Span]
    visit: bool


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
    yield from _in_flight(records)
    # Later requests have later chains, so all chains that begin before the next submission can be assigned to lanes.
    waiting: list[tuple[int, int, RequestRecord, _Chain]] = []
    count = itertools.count()
    for record in sorted(records, key=lambda one: one.submitted_us):
        while waiting and waiting[0][0] < record.submitted_us * 1000:
            yield from rows.slices(*heapq.heappop(waiting)[2:])
        yield from _request(record)
        for chain in _chains(record):
            heapq.heappush(waiting, (_ns(chain.spans[0].start), next(count), record, chain))
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

    def slices(self, record: RequestRecord, chain: _Chain) -> Iterator[_Event]:
        """Yield the slices of a chain in a free lane, preceded by the metadata of a new process or lane."""
        yield from self.process(chain.process)
        pid, free, spans = self.pids[chain.process], self._free[chain.process], chain.spans
        start, end = _ns(spans[0].start), _ns(spans[-1].end)
        lane = next((lane for lane, since in enumerate(free) if since <= start), len(free))
        if lane == len(free):
            free.append(end)
            yield _metadata("thread_name", pid, lane + 1, {"name": f"lane {lane + 1}"})
        free[lane] = end
        place = {"pid": pid, "tid": lane + 1}
        if chain.visit:
            blocks = [span.block for span in spans if span.block is not None]
            about = {"request": record.id, "blocks": blocks, "attempts": record.attempts}
            yield _slice(f"request {record.id}", "visit", start, end, place, about)
        for span in spans:
            about = {"request": record.id, "critical": span.critical}
            name = f"{span.stage} ({span.why})" if span.why else span.stage
            if span.block is not None:
                name = part_name(span.block)
                about |= {"block": span.block, "attempts": record.attempts}
            yield _slice(name, span.stage, _ns(span.start), _ns(span.end), place, about)
        # An arrow from the stem through all processes to the head.
        flow = {"name": "request", "cat": "flow", "id": record.id, **place}
        if chain.visit or spans[0].stage == "stem":
            yield {**flow, "ph": "t" if chain.visit else "s", "ts": start / 1000}
        else:
            yield {**flow, "ph": "f", "bp": "e", "ts": _ns(spans[-1].start) / 1000}


def _metadata(kind: str, pid: int, tid: int, arguments: Mapping[str, Any]) -> _Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _slice(name: str, category: str, start: int, end: int, place: Mapping[str, int], arguments: _Event) -> _Event:
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"name": name, "cat": category, "ph": "X", **times, **place, "args": arguments}


def _in_flight(records: Sequence[RequestRecord]) -> Iterator[_Event]:
    """Yield the number of requests in flight after each change; ends come before simultaneous starts."""
    begins = ((ts, 1) for ts in sorted(record.submitted_us for record in records))
    ends = ((ts, -1) for ts in sorted(record.submitted_us + record.latency_us for record in records))
    number = 0
    for ts, change in heapq.merge(ends, begins):
        number += change
        counter = {"name": "requests in flight", "ph": "C", "ts": ts, "pid": _SOURCE_PID, "tid": 0}
        yield {**counter, "args": {"requests": number}}


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


def _chains(record: RequestRecord) -> Iterator[_Chain]:
    """Yield the work on a request in each process, in order of its start."""
    laid = intervals_of(record)
    at_source = [span for span in laid.spans if not span.holder]
    stem = [span for span in at_source if span.stage == "stem"]
    if stem:
        yield _Chain(SOURCE, stem, visit=False)
    for visit in laid.visits:
        by_row: dict[tuple[str, int], list[Span]] = {}
        for span in visit:
            if span.end > span.start or span.block is not None:
                by_row.setdefault((span.holder, span.row), []).append(span)
        for (holder, _), spans in by_row.items():
            # Spans of a row are one chain, unless a joiner did two things at the same time.
            chains: list[list[Span]] = []
            for span in sorted(spans, key=lambda one: (_ns(one.start), _ns(one.end))):
                home = next((chain for chain in chains if _ns(chain[-1].end) <= _ns(span.start)), None)
                if home is None:
                    chains.append([span])
                else:
                    home.append(span)
            yield from (_Chain(holder, chain, visit=True) for chain in chains)
    if len(at_source) > len(stem):
        yield _Chain(SOURCE, at_source[len(stem) :], visit=False)


def _ns(microseconds: float) -> int:
    """Return whole nanoseconds, so that consecutive slices do not overlap after rounding."""
    return round(microseconds * 1000)
