"""Request records of a run, from which traces and reports are made.

Durations are whole microseconds; traces, tables, and charts show milliseconds. Clocks of different devices are never
compared: holders report durations, and the remaining latency of a request is divided equally among its hops
(:attr:`RequestRecord.hop_us`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.closing import Closing
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import shown_parts
from ls_edge.core.peer_reports import PeerState, TrackSpan, Visit
from ls_edge.core.text import counted

BlockAt = tuple[int, str]


class RequestRecord(msgspec.Struct, frozen=True):
    """A request with its answer or error and its path; ``submitted_us`` counts from the start of the run."""

    id: int
    image: str
    label: int | None
    prediction: int | None
    latency_us: int
    """Time from the submission of the preprocessed image to the answer or error."""
    degraded: bool
    error: str | None
    skipped: tuple[int, ...]
    attempts: int
    """Number of branches that the source started."""
    logits: tuple[float, ...] | None
    waves: tuple[tuple[tuple[BlockAt, ...], ...], ...] = ()
    """Waves of tracks of blocks with their holders."""
    submitted_us: int = 0
    stem_us: int = 0
    head_us: int = 0
    visits: tuple[Visit, ...] = ()
    why_skipped: str = ""
    """Reason for skipped blocks, with their bands; empty if none were skipped."""

    @property
    def arrangement(self) -> Arrangement:
        """Arrangement for a replay, without the holders."""
        return Arrangement(tuple(tuple(tuple(b for b, _ in track) for track in wave) for wave in self.waves))

    @property
    def is_plain(self) -> bool:
        """Whether no two blocks ran in parallel."""
        return all(len(wave) == 1 for wave in self.waves)

    @property
    def steps(self) -> tuple[BlockAt, ...]:
        """All blocks of the answer with their holders, wave by wave and track by track."""
        return tuple(step for wave in self.waves for track in wave for step in track)

    @property
    def holders(self) -> set[str]:
        """Processes that ran a block of the answer."""
        return {holder for _, holder in self.steps}

    @property
    def tracks_of_others(self) -> list[TrackSpan]:
        """Tracks that returned to a joiner from other holders."""
        return [track for visit in self.visits for track in visit.tracks_of_others]

    @property
    def hop_us(self) -> float:
        """Time of each hop on the wire, including the return to the source; 0 if the visits are unknown."""
        if not self.visits:
            return 0.0
        inside = self.stem_us + self.head_us + sum(visit.total_us for visit in self.visits)
        return max(0, self.latency_us - inside) / (len(self.visits) + 1)

    @property
    def hops(self) -> int:
        """Number of transfers of tokens, including the return to the source and two per track of another holder."""
        return hops_of(self.visits)


def hops_of(visits: Sequence[Visit]) -> int:
    """Return the number of transfers of an answer with these visits; 0 without any."""
    return len(visits) + 1 + 2 * sum(len(visit.tracks_of_others) for visit in visits) if visits else 0


class PeerEvent(msgspec.Struct, frozen=True):
    """A change of a peer's state during a run, as observed by the source."""

    at_us: int
    peer: str
    state: PeerState
    why: str = ""


class PeerContext(msgspec.Struct, frozen=True):
    """A peer as known to the source at the end of a run."""

    blocks: tuple[int, ...] = ()
    state: PeerState = PeerState.UNKNOWN
    engine: str = ""
    """Engine of its blocks, such as ``onnx CPUExecutionProvider``; empty if the peer never reported one."""


class Suspect(msgspec.Struct, frozen=True):
    """A peer that took part in answers that audits found to be wrong."""

    wrong: int
    """Number of these answers."""
    difference: float | None = None
    """Last difference of logits relative to the largest value; None if it was not a number."""


class AuditSummary(msgspec.Struct, frozen=True):
    """Counts of answers that the source computed a second time."""

    share: float
    audited: int
    """Sum of ``matched`` and ``mismatched``."""
    matched: int
    mismatched: int
    dropped: int
    """Selected audits that were dropped because too many were waiting."""
    waiting: int = 0
    suspects: Mapping[str, Suspect] = {}

    @property
    def warning(self) -> str:
        """One line that names the suspects; empty if every answer matched."""
        if not self.mismatched:
            return ""
        most_first = sorted(self.suspects.items(), key=lambda item: -item[1].wrong)
        holders = ", ".join(f"{name} ({one.wrong} times)" for name, one in most_first)
        return (
            f"{self.mismatched} of {self.audited} audited answers are wrong, by holders: {holders}; check these "
            "devices before you use the answers"
        )


