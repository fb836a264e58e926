"""Events that go into the routing machines and instructions that come out of them.

Nothing here does input or output. ``tokens`` are opaque
to routing: arrays in a process, anything in a simulation.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET

from ls_edge.core.errors import RequestError
from ls_edge.runtime.protocol.messages import (
    Hello,
    Itinerary,
    Message,
    Moved,
    Release,
    RequestId,
    Run,
    State,
    TransferId,
)


class NeighborUp(msgspec.Struct, frozen=True):
    """A process sent HELLO or WELCOME on a link, for the first time or with changes."""

    hello: Hello


class NeighborDown(msgspec.Struct, frozen=True):
    """The last link to a process has ended, or it sent BYE."""

    name: str
    why: str


class NeighborState(msgspec.Struct, frozen=True):
    """A process sent STATE."""

    name: str
    state: State


class Arrived(msgspec.Struct, frozen=True):
    """Tokens arrived, checked and decoded."""

    sender: str
    run: Run
    tokens: Any
    codec_us: int = 0
    finite: bool = True
    """All values of the tokens are finite."""


class Received(msgspec.Struct, frozen=True):
    """Any other message arrived."""

    sender: str
    message: Message


class Unsendable(msgspec.Struct, frozen=True):
    """An instruction could not be executed: no link to the process, or the queue of its link is full."""

    failed: Send | Forward


class Computed(msgspec.Struct, frozen=True):
    """The engine ran ``blocks``, one after the other, for these transfers."""

    blocks: tuple[int, ...]
    transfers: tuple[TransferId, ...]
    outputs: tuple[Any, ...]
    engine_us: int


class ComputeFailed(msgspec.Struct, frozen=True):
    """The engine raised an error on ``block``, or (``not_finite``) returned NaN or infinity."""

    block: int
    transfers: tuple[TransferId, ...]
    """Transfers of the call without an output: all of them, unless ``rest`` has the others."""
    why: str
    not_finite: bool = False
    """Finite tokens went in and others came out, which may be due to the model or the image."""
    rest: Computed | None = None
    """Result of the same call for the other transfers of its batch."""


class Decoded(msgspec.Struct, frozen=True):
    """An image was decoded, which took ``us``."""

    transfer: TransferId
    tokens: Any
    """The image with its pixels; what goes home instead if it cannot be decoded."""
    us: int
    why: str = ""
    """Reason why it cannot be decoded."""


class Warm(msgspec.Struct, frozen=True):
    """The engine has warmed up; one call took ``block_us``."""

    block_us: int


class Drain(msgspec.Struct, frozen=True):
    """Accept nothing new and hand on everything held."""


class Submit(msgspec.Struct, frozen=True):
    """Stem tokens of an image to answer by ``deadline`` (seconds of the caller's clock)."""

    request: int
    itinerary: Itinerary
    tokens: Any
    deadline: float
    watch_returns: bool = False
    """Report each RETURN that is used as :class:`Returned`."""


class Abandon(msgspec.Struct, frozen=True):
    """The caller has abandoned this request."""

    request: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    NeighborUp | NeighborDown | NeighborState | Arrived | Received | Unsendable | Computed | ComputeFailed | Decoded
    | Warm | Drain | Submit | Abandon | Tick
)  # fmt: skip


class Send(msgspec.Struct, frozen=True):
    """Send a message to a process."""

    to: str
    message: Message


class Forward(msgspec.Struct, frozen=True):
    """Send tokens to a process, as a RUN whose codec and shape the executor adds."""

    to: str
    transfer: TransferId
    budget_us: int
    itinerary: Itinerary
    tokens: Any
    returning: str = ""
    """Reason for sending the tokens back to the source (``ReturnReason``); empty while they go forward."""
    bundle_id: str = ""
    """The only bundle whose blocks may run on them; empty for any of the model."""

    def run(self, codec: str, count: int, dim: int) -> Run:
        """Return the message for tokens of ``count`` rows and ``dim`` columns that are encoded as ``codec``."""
        return Run(
            self.transfer, self.budget_us, self.itinerary, codec, count, dim, self.returning, self.bundle_id or UNSET
        )


class Compute(msgspec.Struct, frozen=True):
    """Run blocks, one after the other, for a batch of transfers.

    Answered by :class:`Computed` or :class:`ComputeFailed`.
    """

    blocks: tuple[int, ...]
    transfers: tuple[TransferId, ...]
    tokens: tuple[Any, ...]
    slots: tuple[int, ...]
    """Slot of the first block, for each transfer."""


class Decode(msgspec.Struct, frozen=True):
    """Decode an image for the stem. Answered by :class:`Decoded`."""

    transfer: TransferId
    image: Any


class Complete(msgspec.Struct, frozen=True):
    """Run the head on the last tokens of a request; they are its logits already where a peer has."""

    request: int
    itinerary: Itinerary
    tokens: Any
    attempts: int
    seen_holders: tuple[str, ...] = ()
    """Processes that had its tokens as observed by the source; the itinerary is what holders report."""
    why_skipped: str = ""
    """Reason for leaving blocks out; empty if none were."""


class Returned(msgspec.Struct, frozen=True):
    """Tokens of a request that is watched came back from ``sender`` and are its furthest now."""

    request: int
    sender: str
    itinerary: Itinerary
    tokens: Any


class Fail(msgspec.Struct, frozen=True):
    """A request ends without an answer."""

    request: int
    error: RequestError
    itinerary: Itinerary
    attempts: int


class NoteKind(str, Enum):
    """Kind of a :class:`Note`; its value is the text of the log line."""

    LOST = "lost"
    SUSPECT = "suspect"
    REROUTED = "rerouted"
    DROPPED = "dropped"
    REJECTED = "rejected"
    NOT_FINITE = "not finite"
    ENGINE_FAILED = "engine failed"
    ENGINE_STUCK = "engine is stuck"
    ENGINE_BACK = "engine is back"

    __str__ = str.__str__


class Note(msgspec.Struct, frozen=True):
    """A line for the log: ``what`` happened to which process."""

    what: NoteKind
    peer: str = ""
    request: RequestId | None = None
    why: str = ""


Instruction = Send | Forward | Compute | Decode | Complete | Returned | Fail | Note


MAY_WAIT = frozenset((Release, Moved))
"""Messages that no process waits for; they are sent with the next one to the same process."""


def in_order(instructions: list[Instruction]) -> list[Instruction]:
    """Return instructions in the order of their execution, otherwise as they were decided.

    Tracks for other holders come first, since their wave waits for the transfer. Engines start before other messages
    are written, since the thread of the sockets may take this core while it writes.
    """
    return sorted(instructions, key=_turn) if len(instructions) > 1 else instructions


def _turn(one: Instruction) -> int:
    if isinstance(one, Forward):
        return 0 if one.itinerary.track is not None and not one.returning else 2
    return 2 if isinstance(one, (Send, Note)) else 1
