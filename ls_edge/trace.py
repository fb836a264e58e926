"""What is known about each request of a run: the lines of ``ls-edge run --trace`` and the input of every report.

Clocks of different devices are never compared. A holder reports durations only; what remains of a request's
latency after stem, head and its holders' own times is the wire's, shared out over its hops by equal parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from ls_edge.arrangement import Arrangement
from ls_edge.errors import DataError

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


def write_trace(stream: IO[str], records: Iterable[RequestRecord]) -> None:
    """Write a JSON line a request."""
    for record in records:
        stream.write(msgspec.json.encode(record).decode() + "\n")


def read_trace(path: str | Path) -> Iterator[RequestRecord]:
    """Read a trace again; raises :class:`DataError` with the line that is not one."""
    with Path(path).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield msgspec.json.decode(line, type=RequestRecord)
            except msgspec.MsgspecError as error:
                raise DataError(f"{path}:{number} is no line of a trace ({error}); was the run interrupted?") from None
