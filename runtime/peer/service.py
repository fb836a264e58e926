"""The work of a peer with one bundle, or while it waits for its first: links, routing and engine calls.

It listens first (so a port in use is reported immediately), then loads and warms up its engines.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET, UnsetType

from ls_edge.core.bundle import Bundle, ImageSpec, Manifest, Part, Parts, TokenSpec
from ls_edge.core.errors import EngineError, LsEdgeError
from ls_edge.core.order_costs import read_order_costs
from ls_edge.core.peers_file import EngineKind, PeerConfig, PeersFile
from ls_edge.engines.engine import Engine
from ls_edge.engines.executor import Executor
from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.counts import EngineCounts, PeerSnapshot
from ls_edge.runtime.execution.engine_calls import run_blocks
from ls_edge.runtime.execution.loop_threads import LoopThreads
from ls_edge.runtime.peer.inspector import Examine, Inspector
from ls_edge.runtime.protocol.messages import MINOR, Hello
from ls_edge.runtime.routing.candidates import ONE_BAND, Model
from ls_edge.runtime.routing.events import Compute, Computed, ComputeFailed, Drain, Instruction, Warm
from ls_edge.runtime.routing.limits import Limits
from ls_edge.runtime.routing.peer_rules import PeerMachine, peer_machine
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.node import MAX_WAIT_S, Node, NodeSettings, new_incarnation

log = logging.getLogger("ls_edge.runtime")

_LEAVE_WITHIN = 4.7
"""Seconds after SIGTERM until a peer leaves with whatever it holds."""
_TICK_S = 0.1
"""Maximum wait for events in seconds while something is due by the clock."""
READ_WITHIN_S = 0.03
"""Maximum time that messages stay unread while the engine runs a call and has its next one: their work for the engine
has to wait anyway, and a turn of the loop takes its core from it."""
SHORT_CALL_S = READ_WITHIN_S
"""Maximum usual time of an engine call that the loop's thread runs itself if nothing else waits for the engine: no
message then waits longer than it may anyway."""
_NO_PART = Part("", "", 0)
_NO_MODEL = Manifest(
    schema=1,
    bundle_id="",
    model_id="",
    model="",
    method="",
    classes=(),
    image=ImageSpec((1, 1), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    tokens=TokenSpec(1, 1),
    needs_slot=False,
    precision="",
    opset=0,
    parts=Parts(_NO_PART, _NO_PART, ()),
)

_Result = Computed | ComputeFailed | Warm | LsEdgeError


@dataclass(frozen=True)
class PeerSettings:
    """Settings of a peer that do not depend on its bundle."""

    peers: PeersFile
    entry: PeerConfig
    cores: EngineCores
    keys: KeyPair | None
    strict_bundle: bool
    engine: EngineKind
    threads: int | None
    limits: Limits | None
    until_eof: bool
    examine: Examine | None


class Service:
    """The links, the routing machine and the engines of a peer; :meth:`serve` blocks until it has left."""

    def __init__(
        self,
        settings: PeerSettings,
        bundle: Bundle | None,
        installer: Installer | None,
        open_engines: Callable[[], Mapping[int, Engine]],
        engine_text: Callable[[], str],
    ) -> None:
        """Listen; ``engine_text`` is for reports. Raise :class:`LinkError` if the port is in use."""
        self.bundle = bundle
        self.stops = 0
        """Requests to leave: 1 drains, 2 leaves immediately."""
        self._settings, self._entry, self._installer = settings, settings.entry, installer
        self._open_engines, self._engine_text = open_engines, engine_text
        self._incarnation = new_incarnation()
        self._executor = Executor({})
        self._failure: LsEdgeError | None = None
        self._counts = EngineCounts()
        self._short_call: Callable[[], _Result] | None = None
        """An engine call that the loop's thread is to run after this turn."""
        self._manifest = _NO_MODEL if bundle is None else bundle.manifest
        self._blocks = () if bundle is None else self._entry.blocks
        self.machine = self._new_machine(bundle)
        with settings.cores.others():
            self.node = self._new_node()
        examine = settings.examine
        self._inspector = None if examine is None else Inspector(examine, self.node.send_to, self.node.wake)
        if installer is not None:
            installer.attach(self.node, self.machine, serves=bundle is not None)
        if settings.until_eof:
            os.set_blocking(0, False)
            self.node.watch(0)
        names = f"links of {self._entry.name}", f"engine of {self._entry.name}"
        self._loop_threads: LoopThreads[_Result] = LoopThreads(
            self._loop(), self.node.wake, names=names, cores=settings.cores
        )

    def stop(self) -> None:
        """Drain and leave; a second call leaves immediately. Safe in a signal handler."""
        self.stops += 1
        self.node.wake()

    @property
    def snapshot(self) -> PeerSnapshot:
        """Work done and held; any thread may ask."""
        machine, rules, engine = self.machine, self.machine.rules, self.machine.rules.engine
        return PeerSnapshot(
            name=self._entry.name,
            bundle_id=self._manifest.bundle_id,
            warm=rules.warm,
            stuck=engine.stuck,
            held=len(machine.held),
            queue=engine.length,
            credits=rules.credits,
            failed_blocks=len(engine.failed_blocks),
            linked=frozenset(machine.neighbours.by_name),
            dropped=dict(self.node.counts),
            engine=self._counts,
        )

    def serve(self) -> None:
        """Load, warm up and serve; raise the error that keeps the engines from loading."""
        with self._settings.cores.others():
            self._loop_threads.start()
            try:
                self._loop_threads.join()
            finally:
                self.stops = 2  # if this thread was interrupted
                self.node.wake()
                if self._loop_threads.close():  # otherwise an engine hangs, and ends with the process
                    self._executor.close()
            if self._loop_threads.error is not None:
                raise self._loop_threads.error

    def _new_machine(self, bundle: Bundle | None) -> PeerMachine:
        entry, manifest = self._entry, self._manifest
        tokens_s = self._settings.peers.heartbeat.transfer_s(manifest.tokens.bytes_per_image)
        return peer_machine(
            entry.name,
            self._blocks,
            limits=self._settings.limits or Limits.for_frames(tokens_s).with_credits(entry.credits),
            rng=random.SystemRandom(),
            max_batch=entry.max_batch,
            batch_wait=entry.batch_wait_ms / 1e3,
            model=Model(
                ONE_BAND if bundle is None else bundle.bands,
                None if bundle is None else read_order_costs(manifest.order_costs, bundle.num_blocks),
                manifest.bundle_id,
            ),
        )

    def _new_node(self) -> Node:
        settings, name = self._settings, self._entry.name
        closed = ""
        if self.bundle is None:
            note = self._note
            closed = f"{name} has no bundle to serve: {note}" if note else f"{name} has no bundle yet"
            log.warning("waiting for a bundle", extra={"peer": name, "address": self._entry.bind, "why": closed})
        return Node(
            NodeSettings(name, "peer", settings.peers, self._manifest, settings.keys, settings.strict_bundle, closed),
            self.machine,
            execute=self._execute,
            hello=self._hello,
            state=self.machine.rules.state,
            installer=self._installer,
            inspect=None if settings.examine is None else self._inspect,
        )

    @property
    def _note(self) -> str | UnsetType:
        return UNSET if self._installer is None else self._installer.note

    def _loop(self) -> Iterator[Callable[[], _Result]]:
        """Serve, a turn at a time; yield the engine calls that the thread of the loop is to run itself."""
        name, machine = self._entry.name, self.machine
        log.info("listening", extra={"peer": name, "address": self._entry.bind, "blocks": list(self._blocks)})
        if self.bundle is not None:
            self._loop_threads.submit(self._load)
        leave_at = float("inf")
        try:
            while self._failure is None:
                unread_for = READ_WITHIN_S if machine.rules.engine.is_ahead and not machine.rules.engine.stuck else 0.0
                if self._short_call is not None:  # it runs right after this turn
                    self.node.wake()
                # A drain ends, and a store repeats its requests, by the clock alone.
                is_timed = self.stops or (self._installer is not None and self._installer.is_timed)
                self.node.step(_TICK_S if is_timed else MAX_WAIT_S, self._take_results, unread_for=unread_for)
                self._look_beside()
                if self.stops and leave_at == float("inf"):
                    leave_at = time.monotonic() + _LEAVE_WITHIN
                    log.info("draining", extra={"peer": name, "held": len(machine.held)})
                    self.node.feed(Drain())
                drained = self.stops and machine.rules.idle
                if drained or self.stops > 1 or time.monotonic() >= leave_at:
                    log.info("leaving", extra={"peer": name, "held": len(machine.held)})
                    self.node.leave("draining")
                    return
                if self._short_call is not None:
                    yield self._take_short_call()
                    result = self._loop_threads.result_here()
                    if result is not None:
                        self._take(result)
                    del result  # it holds tokens
        finally:
            self.node.close()
            if self._inspector is not None:
                self._inspector.close()
        raise self._failure

    def _look_beside(self) -> None:
        """Handle standard input, checks of the machine and pushes, which are not part of routing."""
        if self._settings.until_eof and self.node.can_read(0) and at_end(0):
            self.stops = 2
        if self._inspector is not None:
            self._inspector.step()
        if self._installer is not None:
            self._installer.step()
            if self._installer.is_switching:
                self.stops = self.stops or 1

    def _inspect(self, name: str) -> None:
        assert self._inspector is not None
        self._inspector.ask(name)

    def _hello(self) -> Hello:
        return Hello(
            name=self._entry.name,
            role="peer",
            incarnation=self._incarnation,
            minor=MINOR,
            model_id=self._manifest.model_id,
            bundle_id=self._manifest.bundle_id,
            blocks=tuple(block for block in self._blocks if block not in self.machine.rules.engine.failed_blocks),
            engine="" if self.bundle is None else self._engine_text(),
            codec=self._entry.codec,
            note=self._note,
        )

    def _execute(self, instruction: Instruction) -> None:
        assert isinstance(instruction, Compute)
        call = partial(run_blocks, self._executor, instruction)
        if self._short_call is not None:  # the engine runs one at a time
            self._loop_threads.submit(self._take_short_call())
        elif self._is_short(instruction):
            self._short_call = call
            return
        self._loop_threads.submit(call)

    def _is_short(self, compute: Compute) -> bool:
        """Return whether the loop's thread may run a call.

        Nothing else waits for the engine, no track may come home meanwhile, and the engine's memory is the host's.
        """
        engine = self.machine.rules.engine
        return (
            engine.length == 1
            and not engine.beside_wave
            and len(compute.blocks) * engine.times.block_us <= SHORT_CALL_S * 1e6
            and self._loop_threads.may_run_here
            and self._executor.workspace is None
        )

    def _take_short_call(self) -> Callable[[], _Result]:
        call, self._short_call = self._short_call, None
        assert call is not None
        return call

    def _take_results(self) -> None:
        for result in self._loop_threads.results():
            self._take(result)

    def _take(self, result: _Result) -> None:
        if isinstance(result, Computed):
            self._counts.add(result)
            self.node.feed(result)
            return
        if isinstance(result, LsEdgeError):
            self._failure = result
            return
        failed = len(self.machine.rules.engine.failed_blocks)
        if isinstance(result, ComputeFailed) and result.rest is not None:
            self._counts.add(result.rest)
        self.node.feed(result)
        if isinstance(result, Warm) or len(self.machine.rules.engine.failed_blocks) != failed:
            self.node.repeat_greeting()
        if isinstance(result, Warm):
            provider = next(iter(self._executor.engines.values())).provider
            log.info("warm", extra={"peer": self._entry.name, "provider": provider, "block_ms": result.block_us / 1e3})

    def _load(self) -> _Result:
        try:
            self._executor = Executor(self._open_engines())
            block_ms = self._executor.measure(self._entry.max_batch)
        except LsEdgeError as error:
            return error
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return EngineError(f"the engines of {self._entry.name} do not load: {error}; try 'ls-edge doctor'")
        return Warm(max(1, round(block_ms * 1e3)))


def at_end(descriptor: int) -> bool:
    """Return whether a non-blocking descriptor has come to its end."""
    try:
        return not os.read(descriptor, 4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
