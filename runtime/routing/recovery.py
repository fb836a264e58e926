"""Recovery of a request whose next holder fails: one story for peers and sources.

A process keeps a copy of the tokens until the next holder has passed them on. The next holder may fail in these ways:

- It is *lost*: its link ends (:meth:`Recovery.on_down`), or it comes back as a new process.
- It is *silent*: the deadline of the hop passes without PROGRESS (:meth:`Recovery.check_hop`). That is also how a
  holder ends that keeps a request for too long while others could run it: then PROGRESS extends nothing any more.
- It *refuses* (:meth:`Recovery.on_refuse`), or the tokens cannot be sent (:meth:`Recovery.on_unsendable`).

Each time the copy here is decided again. A failed holder is paused or gone, so its blocks count as unreachable or
without credit, and this request avoids it; the next holders get its name in ``avoid``. A request sent again gets a new
random branch, which distinguishes it from late messages about the old one.

If a holder and the keeper of its copy fail together, the source starts again from its own copy
(``SourceRules._on_lost``, ``SourceRules._on_silence``).
"""

from __future__ import annotations

import msgspec

from ls_edge.runtime.protocol.messages import MAX_AVOID, Progress, Refuse, RefuseReason
from ls_edge.runtime.routing.decisions import Decisions
from ls_edge.runtime.routing.reach import has_only_holder
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import Forward, NeighborDown, NoteKind, Unsendable
from ls_edge.runtime.routing.state.held_request import HeldRequest
from ls_edge.runtime.routing.state.hop import kept_too_long
from ls_edge.runtime.routing.state.limits import LOOK
from ls_edge.runtime.routing.state.pause import PauseReason
from ls_edge.runtime.routing.state.turn import Turn

MTU = "large packets do not pass (MTU)"
_TEMPORARY = (RefuseReason.DRAINING, RefuseReason.COLD)
"""Reasons to refuse that the next STATE of the process ends."""


class Recovery:
    """Reactions to failures of the next holder."""

    def __init__(self, turn: Turn, custody: Custody, decisions: Decisions) -> None:
        self.count = 0
        """Number of decisions that a failure of the next holder caused."""
        self._turn = turn
        self._custody = custody
        self._decisions = decisions
        self._neighbors = turn.neighbors

    # The next holder is lost.

    def on_down(self, event: NeighborDown) -> None:
        """Decide the requests again whose next holder is lost."""
        name = event.name
        n = self._neighbors.get(name)
        if n is None:
            return
        self._neighbors.forget(n)
        why = f"{event.why}, as each time that tokens are sent: {MTU}"
        self._turn.note(NoteKind.LOST, name, why=why if name in self._neighbors.losing_tokens else event.why)
        for request in [request for request in self._custody.sent.values() if request.downstream == name]:
            self.reroute(request, f"{name} was lost: {event.why}", "lost")
        self._custody.waiting.decide_for_credit_of(name)

    # It is silent, or keeps the request for too long.

    def on_progress(self, sender: str, message: Progress) -> None:
        """Give the next holder more time, unless it keeps the request for too long and others could continue."""
        request, n = self._custody.sent_to(sender, message.transfer), self._neighbors.get(sender)
        if request is None or n is None:
            return
        n.pause.end(PauseReason.SILENT)
        is_late = kept_too_long(request.sent_at, request.deadline, self._turn.now)
        if not is_late or has_only_holder(self._turn, request, self._decisions.rules.local_node()):
            self._custody.extend(request)
        if request.open_track is not None:
            self._turn.send_progress([request.open_track.wave.request])

    def check_hop(self, request: HeldRequest) -> None:
        """Decide a request again whose next holder is silent; until then, tell the keeper of the previous copy."""
        name, now = request.downstream, self._turn.now
        if now < request.hop_at:
            # The keeper of the previous copy must not suspect this process while the next holder is late.
            self._turn.send_progress([request])
            self._custody.check_hop(request)
            return
        n = self._neighbors.get(name)
        if n is not None:
            n.hold_off(PauseReason.SILENT)
        self._custody.waiting.decide_for_credit_of(name)
        self._turn.note(NoteKind.SUSPECT, name, request.request, "no progress within the hop's deadline")
        self.avoid(request, name)
        self.reroute(request, f"{name} showed no progress", "late")

    # It refuses, or cannot be sent to.

    def on_refuse(self, sender: str, message: Refuse) -> None:
        """Decide a refused request again, and pause offers to a process that does not want it."""
        request, n = self._custody.sent_to(sender, message.transfer), self._neighbors.get(sender)
        if request is None or n is None:
            return
        reason = message.reason
        self._custody.decide_again(request, f"{sender} refused: {reason}")
        if reason in (RefuseReason.BUSY, RefuseReason.CANCELED):
            if message.credits > 0 or request.returning:  # its credits do not show that it has no room for this one
                request.avoid[sender] = self._turn.now + LOOK
        elif reason in _TEMPORARY:
            n.hold_off(PauseReason.UNABLE)
        elif reason == RefuseReason.LOSES_TOKENS:
            self._neighbors.give_no_tokens(n)
            self._turn.note(NoteKind.SUSPECT, sender, why=f"it cannot send tokens here: {MTU}")
            self.avoid(request, sender, n.pause.until)
        else:
            self.avoid(request, sender, n.hold_off(PauseReason.UNWILLING))

    def on_unsendable(self, event: Unsendable) -> None:
        """Decide a request again after a pause if it could not be sent."""
        failed = event.failed
        n = self._neighbors.get(failed.to)
        until = self._turn.now if n is None else n.hold_off(PauseReason.UNABLE)
        request = self._custody.sent.get(failed.transfer) if isinstance(failed, Forward) else None
        if request is not None:
            self._custody.wait(request, "could not be sent", until)

    # The next attempt.

    def reroute(self, request: HeldRequest, why: str, failure: str) -> None:
        """Decide a request again whose next holder has failed."""
        self.count += 1
        request.reroutes += 1
        request.failure = failure
        self._turn.note(NoteKind.REROUTED, request.downstream, request.request, why)
        self._custody.decide_again(request, why)

    def avoid(self, request: HeldRequest, name: str, until: float = 0.0) -> None:
        """Do not offer a request to a process until ``until``, and name the process to the next holders."""
        if request.open_track is not None:
            request = request.open_track.wave.request
        request.avoid[name] = until
        itinerary = request.itinerary
        if name not in itinerary.avoid:
            request.itinerary = msgspec.structs.replace(itinerary, avoid=(*itinerary.avoid, name)[-MAX_AVOID:])
