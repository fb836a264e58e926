"""What the parts of a machine see of it, and what it asks its rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
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

    def next_step(self, request: HeldRequest) -> bool:
        """Take a step that needs no policy; return whether there was one."""

    def local_node(self, request: HeldRequest) -> LocalNode:
        """Return what this process can run of a request itself."""

    def way_out(self, request: HeldRequest) -> str:
        """Return a process that may reach an unannounced holder, judging by the way of the request, or ""."""

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Act on a request that no reachable process can take."""

    def not_wanted(self, request: HeldRequest, sender: str) -> None:
        """Act on a request that was refused on its way home, as cancelled."""

    def lost(self, request: HeldRequest) -> None:
        """Act on a request that is AWAY, and of which there is no news."""

    def ended(self, request: HeldRequest) -> None:
        """Clean up after a request that is not held any more."""

    def out_of_budget(self, request: HeldRequest) -> bool:
        """End a request if its time is over, or send it home; return whether it was."""

    def budget_end(self, request: HeldRequest) -> float:
        """Return the time at which the budget ends a request in its present stage."""

    def news_by(self, request: HeldRequest) -> float:
        """Return the time by which there has to be news of a request that is AWAY."""

    def after(self) -> None:
        """Follow up on the events of a turn, before anything is decided."""

    def finish(self) -> None:
        """Follow up on what was decided."""

    def next_check(self) -> float:
        """Return the time of the next Tick for other reasons than held requests, or infinity."""

    def faults(self) -> Iterable[tuple[str, HeldRequest | None]]:
        """Return inconsistencies with their requests; see ``Machine.validate``."""


class Host(Protocol):
    """The machine, as its parts see it."""

    now: float
    instructions: list[Instruction]
    held: dict[TransferId, HeldRequest]

    @property
    def name(self) -> str:
        """Name of the process."""

    @property
    def limits(self) -> Limits:
        """Its limits."""

    @property
    def rng(self) -> random.Random:
        """Source of random branches."""

    @property
    def bands(self) -> Bands:
        """Bands of the model."""

    @property
    def neighbours(self) -> Neighbours:
        """Linked processes."""

    @property
    def rules(self) -> Rules:
        """Rules of a source or a peer."""

    @property
    def handlers(self) -> dict[type, Callable[..., None]]:
        """Handlers of events and messages, to which parts add theirs."""
