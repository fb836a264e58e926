"""The loop of a source: links, routing machine, requests and audits, on one thread (the *source thread*).

The source thread runs stem and head itself if they are short; otherwise a second thread, the worker, runs them
(``runtime/peer/threads.py``). A *thin* source leaves them to the peers. Other threads put work into the queues of
:mod:`~ls_edge.runtime.source.requests` and read the snapshot of :mod:`~ls_edge.runtime.source.peer_monitor`.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec
import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LsEdgeError, SourceClosed
from ls_edge.core.parts import ENDS, HEAD
from ls_edge.core.peers_file import PeersFile, SourceEntry
from ls_edge.core.records import PeerEvent
from ls_edge.device.threads import batch_scheduling
from ls_edge.runtime.peer.threads import LoopThreads
from ls_edge.runtime.protocol.messages import MINOR, Hello, State, new_alias, new_incarnation
from ls_edge.runtime.protocol.payload import EncodedImage
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.routing.source.source_rules import SourceMachine, source_machine
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import Complete, Fail, Instruction
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.source.audit import Auditor, Recomputation
from ls_edge.runtime.source.follower import Follower
from ls_edge.runtime.source.peer_monitor import PeerEvents, PeerMonitor
from ls_edge.runtime.source.requests import Requests
from ls_edge.runtime.source.results import Answer, InFlightRequest, PartResult
from ls_edge.runtime.source.settings import Itineraries, Settings, check_policy
from ls_edge.runtime.source.stem_and_head import StemAndHead
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.node import Node, NodeSettings

log = logging.getLogger("ls_edge.runtime")

_POLL_S = 0.1
"""Maximum wait for the links, in seconds."""


@dataclass(frozen=True)
class SourceSetup:
    """Settings that all loops of a source have in common."""

    name: str
    settings: Settings
    keys: KeyPair | None
    limits: Limits | None
    is_thin: bool
    follower: Follower

    def machine(self, alias: str, bundle: Bundle, peers: PeersFile) -> SourceMachine:
        """Return the routing machine for a bundle."""
        transfer_s = peers.heartbeat.transfer_s(bundle.manifest.tokens.bytes_per_image)
        return source_machine(
            alias,
            limits=self.limits or Limits.of(transfer_s=transfer_s),
            rng=random.SystemRandom(),
            model=Model(bundle.bands, self.strict_id(bundle)),
        )

    def strict_id(self, bundle: Bundle) -> str:
        """Return the id of the only bundle that may run, or an empty string."""
        return bundle.manifest.bundle_id if self.settings.strict_bundle else ""


class SourceLoop:
    """Loop of a source, from its opening until it is closed; :class:`Source` is its public side."""

    def __init__(
        self,
        source: SourceSetup,
        peers: PeersFile,
        bundle: Bundle,
        on_event: Callable[[PeerEvent], None] | None = None,
        before: SourceLoop | None = None,
    ) -> None:
        """Open stem and head unless peers run them, dial the peers, and start the threads.

        ``before`` is the loop that this one will :meth:`succeed`.
        """
        name, settings, follower = source.name, source.settings, source.follower
        self.opened: float = time.monotonic() if before is None else before.opened
        """Time origin of events and records."""
        self._process = os.getpid()
        self.model_id = bundle.manifest.model_id
        self._ids: Iterator[int] = itertools.count() if before is None else before._ids
        manifest, alias = bundle.manifest, new_alias(name)
        machine = source.machine(alias, bundle, peers)
        check_policy(bundle, find_policy(settings.policy))
        self._follower = follower
        self._is_current = False
        self._seen_events = -1
        """Number of events of neighbors at the last look at their files; -1 to look again."""
        self._new_peers: tuple[PeersFile, KeyPair | None] | None = None
        self._successor: SourceLoop | None = None
        strict_id, codecs = source.strict_id(bundle), {peer.name: peer.codec for peer in peers.peers}
        recomputation = (
            Recomputation(bundle, codecs, lambda peer: strict_id or self._bundle_of(peer)) if settings.audit else None
        )
        with batch_scheduling():  # for the threads of the engine library, too
            entry = peers.source(name) or SourceEntry(name)
            self.engines = None if source.is_thin else StemAndHead(bundle, settings, entry)
        if self.engines is not None:
            machine.custody.own_us = self.engines.usual_us[HEAD]
        itineraries = Itineraries(alias, settings, bundle, is_thin=source.is_thin)
        greeting = Hello(alias, "source", new_incarnation(), MINOR, manifest.model_id, manifest.bundle_id)
        with batch_scheduling():
            self.node = Node(
                NodeSettings(alias, "source", peers, manifest, source.keys, settings.strict_bundle),
                machine,
                execute=self._execute,
                hello=lambda: msgspec.structs.replace(greeting, files=follower.files),
                state=lambda _name: State(True, False, False, 0, 0, 0, 0),
            )
            events = PeerEvents(peers, self.opened, on_event)
            needed = frozenset((*range(bundle.num_blocks), *(ENDS if source.is_thin else ())))
            self.monitor = PeerMonitor(peers, needed, machine, self.node, events)
            self.node.driver.on_note = self.monitor.on_note
            self.auditor = None if recomputation is None else Auditor(settings.audit, recomputation)
            self._threads: LoopThreads[PartResult] = LoopThreads(
                self._run(), self.node.wake, names=("source", "stem and head")
            )
            max_inflight, classes = settings.max_inflight, manifest.classes
            self.requests = Requests(
                self.engines, machine, self.node, self._threads, self.auditor, itineraries, max_inflight, classes
            )
            self._threads.start()

    # On any thread.

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that opened the source."""
        return os.getpid() != self._process

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the source thread."""
        return self._threads.is_loop

    def submit(self, image: np.ndarray | EncodedImage, name: str, label: int | None, budget_s: float) -> Future[Answer]:
        """Submit an image, preprocessed unless peers run the stem; raise :class:`SourceClosed` after the end."""
        if self.is_forked:
            raise SourceClosed(
                f"this source belongs to process {self._process}, whose threads process {os.getpid()}, a fork of it, "
                "does not have; open a source in each process"
            )
        now = time.monotonic()
        submitted_us = round((now - self.opened) * 1e6)
        inflight = InFlightRequest(next(self._ids), image, now, now + budget_s, submitted_us, name, label)
        self.requests.join(inflight)
        if self._threads.is_wanted or budget_s < _POLL_S:  # otherwise the next turn of the thread is soon enough
            self.node.wake()
        return inflight.future

    def change_peers(self, peers: PeersFile, keys: KeyPair | None) -> None:
        """Use the peers of this file, and this key pair, from the next turn on."""
        self._new_peers = peers, keys
        self.node.wake()

    def follow_files(self) -> None:
        """Look at the files that neighbors announce from the next turn on."""
        self._is_current = True

    def succeed(self, before: SourceLoop) -> None:
        """Replace the loop of the previous model, which only ends its requests."""
        before._is_current = False
        self.follow_files()
        self.monitor.events.succeed(before.monitor.events)

    def hand_over(self, successor: SourceLoop) -> None:
        """Let the loop of the next model answer the open requests, since peers of this model are missing."""
        self._successor = successor
        self.node.wake()

    def close(self) -> None:
        """End open requests and join the threads; they and the sockets belong to the process that opened them."""
        if self.is_forked:
            return
        self.requests.line.close()
        self.node.wake()
        if not self.is_own_thread:  # a callback may close the source
            wait([self._threads.ended], 5.0)
        self._threads.close()
        if self.auditor is not None:
            self.auditor.close()
        if self.engines is not None:
            self.engines.close()

    def _bundle_of(self, name: str) -> str:
        """Return the id of the bundle that a peer serves, or an empty string if it never announced one."""
        view = self.monitor.snapshot.peers.get(name)
        return "" if view is None else view.bundle_id or ""

    # On the source thread.

    def _run(self) -> Iterator[None]:
        """Run the links turn by turn; yield when this thread may run short stems and heads."""
        requests, threads = self.requests, self._threads
        try:
            while not requests.line.is_closed:
                wait_s = 0.0 if threads.is_wanted else requests.next_wait(_POLL_S)
                self.node.step(wait_s, self._take_over)
                if threads.has_short:
                    yield
                    requests.take_results()
                self._look_at_files()
                self.monitor.update()
            self.node.leave("done")
        except Exception as error:
            known = isinstance(error, LsEdgeError)
            log.error("the source failed", extra={"why": str(error)}, exc_info=None if known else error)
            self.node.close()
        finally:
            requests.line.close()  # nothing is submitted after this
            requests.end_all()
            self.monitor.close()

    def _look_at_files(self) -> None:
        """Compare the files of the neighbors after each news of theirs."""
        events = self.node.driver.neighbor_events
        if self._is_current and events != self._seen_events:
            again = self._follower.look(neighbor.hello for neighbor in self.node.driver.machine.neighbors)
            self._seen_events = -1 if again else events

    def _take_over(self) -> None:
        self.requests.take_over()
        if self._successor is not None:
            self.requests.move_to(self._successor.requests)
        new, self._new_peers = self._new_peers, None
        if new is not None:
            if self.auditor is not None:
                self.auditor.recomputation.codecs |= {peer.name: peer.codec for peer in new[0].peers}
            self.node.change_peers(*new)
            self.monitor.change_peers(new[0])

    def _execute(self, instruction: Instruction) -> None:
        assert isinstance(instruction, (Complete, Fail))
        self.requests.execute(instruction)
