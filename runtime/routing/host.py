"""The machine as its parts see it, and what it asks the rules of a source or a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ls_edge.core.bands import Bands
from ls_edge.runtime.protocol.messages import ReturnReason, TransferId
from ls_edge.runtime.routing.candidates import LocalNode
from ls_edge.runtime.routing.events import Arrived, Instruction
from ls_edge.runtime.routing.held_request import HeldRequest
from ls_edge.runtime.routing.limits import Limits
from ls_edge.runtime.routing.neighbours import Neighbours


class Rules(Protocol):
    """What a source and a peer do differently with a request."""

    def take_in(self, event: Arrived) -> None:
        """Hold tokens that arrived and send ACCEPT, or send REFUSE."""

    def local_node(self) -> LocalNode:
        """Return what this process can run itself."""

    def next_step(self, request: HeldRequest) -> bool:
        """Take a step that needs no policy; return whether there was one."""

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Act on a request that no reachable process can take."""

    def lost(self, request: HeldRequest) -> None:
        """Act on a request that is AWAY, and of which there is no news."""

    def ended(self, request: HeldRequest) -> None:
        """Clean up after a request that is not held any more."""

    def out_of_budget(self, request: HeldRequest) -> bool:
        """End a request whose time is over, or send it home; return whether it was."""

    def finish(self) -> float:
        """Follow up on the events of a turn; return the time of the next :class:`Tick` for this, or infinity."""


class Host(Protocol):
    """The machine that owns a part; see ``Machine``."""

    name: str
    limits: Limits
    bands: Bands
    now: float
    instructions: list[Instruction]
    held: dict[TransferId, HeldRequest]
    neighbours: Neighbours
    handlers: dict[type, Callable[..., None]]

    @property
    def rules(self) -> Rules:
        """Rules of a source or a peer."""

    def look_at_hop(self, request: HeldRequest) -> None:
        """Act on a request whose next holder is late."""