class Rejection(msgspec.Struct, frozen=True):
    """Messages of a peer that the source rejected as impossible: the peer is faulty, outdated, or lying."""

    count: int
    why: str


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run that are in its summary but not in its records."""

    bundle_id: str = ""
    model: str = ""
    method: str = ""
    policy: str = ""
    seed: int | None = None
    settings: Mapping[str, Any] = {}
    """Effective settings as plain JSON values."""
    account: Mapping[str, Any] = {}
    """Number and classes of the images, and the number of files that were ignored, by reason."""
    wall_s: float | None = None
    """Duration of the whole command, including waiting for peers and decoding."""
    audit: AuditSummary | None = None
    rejected: Mapping[str, Rejection] = {}
    duplicates_dropped: int = 0
    """Number of answers to requests that had ended."""


class RunContext(RunFacts, frozen=True, kw_only=True):
    """All facts about a run that its records do not contain."""

    classes: Sequence[str] = ()
    """Names of the model's classes."""
    peers: Mapping[str, PeerContext] = {}
    preprocess_ms: Sequence[float] = ()


def encode_record(record: RequestRecord) -> bytes:
    """Return the JSON line of a record in a trace.

    Durations are milliseconds. If blocks ran in parallel, ``order`` is None and ``waves`` is set. Bytes of an image's
    name that are not UTF-8 become visible escapes. Raise :class:`DataError` for a logit that is not finite.
    """
    if record.logits is not None and not all(map(math.isfinite, record.logits)):
        raise DataError(f"request {record.id} cannot be written to a trace: a logit is NaN or infinity")
    ran = {"order": record.steps, "waves": None} if record.is_plain else {"order": None, "waves": record.waves}
    document = {**_in_ms(record), **ran}
    texts = {"image": _escaped(record.image), "error": record.error and _escaped(record.error)}
    return msgspec.json.encode({name: document[name] for name in _LINE} | texts)


_LINE = (
    "id",
    "image",
    "label",
    "prediction",
    "latency_ms",
    "degraded",
    "error",
    "order",
    "skipped",
    "attempts",
    "logits",
    "waves",
    "submitted_ms",
    "stem_ms",
    "head_ms",
    "visits",
    "why_skipped",
)


def _in_ms(value: Any) -> Any:
    """Convert structs to dictionaries with durations in milliseconds and the names of stem and head."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return {
            f"{name[:-3]}_ms" if name.endswith("_us") else name: each / 1e3 if name.endswith("_us") else _in_ms(each)
            for name, each in fields.items()
        } | ({"blocks": shown_parts(fields["blocks"])} if "blocks" in fields else {})
    return [_in_ms(each) for each in value] if isinstance(value, (list, tuple)) else value


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class TraceWriter(Closing):
    """Writer of a trace during a run, with one line per request.

    An error such as a full disk does not end the run: :attr:`problem` has the reason, complete lines remain in the
    file, and no more lines are written.
    """

    def __init__(self, path: str | Path) -> None:
        """Create the file; raise :class:`UsageError` if it cannot be written."""
        self.path = Path(path)
        self.problem = ""
        self._lines = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}; give another path") from None
        self._size = 0

    def write(self, record: RequestRecord) -> None:
        """Append a record; do nothing after a problem."""
        if self.problem:
            return
        try:
            line = memoryview(encode_record(record) + b"\n")
            done = 0
            while done < len(line):
                done += os.write(self._descriptor, line[done:])
        except (DataError, OSError) as error:
            why = f"{error.strerror}; free some space, or give another path" if isinstance(error, OSError) else error
            self.problem = f"the trace {self.path} ends after {counted(self._lines, 'request')}: {why}"
            with contextlib.suppress(OSError):  # readers refuse an incomplete line; pipes cannot be truncated
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            return
        self._size += len(line)
        self._lines += 1

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def holder_times(record: RequestRecord) -> list[Visit | TrackSpan]:
    """Return all visits, then all tracks of other holders; a joiner's own tracks are part of its visit."""
    return [*record.visits, *record.tracks_of_others]
