"""The peers as a source finds them: events as they happen, and an immutable snapshot for other threads.

The thread that runs the source's links owns a :class:`PeerMonitor` and publishes what it sees when a peer, a problem or
a count has changed. Every other thread reads that as a :class:`SourceSnapshot`, which is made when somebody asks for
it: peers report many times a second, and snapshots are rarely read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.core.records import PeerEvent, PeerState, Rejection
from ls_edge.runtime.routing.events import Note, NoteKind
from ls_edge.runtime.routing.neighbours import Neighbour
from ls_edge.runtime.routing.source_rules import SourceMachine
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

MAX_EVENTS = 100_000
"""Events that are kept; a peer that comes and goes all the time must not fill the memory."""


@dataclass(frozen=True)
class PeerView:
    """A peer of ``peers.yaml`` as the source finds it."""

    name: str
    blocks: tuple[int, ...]
    """The blocks that ``peers.yaml`` gives it."""
    state: PeerState = PeerState.LOST
    engine: str = ""
    """Engine of its blocks as last announced; empty before its first greeting, as ``bundle_id`` is."""
    bundle_id: str = ""
    warm: bool = False
    credits: int = 0
    """Requests that it would accept now, as it last reported."""
    reaches: tuple[str, ...] = ()
    """Names of the processes that it has a link to."""


@dataclass(frozen=True)
class SourceSnapshot:
    """Peers and counts of a source at one moment."""

    peers: Mapping[str, PeerView]
    missing_blocks: tuple[int, ...]
    """Blocks that no warm peer serves, directly or through another."""
    problems: Mapping[str, str]
    """Reasons that peers cannot be used, by name."""
    mismatched: Mapping[str, str]
    """Peers that serve another model, with the message that names both ids."""
    rejected: Mapping[str, Rejection]
    """Answers and returns that were dropped because they cannot be true, by sender."""
    duplicates: Mapping[int, int]
    """Later answers to the same request, by request."""
    reroutes: int
    """Transfers that were sent again to another holder."""
    dropped: Mapping[str, int]
    """Messages that were dropped and connections that were refused, by reason."""


class _Facts(NamedTuple):
    """Immutable contents of a snapshot."""

    peers: tuple[PeerView, ...]
    """In the order of ``peers.yaml``."""
    held: tuple[tuple[int, ...], ...]
    """Blocks that warm neighbours serve or reach."""
    problems: Mapping[str, str]
    mismatched: dict[str, str]
    rejected: Mapping[str, Rejection]
    duplicates: Mapping[int, int]
    reroutes: int
    dropped: dict[str, int]


class PeerMonitor:
    """Compares peers and counts with those before and publishes what has changed.

    :meth:`on_note`, :meth:`update` and :meth:`close` belong to the thread of the source's links; everything else may be
    used by any thread.
    """

    def __init__(
        self,
        peers: PeersFile,
        num_blocks: int,
        machine: SourceMachine,
        node: Node,
        opened: float,
        on_event: Callable[[PeerEvent], None] | None,
    ) -> None:
        """Count the times of events from ``opened``, in seconds of :func:`time.monotonic`."""
        self._peers = peers
        self._num_blocks = num_blocks
        self._machine = machine
        self._node = node
        self._opened = opened
        self._on_event = on_event
        self._events: list[PeerEvent] = []
        self._changed = threading.Condition()
        self._closed = False
        self._stale = False
        """A note came since the last snapshot."""
        self._neighbour_events = 0
        self._suspicion_ends = float("inf")
        self._states = dict.fromkeys((peer.name for peer in peers.peers), PeerState.LOST)
        """The state of the last event of each peer."""
        lost = tuple(PeerView(peer.name, peer.blocks) for peer in peers.peers)
        self._facts = _Facts(lost, (), node.problems, {}, {}, MappingProxyType({}), 0, {})
        self._making = threading.Lock()
        self._latest = (self._facts, self._snapshot_of(self._facts))

    @property
    def snapshot(self) -> SourceSnapshot:
        """Latest published snapshot; the same object while nothing changes."""
        if self._latest[0] is not self._facts:
            with self._making:
                facts = self._facts
                if self._latest[0] is not facts:
                    self._latest = (facts, self._snapshot_of(facts))
        return self._latest[1]

    @property
    def events(self) -> tuple[PeerEvent, ...]:
        """The events since the source was opened, the first :data:`MAX_EVENTS` of them."""
        return tuple(self._events)

    def wait_for(self, predicate: Callable[[SourceSnapshot], bool], timeout: float) -> SourceSnapshot:
        """Return the first snapshot that satisfies ``predicate``, or the latest after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or predicate(self.snapshot), timeout)
            return self.snapshot

    def on_note(self, note: Note) -> None:
        """Take in a note of the routing machine."""
        self._stale = True
        if note.what in (
            NoteKind.LOST,
            NoteKind.SUSPECT,
        ):  # now, so that a peer that is back immediately is reported as lost too
            self._publish({note.peer: note.why})

    def update(self) -> None:
        """Publish a snapshot if anything has changed since the last."""
        if (
            self._stale
            or self._node.neighbour_events != self._neighbour_events
            or self._node.problems is not self._facts.problems
            or time.monotonic() >= self._suspicion_ends
        ):
            self._publish({})

    def close(self) -> None:
        """Publish the last snapshot and release the threads that wait for another."""
        self._publish({})
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _publish(self, reasons: Mapping[str, str]) -> None:
        self._stale, self._neighbour_events = False, self._node.neighbour_events
        now, before = time.monotonic(), self._facts
        neighbours, peers = self._machine.neighbours, []
        self._suspicion_ends = float("inf")
        for peer, known in zip(self._peers.peers, before.peers, strict=True):
            n = neighbours.get(peer.name)
            peers.append(_view(peer, n, now, known))
            if n is not None and n.suspected_until > now:
                self._suspicion_ends = min(self._suspicion_ends, n.suspected_until)
        held: list[tuple[int, ...]] = []
        for n in neighbours:
            if n.state is not None and n.state.warm and not n.state.draining:
                held += (n.hello.blocks, n.state.reach_blocks, *n.state.far_blocks)
        duplicates = before.duplicates
        if self._machine.rules.duplicates.total() != sum(duplicates.values()):
            duplicates = MappingProxyType(dict(self._machine.rules.duplicates))
        facts = _Facts(
            peers=tuple(peers),
            held=tuple(held),
            problems=self._node.problems,
            mismatched=dict(self._node.mismatched),
            rejected=self._machine.rules.rejected,
            duplicates=duplicates,
            reroutes=self._machine.reroutes,
            dropped=dict(self._node.counts),
        )
        if facts != before:
            with self._changed:
                self._facts = facts
                self._changed.notify_all()
        for view in peers:
            state = PeerState.LOST if view.state is PeerState.COLD else view.state
            if state is not self._states[view.name]:
                self._states[view.name] = state
                self._report(view.name, state, reasons.get(view.name, ""))

    def _snapshot_of(self, facts: _Facts) -> SourceSnapshot:
        """On any thread."""
        return SourceSnapshot(
            peers=MappingProxyType({view.name: view for view in facts.peers}),
            missing_blocks=tuple(sorted(set(range(self._num_blocks)).difference(*facts.held))),
            problems=facts.problems,
            mismatched=MappingProxyType(facts.mismatched),
            rejected=facts.rejected,
            duplicates=facts.duplicates,
            reroutes=facts.reroutes,
            dropped=MappingProxyType(facts.dropped),
        )

    def _report(self, peer: str, state: PeerState, why: str) -> None:
        event = PeerEvent(round((time.monotonic() - self._opened) * 1e6), peer, state, why)
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                log.exception("a callback for peer events failed")


def _view(peer: PeerConfig, n: Neighbour | None, now: float, before: PeerView) -> PeerView:
    if n is None:
        return PeerView(peer.name, peer.blocks, engine=before.engine, bundle_id=before.bundle_id)
    state = n.state
    if state is None or not state.warm:
        found = PeerState.COLD
    elif state.stuck:
        found = PeerState.STUCK
    elif state.draining:
        found = PeerState.DRAINING
    else:
        found = PeerState.SUSPECT if now < n.suspected_until else PeerState.ALIVE
    return PeerView(
        peer.name,
        peer.blocks,
        found,
        n.hello.engine,
        n.hello.bundle_id,
        state is not None and state.warm,
        n.reported_credits,
        () if state is None else state.reaches,
    )
