"""A process with a place in ``peers.yaml`` that does not keep to the protocol: its routing machine and its counts.

It greets as every process does, reports that it is idle, and does with the transfers that it receives, or sends by
itself, what its :class:`Lie` defines (:mod:`~.lies`). It has no engines.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.files import write_file
from ls_edge.runtime.protocol.messages import (
    Hello,
    Refuse,
    State,
)
from ls_edge.runtime.routing.events import Arrived, Event, Forward, Instruction, Received, Send
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.peer_routing import PeerMachine

EVERY_S = 0.02
"""Seconds between two turns of what a liar sends by itself."""
_KEPT = 40
"""Transfers about which it goes on sending messages."""


class LiarCounts(msgspec.Struct):
    """What a liar counts; its process writes them to a file as it goes."""

    linked: int = 0
    """Processes that it has a link to now."""
    received: int = 0
    """Transfers that were sent or returned to it."""
    sent: int = 0
    """Messages that it sent."""
    refused: int = 0
    """Transfers of its own that were refused."""


class Liar(PeerMachine):
    """The routing machine of a liar: it keeps track of its neighbours and otherwise only executes its lie."""

    def __init__(
        self,
        name: str,
        blocks: Sequence[int],
        num_blocks: int,
        lie: Lie,
        hello: Callable[[str, str, Sequence[int]], Hello],
        tokens: Any,
        *,
        seed: int = 0,
        bands: Bands | None = None,
    ) -> None:
        """``hello`` makes a description of a name, a role and blocks; ``tokens`` are some of the model's shape."""
        super().__init__(name, blocks, limits=Limits(), rng=random.Random(seed), bands=bands or Bands(num_blocks))
        self.hello = hello
        self.tokens = tokens
        self.all_blocks = tuple(range(num_blocks))
        self.lie = lie
        self.given: list[Arrived] = []
        self.turns = 0
        self.counts = LiarCounts()
        self._turn_at = 0.0

    def others(self, role: str) -> list[str]:
        """Names of the processes of a role that it has a link to."""
        return sorted(n.name for n in self.neighbours if n.hello.role == role)

    def state(self, name: str = "") -> State:
        """Its STATE: warm, idle, with every block in reach, changed by what the lie defines."""
        reaches = tuple(sorted(self.neighbours.by_name))
        honest = State(True, False, False, 16, 0, self.turns, 1, reaches=reaches, reach_blocks=self.all_blocks)
        return msgspec.structs.replace(honest, **self.lie.state)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Handle events and return the messages of the lie."""
        return [one for event in events for one in self._lie_about(event, now)]

    def _lie_about(self, event: Event, now: float) -> list[Send | Forward]:
        self.now = max(self.now, now)
        self.instructions = []
        if isinstance(event, Arrived):
            self.counts.received += 1
            self.given = [*self.given, event][-_KEPT:]
            self.instructions += self.lie.given(self, event)
        elif isinstance(event, Received):
            self.counts.refused += isinstance(event.message, Refuse)
        else:
            super().dispatch(event)
        if self.lie.turn is not None and self.now >= self._turn_at:
            self._turn_at = self.now + EVERY_S
            self.turns += 1
            self.instructions += self.lie.turn(self)
        out = [one for one in self.instructions if isinstance(one, (Send, Forward))]
        self.counts.sent += len(out)
        return out

    def next_check(self) -> float | None:
        """The time of its next turn."""
        return None if self.lie.turn is None else self._turn_at


Sends = Iterable[Send | Forward]


@dataclass(frozen=True)
class Lie:
    """One kind of behaviour against the protocol."""

    given: Callable[[Liar, Arrived], Sends]
    """The messages that follow a transfer of tokens to it."""
    turn: Callable[[Liar], Sends] | None = None
    """The messages that it sends by itself, every :data:`EVERY_S` seconds."""
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its STATE other than those of an idle peer."""
    role: str = "peer"
    processes: int = 1
    """Number of source processes that it is at once."""
    spoils: bool = False
    """Whether answers that it has a part in may be wrong, which only an audit detects."""
    tempts: bool = True
    """Whether others send it transfers at all."""
    needs_bands: bool = False
    """Whether it is one only about a model of several bands."""


def read_counts(path: Path) -> LiarCounts:
    """Read the counts of a liar process; zeros where there are none yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LiarCounts)
    except (OSError, msgspec.MsgspecError):
        return LiarCounts()


def write_counts(path: Path, counts: LiarCounts) -> None:
    """Write the counts in one step."""
    write_file(path, msgspec.json.encode(counts))
