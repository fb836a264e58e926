"""Events that go into a routing machine, and instructions that come out of it.

``tokens`` are opaque to routing: arrays in a process, anything in a simulation.
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
    """A process sent HELLO or WELCOME, for the first time or with changes."""

    hello: Hello


class NeighborDown(msgspec.Struct, frozen=True):
    """The last link to a process ended, or it sent BYE."""

    name: str
    why: str


class Removed(msgspec.Struct, frozen=True):
    """These processes may no longer take part: their keys were removed from ``peers.yaml`` or exchanged."""

    names: frozenset[str]


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
    """Whether all values of the tokens are finite."""


class Received(msgspec.Struct, frozen=True):
    """Another message arrived."""

    sender: str
    message: Message


class Unsendable(msgspec.Struct, frozen=True):
    """An instruction could not be executed: there is no link to the process, or its queue is full."""

    failed: Send | Forward


class Computed(msgspec.Struct, frozen=True):
    """The engine ran ``blocks`` in sequence for these transfers."""

    blocks: tuple[int, ...]
    transfers: tuple[TransferId, ...]
    outputs: tuple[Any, ...]
    engine_us: int


class ComputeFailed(msgspec.Struct, frozen=True):
    """The engine raised an error on ``block``, or returned NaN or infinity (``not_finite``)."""

    block: int
    transfers: tuple[TransferId, ...]
    """Transfers without an output: all transfers of the call, or those that ``rest`` lacks."""
    why: str
    not_finite: bool = False
    """Whether finite inputs gave NaN or infinity, which may be due to the model or the image."""
    rest: Computed | None = None
    """Result of the same call for the other transfers of the batch."""


class Decoded(msgspec.Struct, frozen=True):
    """An image was decoded in ``us`` microseconds, or was not."""

    transfer: TransferId
    tokens: Any
    """Decoded image; if there is none, the tokens to send home instead."""
    us: int
    why: str = ""
    """Reason to send it home, or empty."""


class Warm(msgspec.Struct, frozen=True):
    """The engine has warmed up; a call takes ``block_us``."""

    block_us: int


class Drain(msgspec.Struct, frozen=True):
    """Accept nothing new from now on, and hand on everything that is held."""


class Submit(msgspec.Struct, frozen=True):
    """Tokens of an image, to be answered by ``deadline``, in seconds of the caller's clock."""

    request: int
    itinerary: Itinerary
    tokens: Any
    deadline: float


class Abandon(msgspec.Struct, frozen=True):
    """The caller has abandoned a request."""

    request: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    NeighborUp | NeighborDown | NeighborState | Arrived | Received | Unsendable | Computed | ComputeFailed | Decoded
    | Warm | Drain | Submit | Abandon | Removed | Tick
)  # fmt: skip


class Send(msgspec.Struct, frozen=True):
    """Send a message to a process."""

    to: str
    message: Message


class Forward(msgspec.Struct, frozen=True):
    """Send tokens to a process, as a RUN to which the executor adds codec and shape."""

    to: str
    transfer: TransferId
    budget_us: int
    itinerary: Itinerary
    tokens: Any
    returning: str = ""
    """Reason (``ReturnReason``) for sending the tokens back to the source; empty while they go forward."""
    bundle_id: str = ""
    """Bundle whose blocks alone may run on the tokens; empty for any bundle of the model."""

    def run(self, codec: str, count: int, dim: int) -> Run:
        """Return the message for tokens of ``count`` rows and ``dim`` columns, encoded as ``codec``."""
        return Run(
            self.transfer, self.budget_us, self.itinerary, codec, count, dim, self.returning, self.bundle_id or UNSET
        )


class Compute(msgspec.Struct, frozen=True):
    """Run blocks in sequence for a batch of transfers.

    The result is :class:`Computed` or :class:`ComputeFailed`.
    """

    blocks: tuple[int, ...]
    transfers: tuple[TransferId, ...]
    tokens: tuple[Any, ...]
    slots: tuple[int, ...]
    """Slot of the first block for each transfer."""


class Decode(msgspec.Struct, frozen=True):
    """Decode an image for the stem. The result is :class:`Decoded`."""

    transfer: TransferId
    image: Any


class Complete(msgspec.Struct, frozen=True):
    """Run the head on the last tokens of a request; if a peer has run it, they are the logits."""

    request: int
    itinerary: Itinerary
    tokens: Any
    attempts: int
    why_skipped: str = ""
    """Reason why blocks were skipped; empty if none were."""


class Fail(msgspec.Struct, frozen=True):
    """End a request without an answer."""

    request: int
    error: RequestError
    itinerary: Itinerary
    attempts: int


class NoteKind(str, Enum):
    """Kind of a :class:`Note`; the value is the text of the log line."""

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
    """Log ``what`` happened to which process."""

    what: NoteKind
    peer: str = ""
    request: RequestId | None = None
    why: str = ""


Instruction = Send | Forward | Compute | Decode | Complete | Fail | Note


MAY_WAIT = frozenset((Release, Moved))
"""Messages that no process waits for; they are sent together with the next one to the same process."""


def in_order(instructions: list[Instruction]) -> list[Instruction]:
    """Return instructions in the order in which to execute them, otherwise in the order of the decisions.

    Tracks for other holders come first, since their wave waits for the transfer. Engines start before other messages
    are written, since the socket thread may occupy this core while it writes.
    """
    return sorted(instructions, key=_turn) if len(instructions) > 1 else instructions


def _turn(one: Instruction) -> int:
    if isinstance(one, Forward):
        return 0 if one.itinerary.track is not None and not one.returning else 2
    return 2 if isinstance(one, (Send, Note)) else 1
