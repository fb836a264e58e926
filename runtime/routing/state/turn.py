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
        self.neighbors = Neighbors(name, limits)
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
        """Send PROGRESS to the keepers of the previous copies, at most once per ``Limits.progress_every``."""
        now, every, linked = self.now, self.limits.progress_every, self.neighbors.by_name
        for request in requests:
            before = request.upstream
            if before is not None and now - request.progress_at >= every and before in linked:
                request.progress_at = now
                self.send(before, Progress(request.transfer))
