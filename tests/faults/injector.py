"""Injector of the faults of a course into a :class:`~tests.faults.cluster.FaultyCluster`."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import MAJOR, Hello
from tests.faults.cluster import FaultyCluster
from tests.faults.course import LAPTOP, Fault
from tests.faults.engines import Faults
from tests.faults.streams import Attack

START_S = 90.0
"""Time limit for the start of a peer, which may be paused meanwhile, in seconds."""
_GARBAGE_EVERY_S = 0.01
"""Seconds between two broken streams of an attack."""


class FaultInjector:
    """Thread that injects each fault at its time, or after the previous one was undone, and undoes it."""

    def __init__(
        self,
        peers: FaultyCluster,
        bundle: Bundle,
        other: Path,
        course: list[Fault],
        seconds: float,
        usual: Faults,
    ) -> None:
        self._peers = peers
        self._usual = usual
        self._bundle = bundle
        self._other = other
        self._course = course
        self._seconds = seconds
        self.ended: list[str] = []
        self._pool = ThreadPoolExecutor(2, "injector")
        self._running: list[Future[None]] = []
        self._begun = threading.Semaphore(0)
        self._passed = 0
        self._started = 0.0
        self._over = threading.Event()

    def start(self) -> None:
        """Start injecting."""
        self._started = time.monotonic()
        self._running.append(self._pool.submit(self._run))

    def finish(self) -> None:
        """Wait until the last fault is undone; raise the error of a fault that could not be injected."""
        self._over.set()
        self._pool.shutdown()
        self._restart_ended()
        for done in self._running:
            done.result()

    def pace(self, part: float) -> None:
        """Wait until a fraction ``part`` of the time and of the faults has passed, so that requests meet all faults."""
        time.sleep(max(0.0, self._started + part * self._seconds - time.monotonic()))
        while self._passed < int(part * len(self._course)) and not self._running[0].done():
            self._passed += self._begun.acquire(timeout=1.0)

    def _run(self) -> None:
        for fault in self._course:
            self._over.wait(max(0.0, self._started + fault.at_s - time.monotonic()))
            self._restart_ended()
            self._begun.release()
            inject = getattr(self, f"_{fault.kind}")
            if fault.kind == "pause":  # lasts while other faults occur
                self._running.append(self._pool.submit(inject, fault))
            else:
                inject(fault)

    def _restart_ended(self) -> None:
        """Restart peers that have ended on their own, so that all peers run between two faults."""
        gone = [name for name in self._peers.bundles if not self._peers.alive(name)]
        self.ended += gone
        if gone:
            self._restart(*gone)

    def _wait_out(self, fault: Fault) -> None:
        time.sleep(fault.lasts_s)

    def _kill(self, fault: Fault) -> None:
        self._peers.kill(fault.peer)
        self._wait_out(fault)
        self._restart(fault.peer)

    def _restart(self, *names: str) -> None:
        self._peers.start(*names)
        self._peers.wait_warm(*names, timeout=START_S)

    def _stop(self, fault: Fault) -> None:
        self._peers.signal(fault.peer, signal.SIGSTOP)
        self._wait_out(fault)
        self._peers.signal(fault.peer, signal.SIGCONT)

    def _pause(self, fault: Fault) -> None:
        self._peers.set_faults(fault.peer, msgspec.structs.replace(self._usual, hang=True))
        time.sleep(0.2)  # so that an engine call is running
        self._peers.signal(fault.peer, signal.SIGSTOP)
        self._peers.set_faults(fault.peer, self._usual)
        self._wait_out(fault)
        self._peers.signal(fault.peer, signal.SIGCONT)

    def _garbage(self, fault: Fault) -> None:
        manifest = self._bundle.manifest
        hello = framing.encode(Hello(LAPTOP, "source", 7, 0, manifest.model_id, manifest.bundle_id))
        ports = [int(self._peers.file.peer(name).bind.rsplit(":", 1)[1]) for name in self._peers.bundles]
        seed = round(fault.at_s * 1e3)
        attacks = [
            Attack(_dial(port), 1 << 30, seed + number, hello, _GARBAGE_EVERY_S) for number, port in enumerate(ports)
        ]
        for attack in attacks:
            attack.start()
        self._wait_out(fault)
        for attack in attacks:
            attack.halt.set()
        for attack in attacks:
            attack.join()

    def _hang(self, fault: Fault) -> None:
        self._engine(fault, msgspec.structs.replace(self._usual, hang=True))

    def _slow(self, fault: Fault) -> None:
        self._engine(fault, msgspec.structs.replace(self._usual, slow=30.0, stall_ms=50.0, stall_part=0.2))

    def _clock(self, fault: Fault) -> None:
        self._engine(fault, msgspec.structs.replace(self._usual, clock_jump_s=-86_400.0))

    def _engine(self, fault: Fault, faults: Faults) -> None:
        self._peers.set_faults(fault.peer, faults)
        self._wait_out(fault)
        self._peers.set_faults(fault.peer, self._usual)

    def _half_open(self, fault: Fault) -> None:
        conditions = self._peers.proxies[fault.peer].conditions
        conditions.blackhole = True
        self._wait_out(fault)
        conditions.blackhole = False

    def _corrupt(self, fault: Fault) -> None:
        address = self._peers.file.peer(fault.peer).bind
        rng = random.Random(fault.at_s)
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(address)
            end = time.monotonic() + fault.lasts_s
            while time.monotonic() < end:
                frames = [rng.randbytes(rng.choice((0, 1, 3, 40, 400))) for _ in range(rng.randint(1, 4))]
                if rng.random() < 0.5:
                    frames[0] = b"LS" + bytes([MAJOR]) + frames[0]
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(frames, zmq.NOBLOCK)
                time.sleep(0.002)
            dealer.close(0)
        finally:
            context.destroy(linger=0)

    def _other_bundle(self, fault: Fault) -> None:
        self._peers.kill(fault.peer)
        self._peers.bundles[fault.peer] = self._other
        self._restart(fault.peer)
        self._wait_out(fault)
        self._peers.kill(fault.peer)
        self._peers.bundles[fault.peer] = self._bundle.folder
        self._restart(fault.peer)

    def _all_gone(self, fault: Fault) -> None:
        names = list(self._peers.bundles)
        for name in names:
            self._peers.kill(name)
        self._wait_out(fault)
        self._restart(*names)


def _dial(port: int) -> Callable[[], socket.socket | None]:
    def connect() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1.0)
        except OSError:  # the peer is down at the moment
            time.sleep(0.01)
            return None

    return connect
