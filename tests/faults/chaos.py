"""Faults of every kind, one after the other in a drawn order, while a source asks real peers; two hold each block."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import threading
import time
from concurrent.futures import Future

import msgspec
import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.records import RequestRecord
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.protocol.messages import Hello
from ls_edge.runtime.source.results import Answer
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults
from tests.faults.streams import Attack
from tests.traces import replay

KINDS = ("kill", "stop", "hang", "slow", "half_open", "garbage", "clock", "other_bundle", "all_gone")
LAPTOP = "laptop"
START_S = 90.0
"""Seconds in which peers that were all killed start on a busy machine, which is also the budget of requests."""


class Chaos:
    """Peers with faults, each undone after a while."""

    def __init__(self, peers: FaultyCluster, bundle: Bundle, other, usual: Faults) -> None:
        self._peers, self._bundle, self._other, self._usual = peers, bundle, other, usual

    def inject(self, kind: str, name: str, seconds: float) -> None:
        """Inject a fault into a peer for some time; each peer must have survived the previous one."""
        assert all(map(self._peers.alive, self._peers.bundles)), "a peer has ended on its own"
        getattr(self, f"_{kind}")(name, seconds)

    def _kill(self, name, seconds):
        self._restart([name], seconds)

    def _all_gone(self, _name, seconds):
        self._restart([*self._peers.bundles], seconds)

    def _restart(self, names, seconds):
        for name in names:
            self._peers.kill(name)
        time.sleep(seconds)
        self._peers.start(*names)
        self._peers.wait_warm(*names, timeout=START_S)

    def _other_bundle(self, name, seconds):
        for bundle in (self._other, self._bundle.folder):
            self._peers.bundles[name] = bundle
            self._restart([name], seconds)

    def _stop(self, name, seconds):
        self._peers.signal(name, signal.SIGSTOP)
        time.sleep(seconds)
        self._peers.signal(name, signal.SIGCONT)

    def _hang(self, name, seconds):
        self._engine(name, seconds, hang=True)

    def _slow(self, name, seconds):
        self._engine(name, seconds, slow=30.0, stall_ms=50.0, stall_part=0.2)

    def _clock(self, name, seconds):
        self._engine(name, seconds, clock_jump_s=-86_400.0)

    def _engine(self, name, seconds, **faults):
        self._peers.set_faults(name, msgspec.structs.replace(self._usual, **faults))
        time.sleep(seconds)
        self._peers.set_faults(name, self._usual)

    def _half_open(self, name, seconds):
        self._peers.proxies[name].conditions.blackhole = True
        time.sleep(seconds)
        self._peers.proxies[name].conditions.blackhole = False

    def _garbage(self, name, seconds):
        manifest = self._bundle.manifest
        hello = framing.encode(Hello(LAPTOP, "source", 7, 0, manifest.model_id, manifest.bundle_id))
        at = "127.0.0.1", int(self._peers.file.peer(name).bind.rpartition(":")[2])
        attack = Attack(lambda: socket.create_connection(at, timeout=1.0), 1 << 30, 0, hello, 0.01)
        attack.start()
        time.sleep(seconds)
        attack.halt.set()
        attack.join()


def run_chaos(bundle, other, images, folder, *, kinds=KINDS, policy="nearest", block_ms=0.0, keys=False, seed=0):
    """Ask under faults; check that each request has a whole answer that replays, and return how many there were.

    ``other`` is a bundle of another model, for the fault of that name.
    """
    opened, rng = Bundle.open(bundle), random.Random(seed)
    preprocess, usual = Preprocessor(opened.manifest.image), Faults(least_ms=block_ms)
    arrays = {image.name: preprocess(image.read(), image.name) for image in images.images}
    half = opened.num_blocks // 2
    first, second = list(range(half)), list(range(half, opened.num_blocks))
    placement = {"anna": first, "ben": second, "cleo": first[::2] + second[::2], "dan": first[1::2] + second[1::2]}
    with FaultyCluster(folder, bundle, placement, proxied=True, keys=keys, sources=(LAPTOP,)) as peers:
        for name in placement:
            peers.set_faults(name, usual)
        peers.wait_warm(timeout=START_S)
        chaos = Chaos(peers, opened, other, usual)
        with Source.open(
            peers.path, opened, policy=policy, max_skips=0, budget_ms=1e3 * START_S,
            secret_key=peers.secret_key(LAPTOP), name=LAPTOP,
        ) as source:  # fmt: skip
            assert source.wait_ready(START_S) == ()
            futures: list[Future[Answer]] = []
            over = threading.Event()
            asking = threading.Thread(target=_ask, args=(source, arrays, futures, over))
            asking.start()
            try:
                for kind in rng.sample(kinds, len(kinds)):
                    chaos.inject(kind, rng.choice([*placement]), rng.uniform(0.2, 1.0))
            finally:
                over.set()
                asking.join()
            records = [future.result(2 * START_S).record for future in futures]
    assert [record.id for record in records if record.degraded] == []
    _check_replays(opened, arrays, records[::5])
    return len(records)


def _ask(source: Source, arrays: dict[str, np.ndarray], futures: list[Future[Answer]], over: threading.Event) -> None:
    """Submit images with at most eight in flight, until the faults are over."""
    gate = threading.Semaphore(8)
    for name in itertools.cycle(arrays):
        if over.wait(0.02):
            return
        gate.acquire()
        futures.append(source.submit(arrays[name], name=name))
        futures[-1].add_done_callback(lambda _: gate.release())


def _check_replays(bundle: Bundle, arrays: dict[str, np.ndarray], records: list[RequestRecord]) -> None:
    """Check that logits are those of their order (guarantee R2), and the orders those that bands allow."""
    with Pipeline.open(bundle, threads=1) as pipeline:
        for replayed in replay(pipeline, records, lambda record: arrays[record.image]):
            assert replayed.error <= codec_of("raw").replay_tolerance
    for record in records:
        assert sorted(record.arrangement.order) == list(range(bundle.num_blocks))
        assert not bundle.bands.fault(record.arrangement)
