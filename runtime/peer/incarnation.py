"""An incarnation of a peer: its links, routing and engine calls, from listening with one bundle until it has left.

It listens first, so that a port in use is reported immediately, then loads and warms up its engines.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from ls_edge.core.errors import EngineError, LsEdgeError
from ls_edge.core.logs import LoggedCounts
from ls_edge.core.parts import STEM, shown_parts
from ls_edge.core.peers_file import PeersFile
from ls_edge.device.threads import batch_scheduling
from ls_edge.runtime.peer.counts import PeerSnapshot
from ls_edge.runtime.peer.executor import BlockExecutor
from ls_edge.runtime.peer.inspector import Inspector
from ls_edge.runtime.peer.setup import PeerSetup
from ls_edge.runtime.peer.threads import LoopThreads
from ls_edge.runtime.protocol.messages import MAX_DOCUMENT, MINOR, Findings, Hello, Inspect, new_incarnation
from ls_edge.runtime.routing.peer.peer_rules import peer_machine
from ls_edge.runtime.routing.recent_events import text_of
from ls_edge.runtime.routing.state.candidates import ONE_BAND, Model
from ls_edge.runtime.routing.state.events import Compute, Computed, ComputeFailed, Decode, Drain, Instruction, Warm
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.transport.node import MAX_WAIT_S, Node, NodeSettings

if TYPE_CHECKING:
    from ls_edge.runtime.peer.decoder import Decoder

log = logging.getLogger("ls_edge.runtime")

_LEAVE_WITHIN = 4.7
"""Seconds after SIGTERM until a peer leaves, even if it still holds requests."""
_SIGNALS_EVERY_S = 0.2
"""Seconds after which a signal is handled although another thread received it. On a loaded machine, the system chose
another thread in two of three cases, and the main thread did not wake."""
_TICK_S = 0.1
"""Maximum wait for events in seconds while something is due by the clock."""
READ_WITHIN_S = 0.03
"""Maximum time that messages stay unread while the engine runs a call and has its next one: new work for the engine has
to wait anyway, and a turn of the loop would compete with it for a core."""
SHORT_CALL_S = READ_WITHIN_S
"""Maximum usual time of an engine call that the loop's thread runs itself if nothing else waits for the engine. It
equals the time that messages may stay unread anyway."""
_ENGINE_WITHIN_S = 60.0
"""Maximum time for which a measurement waits for one call of the engine."""
_Result = Computed | ComputeFailed | Warm | LsEdgeError


class Incarnation:
    """Links, routing machine and engines of a peer; :meth:`serve` blocks until it has left."""

    def __init__(self, setup: PeerSetup, executor: BlockExecutor, installer: Installer | None) -> None:
        """Listen; raise :class:`LinkError` if the port is in use."""
        self.stops = 0
        """Requests to leave: 1 drains, 2 leaves immediately."""
        self.setup, self.executor, self._installer = setup, executor, installer
        self._failure: LsEdgeError | None = None
        self._failed_calls = LoggedCounts()
        self._new_peers: PeersFile | None = None
        manifest, serves = setup.manifest, setup.bundle is not None
        self._greeting = Hello(
            name=setup.entry.name,
            role="peer",
            incarnation=new_incarnation(),
            minor=MINOR,
            model_id=manifest.model_id,
            bundle_id=manifest.bundle_id,
            blocks=setup.entry.blocks if serves else (),
            codec=setup.entry.codec,
        )
        """HELLO without the fields that change."""
        bands = ONE_BAND if setup.bundle is None else setup.bundle.bands
        transfer_s = setup.peers.heartbeat.transfer_s(manifest.tokens.bytes_per_image)
        self.machine = peer_machine(
            setup.entry.name,
            self._greeting.blocks,
            limits=setup.settings.limits or Limits.of(setup.entry.credits, transfer_s),
            rng=random.SystemRandom(),
            max_batch=setup.entry.max_batch,
            model=Model(bands, manifest.bundle_id),
        )
        self._inspector: Inspector | None = None
        self._decoder: Decoder | None = None
        with batch_scheduling():
            self.node = self._new_node()
            if setup.settings.examine is not None:  # now: later, the limit of threads may be reached
                self._inspector = Inspector(setup.settings.examine, self._measure, self.node.send_to, self.node.wake)
            if STEM in self._greeting.blocks:
                from ls_edge.runtime.peer.decoder import Decoder

                is_held = self.machine.held.__contains__
                self._decoder = Decoder(manifest.image, f"decoder of {setup.entry.name}", self.node.wake, is_held)
        if installer is not None:
            installer.attach(self.node, self.machine, serves=serves)
        names = f"links of {setup.entry.name}", f"engine of {setup.entry.name}"
        self._threads: LoopThreads[_Result] = LoopThreads(self._loop(), self.node.wake, names=names)

    def stop(self) -> None:
        """Drain and leave; a second call leaves immediately. Safe in a signal handler."""
        self.stops += 1
        self.node.wake()

    @property
    def snapshot(self) -> PeerSnapshot:
        """Completed and held work; any thread may read it."""
        machine, rules, engine = self.machine, self.machine.rules, self.machine.rules.engine
        return PeerSnapshot(
            name=self._greeting.name,
            bundle_id=self._greeting.bundle_id,
            warm=rules.warm,
            stuck=engine.stuck,
            held=len(machine.held),
            queue=engine.length,
            credits=rules.credits,
            failed_blocks=len(engine.failed_blocks),
            linked=frozenset(machine.neighbors.by_name),
            dropped=dict(self.node.counts),
            reroutes=machine.recovery.count,
            links=self.node.link_counts,
            engine=self.executor.counts,
        )

    def change_peers(self, peers: PeersFile) -> None:
        """Link to the processes of this file from the next turn on; its own entry and keys must be unchanged."""
        self._new_peers = peers
        self.node.wake()

    def serve(self, look: Callable[[], None] = lambda: None) -> None:
        """Load, warm up and serve; raise the error that keeps the engines from loading.

        ``look`` is called by this thread about five times a second.
        """
        with batch_scheduling():
            self._threads.start()
            try:
                while not wait([self._threads.ended], _SIGNALS_EVERY_S).done:
                    look()
                self._threads.ended.result()
            finally:
                self.stops = 2  # if this thread was interrupted
                self.node.wake()
                if self._threads.close():  # otherwise an engine hangs, and ends with the process
                    self.executor.close()
                if self._decoder is not None:
                    self._decoder.close()
                if self._inspector is not None:
                    self._inspector.close(0.0)

    def _inspect(self, name: str, asked: Inspect) -> None:
        if asked.events:
            events = f"\n{text_of(self.machine.recent)}".encode()[-MAX_DOCUMENT:]
            self.node.send_to(name, Findings((), events.partition(b"\n")[2]))  # without a line that is cut
        else:
            assert self._inspector is not None
            self._inspector.ask(name, asked.measure_ms)

    def _measure(self, seconds: float) -> bytes:
        """Time the engines, one call at a time between the calls of requests; return the JSON document."""
        bundle = self.setup.bundle
        if bundle is None or not self.machine.rules.warm:
            raise EngineError(f"{self._greeting.name} is not serving a bundle yet; push one, or wait until it is warm")

        def call(job: Callable[[], object]) -> None:
            done: Future[None] = Future()

            def run() -> None:
                try:
                    job()
                except Exception as error:  # noqa: BLE001  the caller raises it
                    done.set_exception(error)
                else:
                    done.set_result(None)

            self._threads.submit(run)
            done.result(_ENGINE_WITHIN_S)

        found = msgspec.json.encode(self.executor.profile(bundle, seconds, call))
        if len(found) > MAX_DOCUMENT:
            raise EngineError(
                f"the profile has {len(found)} bytes, at most {MAX_DOCUMENT} can be sent; run 'ls-edge bench' there"
            )
        return found

    def _new_node(self) -> Node:
        setup, name, closed = self.setup, self._greeting.name, ""
        if setup.bundle is None:
            note = None if self._installer is None else self._installer.note
            closed = f"{name} has no bundle to serve: {note}" if note else f"{name} has no bundle yet"
            log.warning("waiting for a bundle", extra={"peer": name, "address": setup.entry.bind, "why": closed})
        return Node(
            NodeSettings(name, "peer", setup.peers, setup.manifest, setup.keys, setup.settings.strict_bundle, closed),
            self.machine,
            execute=self._execute,
            hello=self._hello,
            state=self.machine.rules.announcer.state,
            installer=self._installer,
            inspect=None if setup.settings.examine is None else self._inspect,
        )

    def _hello(self) -> Hello:
        failed = self.machine.rules.engine.failed_blocks
        return msgspec.structs.replace(
            self._greeting,
            blocks=tuple(block for block in self._greeting.blocks if block not in failed),
            engine="" if self.setup.bundle is None else self.executor.text,
            note=UNSET if self._installer is None else self._installer.note,
            files=() if self._installer is None else self._installer.files.own,
        )

    def _loop(self) -> Iterator[None]:
        """Serve turn by turn; yield when the loop's thread may run short engine calls."""
        name, threads, engine = self._greeting.name, self._threads, self.machine.rules.engine
        extra = {"peer": name, "address": self.setup.entry.bind, "blocks": list(shown_parts(self._greeting.blocks))}
        log.info("listening", extra=extra)
        if self.setup.bundle is not None:
            threads.submit(self.executor.load)
        leave_at, broken = float("inf"), False
        try:
            while self._failure is None:
                unread_for = READ_WITHIN_S if engine.is_ahead and not engine.stuck else 0.0
                # The end of a drain and the repeated requests of a store depend on the clock alone.
                is_timed = self.stops or (self._installer is not None and self._installer.is_timed)
                at_most = 0.0 if threads.has_short else _TICK_S if is_timed else MAX_WAIT_S
                self.node.step(at_most, self._take_results, unread_for=unread_for)
                self._do_other_work()
                if engine.keeps_failing and not self.stops:  # a new process may get the memory that this one lacks
                    broken, self.stops = True, 1
                if self.stops and leave_at == float("inf"):
                    leave_at = time.monotonic() + _LEAVE_WITHIN
                    log.info("draining", extra={"peer": name, "held": len(self.machine.held)})
                    self.node.feed(Drain())
                if self.stops > 1 or (self.stops and not self.machine.held) or time.monotonic() >= leave_at:
                    log.info("leaving", extra={"peer": name, "held": len(self.machine.held)})
                    self.node.leave("draining")
                    if broken:
                        *_, why = engine.failed_blocks.values()
                        raise EngineError(f"all blocks of {name} keep failing, the last one: {why}")
                    return
                if threads.has_short:
                    yield
                    self._take_results()
        finally:
            self.node.close()
        raise self._failure

    def _do_other_work(self) -> None:
        """Handle work outside of routing: a changed ``peers.yaml``, checks of the machine, and pushes."""
        if self._inspector is not None:
            self._inspector.step()
        if self._installer is not None:
            self._installer.step()
            if self._installer.is_switching:
                self.stops = self.stops or 1
        if self._new_peers is not None:
            peers, self._new_peers = self._new_peers, None
            self.node.change_peers(peers, self.setup.keys)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Decode) and self._decoder is not None:
            self._decoder.submit(instruction)
            return
        assert isinstance(instruction, Compute)
        call = partial(self.executor.run, instruction)
        if self._is_short(instruction):
            self._threads.submit_short(call)
        else:
            self._threads.submit_in_order(call)

    def _is_short(self, compute: Compute) -> bool:
        """Return whether the loop's thread may run a call.

        It may if nothing else waits for the engine, no track can return meanwhile, and the tokens stay on the host.
        """
        engine = self.machine.rules.engine
        return (
            engine.length == 1
            and not engine.beside_wave
            and len(compute.blocks) * engine.block_us <= SHORT_CALL_S * 1e6
            and self._threads.may_run_here
            and self.executor.is_on_host
        )

    def _take_results(self) -> None:
        for decoded in self._decoder.results() if self._decoder is not None else ():
            self.node.feed(decoded)
        for result in self._threads.results():
            if isinstance(result, LsEdgeError):
                self._failure = result
            else:
                self._take(result)

    def _take(self, result: Computed | ComputeFailed | Warm) -> None:
        done = result.rest if isinstance(result, ComputeFailed) else result
        if isinstance(done, Computed):
            self.executor.counts.add(done)
        elif isinstance(result, ComputeFailed):
            self._failed_calls.note("calls", "engine call failed", peer=self._greeting.name, why=result.why)
        failed = len(self.machine.rules.engine.failed_blocks)
        self.node.feed(result)
        if isinstance(result, Warm) or len(self.machine.rules.engine.failed_blocks) != failed:
            self.node.repeat_greeting()
        if isinstance(result, Warm):
            extra = {"peer": self._greeting.name, "provider": self.executor.provider}
            log.info("warm", extra={**extra, "block_ms": result.block_us / 1e3})
