"""Reports of peers: their state, and the time that requests spent with them.

Messages carry :class:`Visit` and :class:`TrackSpan`; the types limit their numbers and texts.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from ls_edge.core.peers_file import Name

COUNT = 2**16
"""Exclusive upper limit of counts of blocks, credits, hops, and waves."""
MICROSECONDS = 2**32
"""Exclusive upper limit of durations (71 minutes)."""
MAX_TEXT = 256
"""Maximum length of text that is neither a name nor an explanation, in characters."""
_UNPRINTABLE = (
    r"\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u206f\u3000\ud800-\uf8ff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U0010ffff"
)
"""Control and format characters, separators other than the space, and code points for private use."""

Count = Annotated[int, Meta(ge=0, lt=COUNT)]
Microseconds = Annotated[int, Meta(ge=0, lt=MICROSECONDS)]
ShortText = Annotated[str, Meta(max_length=MAX_TEXT, pattern=rf"^[^{_UNPRINTABLE}]*\Z")]


class PeerState(str, Enum):
    """State of a peer from the viewpoint of a source or an observer."""

    ALIVE = "alive"
    COLD = "cold"
    """The peer loads its engines."""
    SUSPECT = "suspect"
    """The peer made no progress within a hop's deadline."""
    STUCK = "stuck"
    """An engine call takes longer than expected."""
    DRAINING = "draining"
    """The peer finishes its requests and accepts no new ones."""
    LOST = "lost"
    REFUSED = "refused"
    """The peer rejects the link, or serves another model or bundle."""
    SILENT = "silent"
    """The peer accepts the link but does not answer the greeting, or answers only small ones."""
    UNKNOWN = "unknown"

    __str__ = str.__str__


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a peer and its latest announcements; fields are empty or None before the first announcement."""

    state: PeerState = PeerState.LOST
    bundle_id: str | None = None
    warm: bool = False
    queue: int | None = None
    """Number of requests waiting for its engine."""
    credits: int | None = None
    """Number of requests that it would accept now."""
    engine: str = ""
    reaches: tuple[str, ...] = ()
    """Processes to which it has links."""


class TrackSpan(msgspec.Struct, frozen=True, array_like=True):
    """A track of a wave as measured by its joiner, in microseconds on the joiner's clock."""

    wave: Count
    holder: Name
    blocks: tuple[Count, ...]
    """Blocks that ran and were summed, in order; empty for a track that did not return or was not assigned."""
    begin_us: Microseconds
    """Time since the tokens arrived at the joiner."""
    end_us: Microseconds
    expected_us: Microseconds
    """Planned duration; for a holder without a track, the duration of a single block."""
    queue_us: Microseconds = 0
    """Queue time; like the next two fields, measured by the track's holder."""
    engine_us: Microseconds = 0
    codec_us: Microseconds = 0
    why: ShortText = ""
    """Reason why it was not summed: ``lost``, ``late``, or ``refused``."""

    @property
    def transfer_us(self) -> int:
        """Time of both transfers: its duration minus the times that its holder measured."""
        return max(0, self.end_us - self.begin_us - self.queue_us - self.engine_us - self.codec_us)


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """Time that a request spent with a holder, in microseconds on the holder's clock."""

    holder: Name
    blocks: tuple[Count, ...]
    queue_us: Microseconds
    engine_us: Microseconds
    codec_us: Microseconds
    wait_us: Microseconds = 0
    """Time spent waiting for tracks of other holders (policy ``parallel``)."""
    tracks: tuple[TrackSpan, ...] = ()
    """All tracks of the waves that were joined here, including the holder's own."""

    @property
    def total_us(self) -> int:
        """Sum of its durations."""
        return self.queue_us + self.engine_us + self.codec_us + self.wait_us

    @property
    def tracks_of_others(self) -> list[TrackSpan]:
        """Tracks that returned to this joiner from other holders."""
        return [track for track in self.tracks if track.blocks and track.holder != self.holder]
