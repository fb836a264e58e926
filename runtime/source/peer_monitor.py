"""State of the peers as a source sees it: events as they happen, and an immutable snapshot for other threads.

The source thread owns a :class:`PeerMonitor` and publishes a :class:`SourceSnapshot` whenever a peer, a problem or a
count has changed. All other threads read that snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from ls_edge.core.peer_reports import PeerReport, PeerState
from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.core.records import PeerEvent, Rejection
from ls_edge.runtime.routing.source.source_rules import SourceMachine
from ls_edge.runtime.routing.state.events import Note, NoteKind
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

MAX_EVENTS = 100_000
"""Maximum number of kept events: a peer that repeatedly joins and leaves must not fill the memory."""


class PeerView(PeerReport, frozen=True, kw_only=True):
    """State of a peer of ``peers.yaml`` as the source sees it."""

    name: str
    blocks: tuple[int, ...]
    """Blocks that ``peers.yaml`` gives it."""
    since: float = 0.0
    """Time at which its state began, on the clock of :func:`time.monotonic`."""


@dataclass(frozen=True)
class SourceSnapshot:
    """Peers and counts of a source at one moment."""

    peers: Mapping[str, PeerView]
    """Peers by name, in the order of ``peers.yaml``."""
    needed: frozenset[int]
    """Blocks of the model; also stem and head if peers run them."""
    held: tuple[tuple[int, ...], ...]
    """Blocks that warm neighbors serve or reach."""
    problems: Mapping[str, str]
    """Reasons that peers cannot be used, by name."""
    mismatched: Mapping[str, str]
    """Peers that serve another model: name to the message with both ids."""
    other_models: Mapping[str, str]
    """Ids of these models, by peer."""
    rejected: Mapping[str, Rejection]
    """Invalid answers and returns that were dropped, by sender."""
    late_answers: int
    """Number of later answers to requests."""
    reroutes: int
    """Number of transfers that were sent again to another holder."""
    dropped: Mapping[str, int]
    """Number of dropped messages and refused connections, by reason."""

    @cached_property
    def missing_blocks(self) -> tuple[int, ...]:
        """Needed parts that no warm peer serves, neither directly nor through another peer."""
        return tuple(sorted(self.needed.difference(*self.held)))


class PeerEvents:
    """Events of peers since the opening of a source, and the callback that receives them."""

    def __init__(self, peers: PeersFile, opened: float, on_event: Callable[[PeerEvent], None] | None) -> None:
        """Set the time origin of the events to ``opened``, on the clock of :func:`time.monotonic`."""
        self.all: list[PeerEvent] = []
        self._opened = opened
        self._on_event = on_event
        self._states = dict.fromkeys((peer.name for peer in peers.peers), PeerState.LOST)

    def update(self, views: Mapping[str, PeerView], reasons: Mapping[str, str]) -> None:
        """Report each peer whose state differs from that of its last event, and the removed ones as lost."""
        before = self._states
        self._states = {
            name: PeerState.LOST if view.state is PeerState.COLD else view.state for name, view in views.items()
        }
        for name in before | self._states:
            state = self._states.get(name, PeerState.LOST)
            if state is before.get(name, PeerState.LOST):
                continue
            why = reasons.get(name, "") if name in views else "removed from peers.yaml"
            event = PeerEvent(round((time.monotonic() - self._opened) * 1e6), name, state, why)
            if len(self.all) < MAX_EVENTS:
                self.all.append(event)
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    log.exception("a callback for peer events failed")

    def succeed(self, before: PeerEvents) -> None:
        """Continue the events of another loop of the source, which reports none from now on."""
        report, before._on_event = before._on_event, None
        self.all, before.all = before.all, []
        self._states, self._on_event = dict(before._states), report


class PeerMonitor:
    """Publisher of snapshots and events when peers or counts have changed.

    Only the source thread calls :meth:`on_note`, :meth:`update`, :meth:`change_peers` and :meth:`close`.
    """

    def __init__(
        self, peers: PeersFile, needed: frozenset[int], machine: SourceMachine, node: Node, events: PeerEvents
    ) -> None:
        self.events = events
        self._peers, self._machine, self._node = peers, machine, node
        self._changed = threading.Condition()
        self._closed = False
        self._neighbor_events = 0
        """Count of the node at the last snapshot; -1 after a note, which needs a new snapshot."""
        self._suspicion_ends = float("inf")
        self._needed = needed
        self.snapshot = self._look({})
        """Latest snapshot; the same object while nothing changes."""

    def wait_for(self, predicate: Callable[[SourceSnapshot], bool], timeout: float) -> SourceSnapshot:
        """Return the first snapshot that satisfies ``predicate``, or the latest one after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or predicate(self.snapshot), timeout)
            return self.snapshot

    def change_peers(self, peers: PeersFile) -> None:
        """Report the peers of this file from now on."""
        self._peers, self._neighbor_events = peers, -1

    def on_note(self, note: Note) -> None:
        """Handle a note of the routing machine."""
        self._neighbor_events = -1
        if note.what in (NoteKind.LOST, NoteKind.SUSPECT):
            # Publish now: a peer that returns immediately must be reported as lost first.
            self._publish({note.peer: note.why})

    def update(self) -> None:
        """Publish a snapshot if anything has changed since the last one."""
        if (
            self._node.driver.neighbor_events != self._neighbor_events
            or self._node.problems is not self.snapshot.problems
            or time.monotonic() >= self._suspicion_ends
        ):
            self._publish({})

    def close(self) -> None:
        """Publish the last snapshot and release all threads that wait for a newer one."""
        self._publish({})
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _publish(self, reasons: Mapping[str, str]) -> None:
        self._neighbor_events = self._node.driver.neighbor_events
        found = self._look(self.snapshot.peers)
        if found != self.snapshot:
            with self._changed:
                self.snapshot = found
                self._changed.notify_all()
        self.events.update(found.peers, reasons)

    def _look(self, known: Mapping[str, PeerView]) -> SourceSnapshot:
        """Return the current state; ``known`` has the previous views of the peers."""
        now, neighbors = time.monotonic(), self._machine.neighbors
        suspicions = [n.pause.until for n in neighbors if n.pause.excludes(now)]
        self._suspicion_ends = min(suspicions, default=float("inf"))
        held: list[tuple[int, ...]] = []
        for n in neighbors:
            if n.serves and n.state is not None:
                held += (n.hello.blocks, n.state.reach_blocks)
        peers = {
            peer.name: _view(peer, neighbors.get(peer.name), now, known.get(peer.name)) for peer in self._peers.peers
        }
        return SourceSnapshot(
            peers=MappingProxyType(peers),
            needed=self._needed,
            held=tuple(held),
            problems=self._node.problems,
            mismatched=MappingProxyType({name: why for name, (_, why) in self._node.mismatched.items()}),
            other_models=MappingProxyType({name: model for name, (model, _) in self._node.mismatched.items()}),
            rejected=self._machine.rules.rejected,
            late_answers=self._machine.rules.ended.late_answers,
            reroutes=self._machine.recovery.count,
            dropped=MappingProxyType(dict(self._node.counts)),
        )


def _view(peer: PeerConfig, n: Neighbor | None, now: float, known: PeerView | None) -> PeerView:
    before = known or PeerView(name=peer.name, blocks=peer.blocks, since=now)
    latest, state = (before, None) if n is None else (n.hello, n.state)
    if n is None:
        found = PeerState.LOST
    elif state is None or not state.warm:
        found = PeerState.COLD
    elif state.stuck:
        found = PeerState.STUCK
    elif state.draining:
        found = PeerState.DRAINING
    else:
        found = PeerState.SUSPECT if n.pause.excludes(now) else PeerState.ALIVE
    return PeerView(
        name=peer.name,
        blocks=peer.blocks,
        state=found,
        engine=latest.engine,
        bundle_id=latest.bundle_id,
        warm=state is not None and state.warm,
        credits=None if n is None else n.reported_credits,
        reaches=() if state is None else state.reaches,
        queue=None if state is None else state.queue,
        since=before.since if before.state is found else now,
    )
