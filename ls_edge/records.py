"""What is known about each request of a run: the lines of ``ls-edge run --trace`` and the input of every report.

Clocks of different devices are never compared. A holder reports durations only; what remains of a request's
latency after stem, head and its holders' own times is the wire's, shared out over its hops by equal parts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import msgspec

from ls_edge.arrangement import Arrangement
from ls_edge.errors import DataError, UsageError
from ls_edge.validation import json_fault

BlockAt = tuple[int, str]
"""A block and the process that ran it."""


class TrackSpan(msgspec.Struct, frozen=True):
    """A track of a wave as the holder that joined it saw it; times on that holder's clock, in milliseconds."""

    wave: int
    """Counts the waves of this visit."""
    holder: str
    blocks: tuple[int, ...]
    """What ran and was summed, in order; empty for a track that did not come back, or a holder that was given none."""
    begin_ms: float
    """Since the tokens arrived at the joiner."""
    end_ms: float
    expected_ms: float
    """As it was planned; of a holder that was given no track, what a single block would have taken there."""
    queue_ms: float = 0.0
    """Waiting for the engine, at the track's holder; so too the next two."""
    engine_ms: float = 0.0
    codec_ms: float = 0.0
    why: str = ""
    """Why nothing of it was summed: ``no gain`` (it was not worth its transfer), ``lost``, ``late``, ``refused``."""


class Visit(msgspec.Struct, frozen=True):
    """The time that a request spent with one holder, in milliseconds."""

    holder: str
    blocks: tuple[int, ...]
    """What it ran there, in order."""
    queue_ms: float = 0.0
    """Waiting for the engine."""
    engine_ms: float = 0.0
    codec_ms: float = 0.0
    """Encoding and decoding tokens."""
    wire_ms: float = 0.0
    """The hop to this holder: its share of what remains of the latency."""
    wait_ms: float = 0.0
    """Waiting for the tracks of others (policy ``parallel``)."""
    tracks: tuple[TrackSpan, ...] = ()
    """All tracks of the waves that were joined here, its own included."""


class RequestRecord(msgspec.Struct, frozen=True):
    """One request: what was asked, what came back, by which way."""

    id: int
    image: str
    label: int | None
    prediction: int | None
    """None where the request failed."""
    latency_ms: float
    """From the submission of the preprocessed image to the answer, or to the error."""
    degraded: bool
    error: str | None
    """Type and message, such as ``BudgetExceeded: ...``."""
    order: tuple[BlockAt, ...] | None
    """Blocks in the order in which they ran; None where some ran side by side (then ``waves`` is set)."""
    skipped: tuple[int, ...]
    attempts: int
    """Branches that the source started."""
    logits: tuple[float, ...] | None
    waves: tuple[tuple[tuple[BlockAt, ...], ...], ...] | None = None
    submitted_ms: float = 0.0
    """Since the start of the run."""
    stem_ms: float = 0.0
    head_ms: float = 0.0
    return_wire_ms: float = 0.0
    """The last hop, back to the source."""
    visits: tuple[Visit, ...] = ()
    duplicates: int = 0
    """Later answers to the same request, dropped."""

    @property
    def arrangement(self) -> Arrangement:
        """What ran, without the holders; the input of a replay."""
        if self.waves is not None:
            return Arrangement(tuple(tuple(tuple(b for b, _ in track) for track in wave) for wave in self.waves))
        return Arrangement.plain([block for block, _ in self.order or ()])


class PeerEvent(msgspec.Struct, frozen=True):
    """Something that happened to a peer during a run, as the source saw it."""

    at_ms: float
    """Since the start of the run."""
    peer: str
    what: str
    """``alive``, ``lost``, ``suspect``, ``draining``."""
    why: str = ""


def encode_record(record: RequestRecord) -> bytes:
    """The line of a record, without its end, which :func:`read_trace` reads again.

    Bytes of an image's name that are not UTF-8 are written as visible escapes. Raises :class:`DataError` where a
    number is NaN or infinity, which JSON does not have.
    """
    try:
        line = msgspec.json.encode(record)
    except UnicodeEncodeError:
        error = None if record.error is None else _escaped(record.error)
        line = msgspec.json.encode(msgspec.structs.replace(record, image=_escaped(record.image), error=error))
    try:
        msgspec.json.decode(line, type=RequestRecord)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"request {record.id} cannot stand in a trace ({error}): is a number NaN or infinity?"
        ) from None
    return line


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def write_trace(stream: IO[str], records: Iterable[RequestRecord]) -> None:
    """Write a JSON line a request; raises as :func:`encode_record`, after whole lines."""
    for record in records:
        stream.write(encode_record(record).decode() + "\n")


