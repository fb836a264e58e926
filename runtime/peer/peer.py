"""A peer: a process that serves some blocks of a bundle until it is stopped.

It listens first (so that a port in use is reported at once), then loads and warms up its engines, and counts as warm
only after that. SIGTERM drains: no new work, what is held is finished or handed on, BYE, and the process ends within
five seconds; a second SIGTERM ends it at once.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import UNSET

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, LsEdgeError, UsageError
from ls_edge.core.order_costs import read_order_costs
from ls_edge.core.peers_file import EngineKind, PeersFile, is_loopback
from ls_edge.engines.engine import Engine, warm_up
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import EngineChoice, announce, choose, open_block_engines
from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.counts import EngineCounts, PeerSnapshot
from ls_edge.runtime.execution.engine_calls import run_blocks
from ls_edge.runtime.execution.loop_threads import LoopThreads
from ls_edge.runtime.peer.inspector import Examine, Inspector
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.protocol.messages import MINOR, Hello
from ls_edge.runtime.routing.events import Compute, Computed, ComputeFailed, Drain, Instruction, Warm
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.peer_routing import PeerMachine
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.node import MAX_WAIT_S, Node, new_incarnation

log = logging.getLogger("ls_edge.runtime")

_LEAVE_WITHIN = 4.7
"""Seconds after SIGTERM until a peer leaves whatever it holds."""

READ_WITHIN_S = 0.03
"""Longest that messages stay unread while the engine runs a call and has its next one: what they ask of it comes later
anyway, and a turn of the loop takes its core from it."""
SHORT_CALL_S = READ_WITHIN_S
"""Longest usual time of an engine call that the loop's thread runs itself where nothing else waits for the engine: no
message then waits longer than it may anyway."""
MAX_ENGINE_TEXT = 256
"""Most characters of ``engine`` in HELLO."""

_Result = Computed | ComputeFailed | Warm | LsEdgeError


class Peer:
    """Serve the blocks that ``peers.yaml`` gives to ``name``; :meth:`serve` blocks until the peer has left."""

    def __init__(
        self,
        peers: PeersFile,
        name: str,
        bundle: Bundle,
        *,
        keys: KeyPair | None = None,
        engine: EngineKind | None = None,
        threads: int | None = None,
        strict_bundle: bool = False,
        limits: Limits | None = None,
        until_eof: bool = False,
        installer: Installer | None = None,
        examine: Examine | None = None,
        on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
    ) -> None:
        """``engine`` and ``threads`` win over the file's.

        ``installer`` takes bundles that are pushed, ``examine`` checks this machine for any process that asks.
        ``until_eof``: leave when standard input ends, so as not to outlive the process that started it. Raises
        :class:`LinkError` if the port is in use.
        """
        self.entry = peers.peer(name)
        peers.check_blocks(bundle.num_blocks)
        peers.check_codecs(CODECS)
        if not peers.uses_keys and not peers.insecure and not is_loopback(self.entry.bind):
            raise UsageError(f"{self.entry.bind} is not on the loopback and {peers.path} has no keys; add keys")
        self.bundle = bundle
        self.name = name
        self.on_step = on_step
        """Called on another thread with the number of open engines, their total, and the next step."""
        self._kind: EngineKind = engine or self.entry.engine
        self._threads = threads or self.entry.threads
        self._incarnation = new_incarnation()
        self._executor = Executor({})
        self._choice: EngineChoice | None = None
        self._stops = 0
        self._failure: LsEdgeError | None = None
        tokens_s = peers.heartbeat.transfer_s(bundle.manifest.tokens.bytes_per_image)
        limits = limits or Limits.for_frames(tokens_s).with_credits(self.entry.credits)
        self.machine = PeerMachine(
            name,
            self.entry.blocks,
            limits=limits,
            rng=random.SystemRandom(),
            max_batch=self.entry.max_batch,
            batch_wait=self.entry.batch_wait_ms / 1e3,
            costs=read_order_costs(bundle.manifest.order_costs, bundle.num_blocks),
            bands=bundle.bands,
            bundle_id=bundle.manifest.bundle_id,
        )
        self._counts = EngineCounts()
        self.cores = EngineCores.of(peers, self.entry)
        with self.cores.others():
            self.node = Node(
                name=name,
                role="peer",
                peers=peers,
                manifest=bundle.manifest,
                machine=self.machine,
                execute=self._execute,
                hello=self._hello,
                state=self.machine.state,
                keys=keys,
                strict_bundle=strict_bundle,
                installer=installer,
                inspect=None if examine is None else self._inspect,
            )
        self._installer = installer
        self._inspector = None if examine is None else Inspector(examine, self.node.send_to, self.node.wake)
        if installer is not None:
            installer.attach(self.node, self.machine, bundle.folder.name)
        if until_eof:
            os.set_blocking(0, False)
            self.node.watch(0)
        self._until_eof = until_eof
        self._short_call: Callable[[], _Result] | None = None
        """An engine call that the loop's thread is to run after this turn."""
        self._loop_threads: LoopThreads[_Result] = LoopThreads(
            self._loop(), self.node.wake, names=(f"links of {name}", f"engine of {name}"), cores=self.cores
        )

    def stop(self) -> None:
        """Drain and leave; a second call leaves at once. Safe in a signal handler."""
        self._stops += 1
        self.node.wake()

    @property
    def snapshot(self) -> PeerSnapshot:
        """What it has done and holds; any thread may ask."""
        machine, engine = self.machine, self.machine.engine
        return PeerSnapshot(
            name=self.name,
            bundle_id=self.bundle.manifest.bundle_id,
            warm=machine.warm,
            stuck=engine.stuck,
            held=len(machine.held),
            queue=engine.length,
            credits=machine.credits,
            failed_blocks=len(engine.failed_blocks),
            linked=frozenset(machine.neighbours.by_name),
            dropped=dict(self.node.counts),
            engine=self._counts,
        )

    def serve(self) -> None:
        """Load, warm up, serve; raises what kept the engines from loading."""
        with self.cores.others():
            self._loop_threads.start()
            try:
                self._loop_threads.join()
            finally:
                self._stops = 2  # where this thread was interrupted
                self.node.wake()
                if self._loop_threads.close():  # else an engine hangs, and ends with the process
                    self._executor.close()
            if self._loop_threads.error is not None:
                raise self._loop_threads.error

    def _loop(self) -> Iterator[Callable[[], _Result]]:
        """Serve, a turn at a time; yields the engine calls that the thread of the loop is to run itself."""
        log.info("listening", extra={"peer": self.name, "address": self.entry.bind, "blocks": list(self.entry.blocks)})
        self._loop_threads.submit(self._load)
        leave_at = float("inf")
        try:
            while self._failure is None:
                engine = self.machine.engine
                unread_for = READ_WITHIN_S if engine.is_ahead and not engine.stuck else 0.0
                if self._short_call is not None:  # it is to be run at once
                    self.node.wake()
                # A drain ends, and a store asks again for what is missing, by time alone.
                at_most = 0.1 if self._stops or self._installer is not None else MAX_WAIT_S
                self.node.step(at_most, self._take_results, unread_for=unread_for)
                if self._until_eof and self.node.can_read(0) and at_end(0):
                    self._stops = 2
                if self._inspector is not None:
                    self._inspector.step()
                if self._installer is not None:
                    self._installer.step()
                    if self._installer.is_switching:
                        self._stops = self._stops or 1
                if self._stops and leave_at == float("inf"):
                    leave_at = time.monotonic() + _LEAVE_WITHIN
                    log.info("draining", extra={"peer": self.name, "held": len(self.machine.held)})
                    self.node.feed(Drain())
                drained = self._stops and self.machine.idle
                if drained or self._stops > 1 or time.monotonic() >= leave_at:
                    log.info("leaving", extra={"peer": self.name, "held": len(self.machine.held)})
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

    def _inspect(self, name: str) -> None:
        assert self._inspector is not None
        self._inspector.ask(name)

    def _hello(self) -> Hello:
        return Hello(
            name=self.name,
            role="peer",
            incarnation=self._incarnation,
            minor=MINOR,
            model_id=self.bundle.manifest.model_id,
            bundle_id=self.bundle.manifest.bundle_id,
            blocks=tuple(b for b in self.entry.blocks if b not in self.machine.engine.failed_blocks),
            engine=self._kind if self._choice is None else str(self._choice)[:MAX_ENGINE_TEXT],
            codec=self.entry.codec,
            note=UNSET if self._installer is None else self._installer.note,
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
        """Whether the loop's thread may run a call.

        Nothing else waits for the engine, no track is to come home meanwhile, and the engine's memory is the host's.
        """
        engine = self.machine.engine
        return (
            engine.length == 1
            and not engine.beside_wave
            and len(compute.blocks) * engine.block_us <= SHORT_CALL_S * 1e6
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
        failed = len(self.machine.engine.failed_blocks)
        if isinstance(result, ComputeFailed) and result.rest is not None:
            self._counts.add(result.rest)
        self.node.feed(result)
        if isinstance(result, Warm) or len(self.machine.engine.failed_blocks) != failed:
            self.node.repeat_greeting()
        if isinstance(result, Warm):
            provider = next(iter(self._executor.engines.values())).provider
            log.info("warm", extra={"peer": self.name, "provider": provider, "block_ms": result.block_us / 1e3})

    # On the worker's thread.

    def open_engines(self) -> Mapping[int, Engine]:
        """Choose what runs the blocks and open the engine of each; raises what the engine library raises."""
        choice = choose(self.bundle, self._kind, self.entry.provider, f"block {self.entry.blocks[0]}")
        announce(choice)
        engines = open_block_engines(
            self.bundle, self.entry.blocks, kind=choice.kind, provider=choice.named_provider, threads=self._threads,
            max_batch=self.entry.max_batch, on_step=self.on_step,
        )  # fmt: skip
        self._choice = choice
        return engines

    def _load(self) -> _Result:
        try:
            engines = self.open_engines()
            self._executor = Executor(engines)
            for batch in {1, self.entry.max_batch}:
                self._executor.warm_up(batch)
                distinct = {id(engine): engine for engine in engines.values()}
                times = [warm_up(engine, batch) for engine in distinct.values()]
        except LsEdgeError as error:
            return error
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return EngineError(f"the engines of {self.name} do not load: {error}; try 'ls-edge doctor'")
        return Warm(max(1, round(float(np.median(times)) * 1e3)))


def at_end(descriptor: int) -> bool:
    """Whether a non-blocking descriptor has come to its end."""
    try:
        return not os.read(descriptor, 4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_identity(peers: str | Path | PeersFile, secret_key: str | Path | None) -> tuple[PeersFile, KeyPair | None]:
    """The file of all machines and this one's keys; raises :class:`UsageError` for keys where the file has none."""
    from ls_edge.core.peers_file import load_peers
    from ls_edge.runtime.transport.keys import load_secret

    keys = load_secret(secret_key) if secret_key is not None else None
    file = peers if isinstance(peers, PeersFile) else load_peers(peers)
    if keys is not None and not file.uses_keys:
        raise UsageError(
            f"{file.path} has no keys, so with --secret-key too no link would be encrypted; add public keys, or leave "
            "--secret-key out"
        )
    return file, keys


def open_peer(
    peers: str | Path | PeersFile,
    name: str,
    bundle: str | Path,
    *,
    secret_key: str | Path | None = None,
    engine: EngineKind | None = None,
    threads: int | None = None,
    strict_bundle: bool = False,
    until_eof: bool = False,
    examine: Examine | None = None,
) -> Peer:
    """Read the files and make a :class:`Peer`; what ``ls-edge peer`` does."""
    file, keys = read_identity(peers, secret_key)
    return Peer(
        file, name, Bundle.open(bundle), keys=keys, engine=engine, threads=threads,
        strict_bundle=strict_bundle, until_eof=until_eof, examine=examine,
    )  # fmt: skip
