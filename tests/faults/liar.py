"""A process of ``peers.yaml`` that violates the protocol: its routing machine and its counts.

It greets like any process and reports that it is idle. Its :class:`Lie` (:mod:`~.lies`) defines its reaction to
transfers, and messages that it sends on its own. It has no engines.
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
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.peer_rules import PeerRules
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import Arrived, Event, Forward, Instruction, Received, Send
from ls_edge.runtime.routing.state.limits import Limits

EVERY_S = 0.02
"""Seconds between two turns of the messages that a liar sends on its own."""
_KEPT = 40
"""Number of transfers about which it keeps sending messages."""


class LiarCounts(msgspec.Struct):
    """Counts of a liar, which its process writes to a file."""

    linked: int = 0
    """Number of processes to which it is linked now."""
    received: int = 0
    """Number of transfers that were sent or returned to it."""
    sent: int = 0
    """Number of messages that it sent."""
    refused: int = 0
    """Number of its own transfers that were refused."""


class LyingRules(PeerRules):
    """Rules of a peer whose STATE is made up by its liar."""

    def __init__(self, liar: Machine[PeerRules], blocks: Sequence[int], said: Callable[[str], State]) -> None:
        """``said`` returns its STATE."""
        super().__init__(liar, frozenset(blocks))
        self.said = said

    def state(self, name: str = "") -> State:
        """Return its STATE."""
        return self.said(name)


class Liar(Machine[PeerRules]):
    """The routing machine of a liar: it keeps track of its neighbors and otherwise only executes its lie."""

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
        """``hello`` makes a HELLO from a name, a role and blocks; ``tokens`` have the shape of the model."""
        bands, self.rng = bands or Bands(num_blocks), random.Random(seed)
        super().__init__(
            name,
            lambda liar: LyingRules(liar, blocks, self.state),
            limits=Limits(),
            rng=self.rng,
            model=Model(bands),
        )
        self.name, self.bands = name, bands
        self.hello = hello
        self.tokens = tokens
        self.logits: Any = None
        """Logits that it sends as results of the head, ``[1, C]``."""
        self.all_blocks = tuple(range(num_blocks))
        self.lie = lie
        self.given: list[Arrived] = []
        self.turns = 0
        self.now = 0.0
        self.instructions: list[Instruction] = []
        self.counts = LiarCounts()
        self._turn_at = 0.0

    def others(self, role: str) -> list[str]:
        """Return the names of the linked processes of a role."""
        return sorted(n.name for n in self.neighbors if n.hello.role == role)

    def state(self, name: str = "") -> State:
        """Return its STATE: warm, idle, with every block in reach, and the changes of the lie."""
        reaches = tuple(sorted(self.neighbors.by_name))
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
            super().handle_all([event], now)
        if self.lie.turn is not None and self.now >= self._turn_at:
            self._turn_at = self.now + EVERY_S
            self.turns += 1
            self.instructions += self.lie.turn(self)
        out = [one for one in self.instructions if isinstance(one, (Send, Forward))]
        self.counts.sent += len(out)
        return out

    def next_check(self) -> float | None:
        """Return the time of its next turn."""
        return None if self.lie.turn is None else self._turn_at


Sends = Iterable[Send | Forward]


@dataclass(frozen=True)
class Lie:
    """One kind of behavior against the protocol."""

    given: Callable[[Liar, Arrived], Sends]
    """Reaction to a transfer of tokens."""
    turn: Callable[[Liar], Sends] | None = None
    """Messages that it sends on its own every :data:`EVERY_S` seconds."""
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of its STATE that differ from those of an idle peer."""
    role: str = "peer"
    processes: int = 1
    """Number of source processes."""
    spoils: bool = False
    """Whether its answers may be wrong, which only an audit detects."""
    tempts: bool = True
    """Whether others send it transfers."""
    needs_bands: bool = False
    """Whether it needs a model with several bands."""


def read_counts(path: Path) -> LiarCounts:
    """Read the counts of a liar process; zeros if there are none yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LiarCounts)
    except (OSError, msgspec.MsgspecError):
        return LiarCounts()


def write_counts(path: Path, counts: LiarCounts) -> None:
    """Write the counts in one step."""
    write_file(path, msgspec.json.encode(counts))
