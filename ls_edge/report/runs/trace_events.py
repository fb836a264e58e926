"""A run as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing open.

Format: JSON Object Format of the "Trace Event Format" of Chromium's trace viewer. The source and each peer have a
process row. The work on a request in a process is in one lane (a "thread") at a time; a process with two requests at
the same time, or two tracks of a wave, has another lane, so that slices of a lane overlap only if one contains the
other.

Times are those of :mod:`ls_edge.report.intervals`, on the clock of the source. Durations are measured; their places in
a visit and the time on the wire are inferred, as the file states (``otherData``).

Events are generated and written one by one: besides the records of the run, memory holds only those of the requests in
flight at one moment.
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
from ls_edge.report.intervals import Span, intervals_of
from ls_edge.version import __version__

SOURCE = ""
"""Name of the source among the processes, as in :attr:`Span.holder`; a peer may be called "source"."""
_SOURCE_PID = 1
_NOTES = {
    "clock": "the source's, microseconds since the start of the run; clocks of devices are not compared",
    "measured": "submission and latency of each request, stem and head, by the source; queue, engine, codec and wait "
    "of each visit and track, by its holder, as durations; begin and end of the tracks of a wave, by its joiner",
    "inferred": "wire: what remains of a latency, in equal parts over its hops, and what a track's holder does not "
    "account for, in equal parts there and back; so also when a visit begins. Within a visit: queue, codec, engine, "
    "wait, one after the other; blocks of one visit or track share its engine time in equal parts. other: not "
    "explained by any duration",
    "not_recorded": "the size of the batch in which an engine ran a block",
}

_Event = dict[str, Any]


class _Chain(NamedTuple):
    """Consecutive spans of a request in one process."""

    process: str
    spans: list[Span]
    visit: bool

    @property
    def start(self) -> int:
        return _ns(self.spans[0].start)

    @property
    def end(self) -> int:
        return _ns(self.spans[-1].end)


def write_trace_events(
    path: str | Path, summary: RunSummary, records: Sequence[RequestRecord], events: Sequence[PeerEvent]
) -> None:
    """Write the trace events of a run in one step; errors as :func:`ls_edge.core.files.write_output`."""
    about = {
        "ls_edge": __version__,
        "bundle_id": summary.bundle_id,
        "model": summary.model,
        "policy": summary.policy,
        **_NOTES,
    }
    with open_output(path) as stream:
        stream.write('{"displayTimeUnit":"ms",\n"otherData":' + _json(about) + ',\n"traceEvents":[\n')
        between = ""
        for event in trace_events(records, events, summary.peers):
            stream.write(between + _json(event))
            between = ",\n"
        stream.write("\n]}\n")


def trace_events(
    records: Sequence[RequestRecord], events: Sequence[PeerEvent] = (), peers: Iterable[str] = ()
) -> Iterator[_Event]:
    """Yield the events of a run; ``peers`` have the first process rows, others follow as they appear."""
    rows = _ProcessRows()
    for name in (SOURCE, *peers):
        yield from rows.process(name)
    for event in events:
        yield from rows.process(event.peer)
        yield {
            "name": event.state.value,
            "cat": "peer",
            "ph": "i",
            "s": "p",
            "ts": event.at_us,
            "tid": 0,
            "pid": rows.pids[event.peer],
            "args": {"why": printable(event.why)},
        }
    in_flight = 0
    for ts, change in _changes(records):
        in_flight += change
        yield {
            "name": "requests in flight",
            "ph": "C",
            "ts": ts,
            "pid": _SOURCE_PID,
            "tid": 0,
            "args": {"requests": in_flight},
        }
    # Chains of later requests begin later, so all that begin before the next submission can be given their lanes.
    waiting: list[tuple[int, int, RequestRecord, _Chain]] = []
    count = itertools.count()
    for record in sorted(records, key=lambda one: one.submitted_us):
        while waiting and waiting[0][0] < record.submitted_us * 1000:
            yield from _slices(rows, *heapq.heappop(waiting)[2:])
        yield from _request(record)
        for chain in _chains(record):
            heapq.heappush(waiting, (chain.start, next(count), record, chain))
    while waiting:
        yield from _slices(rows, *heapq.heappop(waiting)[2:])


class _ProcessRows:
    """Numbers of processes, and the lanes of each."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}

    def process(self, name: str) -> Iterator[_Event]:
        """Yield the metadata of a new process."""
        if name not in self.pids:
            pid = self.pids[name] = len(self.pids) + _SOURCE_PID
            self._free[name] = []
            yield _metadata("process_name", pid, 0, {"name": printable(name) or "source"})
            yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})

    def lane(self, name: str, start: int, end: int) -> tuple[int, Iterator[_Event]]:
        """Occupy a free lane, counted from 1, until ``end``; return it, and its metadata if it is new."""
        free = self._free[name]
        for number, since in enumerate(free):
            if since <= start:
                free[number] = end
                return number + 1, iter(())
        free.append(end)
        tid = len(free)
        return tid, iter([_metadata("thread_name", self.pids[name], tid, {"name": f"lane {tid}"})])


