"""What goes into the routing machines and what comes out of them.

Events say what happened, instructions what to do about it; nothing here does input or output. ``tokens`` are opaque to
routing: arrays in a process, anything in a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ls_edge.errors import RequestError
from ls_edge.runtime.protocol.messages import Hello, Itinerary, Message, RequestId, Run, State, TransferId


@dataclass(frozen=True)
class NeighbourUp:
    """A process said HELLO on a link, for the first time or with something new."""

    hello: Hello


@dataclass(frozen=True)
class NeighbourDown:
    """The last link to a process is gone, or it said BYE."""

    name: str
    why: str


@dataclass(frozen=True)
class NeighbourState:
    """A process said how it is."""

    name: str
    state: State


@dataclass(frozen=True)
class Arrived:
    """Tokens came in, checked and decoded."""

    sender: str
    run: Run
    tokens: Any
    codec_us: int = 0
    finite: bool = True
    """Whether all values of the tokens are finite."""


@dataclass(frozen=True)
class Received:
    """Any other message came in."""

    sender: str
    message: Message


@dataclass(frozen=True)
class Unsendable:
    """A message could not be given to a link (its queue is full, or it went away)."""

    name: str
    message: Message


@dataclass(frozen=True)
class Computed:
    """The engine ran ``blocks``, one after the other, for these transfers."""

    blocks: tuple[int, ...]
    transfers: tuple[TransferId, ...]
    outputs: tuple[Any, ...]
    engine_us: int


@dataclass(frozen=True)
class ComputeFailed:
    """The engine raised an error on ``block``, or (``not_finite``) returned NaN or infinity."""

    block: int
    transfers: tuple[TransferId, ...]
    """The transfers of the call that have no output; all of them, unless ``rest`` has the others."""
    why: str
    not_finite: bool = False
    """Whether finite tokens went in and others came out: of the model or of the image, so maybe not of the engine."""
    rest: Computed | None = None
    """What the same call returned for the other transfers of its batch."""


@dataclass(frozen=True)
class Warm:
    """The engine has warmed up; one call took ``block_us``."""

    block_us: int


@dataclass(frozen=True)
class Drain:
    """Take nothing new and get rid of what is held."""


@dataclass(frozen=True)
class Submit:
    """An image's stem tokens are to be answered by ``deadline`` (seconds of the caller's clock)."""

    request: int
    itinerary: Itinerary
    tokens: Any
    deadline: float
    watch_returns: bool = False
    """Whether each RETURN that is used is reported as :class:`Returned`."""


@dataclass(frozen=True)
class Abandon:
    """Nobody waits for this request any more."""

    request: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    NeighbourUp | NeighbourDown | NeighbourState | Arrived | Received | Unsendable | Computed | ComputeFailed | Warm
    | Drain | Submit | Abandon | Tick
)  # fmt: skip


@dataclass(frozen=True)
class Send:
    """Give a message, with tokens where it is a Run, to a process."""

    to: str
    message: Message
    tokens: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Compute:
    """Run blocks, one after the other, for these transfers at once.

    Answered by :class:`Computed` or :class:`ComputeFailed`.
    """

    blocks: tuple[int, ...]
    transfers: tuple[TransferId, ...]
    tokens: tuple[Any, ...] = field(repr=False)
    slots: tuple[int, ...]
    """Of the first block, for each transfer."""


@dataclass(frozen=True)
class TellState:
    """Something in our STATE matters to the neighbours now."""


@dataclass(frozen=True)
class Answer:
    """A request has its last tokens; the head is to run on them."""

    request: int
    itinerary: Itinerary
    tokens: Any = field(repr=False)
    attempts: int
    hands: tuple[str, ...] = ()
    """Who has had its tokens as far as the source saw itself: the itinerary is what its holders say."""


@dataclass(frozen=True)
class Returned:
    """Tokens of a request that is watched came back from ``sender`` and are its furthest now."""

    request: int
    sender: str
    itinerary: Itinerary
    tokens: Any = field(repr=False)


@dataclass(frozen=True)
class Fail:
    """A request ends without an answer."""

    request: int
    error: RequestError
    itinerary: Itinerary
    attempts: int


@dataclass(frozen=True)
class Note:
    """Something for the log: ``what`` happened to whom."""

    what: str
    peer: str = ""
    request: RequestId | None = None
    why: str = ""


Instruction = Send | Compute | TellState | Answer | Returned | Fail | Note