class TraceWriter:
    """A trace that is written while the run goes on: each line is in the file before the next request ends.

    An error of the file (a full disk) does not end the run: it is kept in :attr:`problem`, what was written by then
    stays as whole lines, and nothing more is written.
    """

    def __init__(self, path: str | Path) -> None:
        """Begin the file anew; raises :class:`UsageError` where it cannot be written."""
        self.path = Path(path)
        self.problem = ""
        """Why the trace is not complete; empty while it is."""
        self._lines: dict[int, RequestRecord] = {}
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}; give another path") from None
        self._plain = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._size = 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: RequestRecord) -> None:
        """Append the line of a record; does nothing once there was a problem."""
        if self.problem:
            return
        try:
            line = memoryview(encode_record(record) + b"\n")
        except DataError as error:
            self.problem = f"the trace {self.path} ends after {len(self._lines)} requests: {error}"
            return
        try:
            done = 0
            while done < len(line):
                done += os.write(self._descriptor, line[done:])
        except OSError as error:
            self.problem = (
                f"the trace {self.path} ends after {len(self._lines)} requests: {error.strerror}; make room, or give "
                "another path"
            )
            if self._plain:  # no half line, which no reader would take
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                    os.lseek(self._descriptor, self._size, os.SEEK_SET)
            return
        self._size += len(line)
        self._lines[record.id] = record

    def correct(self, records: Iterable[RequestRecord]) -> None:
        """Write lines again that have changed since (late answers are counted when the run is over), in one step."""
        known = {record.id: record for record in records}
        changed = any(known.get(id_, record) != record for id_, record in self._lines.items())
        if not changed or self.problem or not self._plain:
            return
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8") as stream:
                write_trace(stream, (known.get(id_, record) for id_, record in self._lines.items()))
            part.replace(self.path)
        except OSError:  # what was written first stays, and lacks only those counts
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def read_trace(path: str | Path) -> Iterator[RequestRecord]:
    """Read a trace again; raises :class:`DataError` with the line that is not one."""
    with Path(path).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield msgspec.json.decode(line, type=RequestRecord)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                _, why = json_fault(line, RequestRecord, error)
                raise DataError(f"{path}:{number} is no line of a trace ({why}); was the run interrupted?") from None


NO_GAIN = "no gain"
"""Why a holder was given no track: it was not worth its transfer."""


class HolderTimes(NamedTuple):
    """What an answer cost one holder: a visit, or a track that it ran for another's wave; in milliseconds."""

    holder: str
    queue_ms: float
    engine_ms: float
    codec_ms: float


def holder_times(record: RequestRecord) -> Iterator[HolderTimes]:
    """Each visit, then each track that another holder ran for it; a joiner's own tracks are part of its visit."""
    for visit in record.visits:
        yield HolderTimes(visit.holder, visit.queue_ms, visit.engine_ms, visit.codec_ms)
    for track in tracks_of_others(record):
        yield HolderTimes(track.holder, track.queue_ms, track.engine_ms, track.codec_ms)


def tracks_of_others(record: RequestRecord) -> list[TrackSpan]:
    """Tracks that came back to a joiner from other holders."""
    return [track for visit in record.visits for track in visit.tracks if track.blocks and track.holder != visit.holder]


def transfer_ms(track: TrackSpan) -> float:
    """What remains of a track's duration after its holder's own times: the way there and back."""
    return max(0.0, track.end_ms - track.begin_ms - track.queue_ms - track.engine_ms - track.codec_ms)


def steps_of(record: RequestRecord) -> Iterator[BlockAt]:
    """Every block that ran for the answer, with its holder."""
    if record.waves is not None:
        yield from (step for wave in record.waves for track in wave for step in track)
    else:
        yield from record.order or ()


def holders_of(record: RequestRecord) -> set[str]:
    """Every process that ran a block of the answer."""
    return {holder for _, holder in steps_of(record)}


def hops_of(record: RequestRecord) -> int:
    """Transfers of tokens that the answer took: the one back to the source, and two a track of others, included."""
    if record.visits:
        return len(record.visits) + 1 + 2 * len(tracks_of_others(record))
    holders = [holder for _, holder in record.order or ()]
    return 1 + sum(a != b for a, b in zip([None, *holders], holders, strict=False)) if holders else 0