def _metadata(kind: str, pid: int, tid: int, arguments: Mapping[str, Any]) -> _Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _changes(records: Sequence[RequestRecord]) -> Iterator[tuple[int, int]]:
    """Yield changes of the number of requests in flight; of changes at the same time, ends come first."""
    begins = sorted(record.submitted_us for record in records)
    ends = sorted(record.submitted_us + record.latency_us for record in records)
    return heapq.merge(((ts, -1) for ts in ends), ((ts, 1) for ts in begins))


def _request(record: RequestRecord) -> Iterator[_Event]:
    """Yield a request as an asynchronous slice of the source, connected to its parts by its id."""
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
    """Yield the work on a request in each process, in the order in which it began."""
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
            yield from (_Chain(holder, chain, visit=True) for chain in _without_overlap(spans))
    if len(at_source) > len(stem):
        yield _Chain(SOURCE, at_source[len(stem) :], visit=False)


def _without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    """Split spans into chains that do not overlap: one, unless a joiner did two things at the same time."""
    chains: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (_ns(one.start), _ns(one.end))):
        home = next((chain for chain in chains if _ns(chain[-1].end) <= _ns(span.start)), None)
        if home is None:
            chains.append([span])
        else:
            home.append(span)
    return chains


def _slices(rows: _ProcessRows, record: RequestRecord, chain: _Chain) -> Iterator[_Event]:
    yield from rows.process(chain.process)
    tid, named = rows.lane(chain.process, chain.start, chain.end)
    yield from named
    place = {"pid": rows.pids[chain.process], "tid": tid}
    if chain.visit:
        blocks = [span.block for span in chain.spans if span.block is not None]
        about = {"request": record.id, "blocks": blocks, "attempts": record.attempts}
        yield _slice(f"request {record.id}", "visit", chain.start, chain.end, place, about)
    for span in chain.spans:
        yield _slice(*_label(span), _ns(span.start), _ns(span.end), place, _arguments(record, span))
    # An arrow from the stem through all processes to the head.
    kind = "t" if chain.visit else "s" if chain.spans[0].stage == "stem" else "f"
    at = chain.spans[-1] if kind == "f" else chain.spans[0]
    flow = {"name": "request", "cat": "flow", "ph": kind, "id": record.id, "ts": _ns(at.start) / 1000, **place}
    yield {**flow, "bp": "e"} if kind == "f" else flow


def _slice(name: str, category: str, start: int, end: int, place: Mapping[str, int], arguments: _Event) -> _Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        **place,
        "args": arguments,
    }


def _label(span: Span) -> tuple[str, str]:
    if span.block is not None:
        return part_name(span.block), span.stage
    return f"{span.stage} ({span.why})" if span.why else span.stage, span.stage


def _arguments(record: RequestRecord, span: Span) -> _Event:
    found: _Event = {"request": record.id, "critical": span.critical}
    return found if span.block is None else {**found, "block": span.block, "attempts": record.attempts}


def _ns(microseconds: float) -> int:
    """Return whole nanoseconds, so that consecutive slices do not overlap after rounding."""
    return round(microseconds * 1000)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
