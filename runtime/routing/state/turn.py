"""Turn of a machine: its time and instructions, and the settings that all parts of the machine read."""

from __future__ import annotations

import random
from collections.abc import Iterable

from ls_edge.runtime.protocol.messages import Message, Progress, RequestId
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import Instruction, Note, NoteKind, Send
from ls_edge.runtime.routing.state.held_request import HeldRequest
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import Neighbors

PROGRESS_EVERY = 0.08
"""Minimum time between two PROGRESS of a transfer. 1/4: no effect, at 6 times the messages and more; x4: 8 needless
reroutes in 60 requests with a slow peer."""


class Turn:
    """Turn in which a process handles events together."""

    def __init__(self, name: str, limits: Limits, model: Model, rng: random.Random) -> None:
        """``rng`` draws branches."""
        self.name = name
        """Name of this process."""
        self.limits = limits
        self.model = model
        self.bands = model.bands
        self.rng = rng
        self.neighbors = Neighbors(limits)
        self.now = 0.0
        self.instructions: list[Instruction] = []
        """Instructions of this turn so far."""

    def send(self, to: str, message: Message) -> None:
        """Send a message to a process."""
        self.instructions.append(Send(to, message))

    def note(self, what: NoteKind, peer: str = "", request: RequestId | None = None, why: str = "") -> None:
        """Add a line to the log."""
        self.instructions.append(Note(what, peer, request, why))

    def send_progress(self, requests: Iterable[HeldRequest]) -> None:
        """Send PROGRESS to the keepers of the previous copies, at most once per :data:`PROGRESS_EVERY`."""
        now, linked = self.now, self.neighbors.by_name
        for request in requests:
            before = request.upstream
            if before is not None and now - request.progress_at >= PROGRESS_EVERY and before in linked:
                request.progress_at = now
                self.send(before, Progress(request.transfer))
