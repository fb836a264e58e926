"""Cost of a hop without the engine, compared with raw echoes of as many bytes over ZeroMQ.

Two processes on the loopback. In a round trip of the runtime, tokens enter the caller's routing machine and travel as
RUN to a peer, through its checks, routing machine and engine thread (the engine returns its input), and back as RUN,
until the caller's machine accepts them as the answer; ACCEPT, RELEASE and CANCEL are sent as well. A *hop* is half of a
round trip. A raw round trip sends as many bytes to a process that echoes them, over ZeroMQ DEALER and ROUTER without
copies, and over the same with CURVE. Half of that is compared. Contenders take turns in bursts, whose first calls are
not counted.

A *hop in a chain* is measured with twelve blocks that two peers hold alternately, a hop before each block and one back:
the same path between three processes, with MOVED to the source.

The other processes are ``python -m benchmarks.hop echo plain|curve`` and ``python -m benchmarks.hop peer FOLDER NAME
COUNT DIM BLOCKS [SECRET_KEY]``; they print a JSON line when they are ready, and exit when their standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zmq
from rich.console import Console

from benchmarks.common import BenchmarkError, Child, in_turn, ms, new_table, report_progress, wait_for
from ls_edge.core.bundle import SCHEMA, Bundle, ImageSpec, Manifest, PartFile, PartFiles, TokenSpec
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.engines.engine import Engine, Signature, signature_of
from ls_edge.engines.opening import OnChoice
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSetup
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State, new_incarnation
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.events import Complete, Instruction, Submit
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.transport.keys import KeyPair, load_secret, new_keys
from ls_edge.runtime.transport.node import Node, NodeSettings

SIZES = ((197, 768), (197, 384), (197, 192))
"""Tokens and width of ViT-B, ViT-S and ViT-Ti at 224 pixels; 605, 303 and 151 KB of float32."""
CHAIN_BLOCKS = 12
BAR_PLAIN_MS, BAR_CURVE = 0.3, 2.0
"""Bars: cost of a plain hop beyond raw ZeroMQ, and of a CURVE hop relative to raw ZeroMQ with CURVE."""

PAUSE_S = 0.002

Call = Callable[[], float]


def run(quick: bool) -> dict[str, Any]:
    """Return milliseconds per hop for each size, and whether the bars hold."""
    sizes = ((17, 64), *SIZES[2:]) if quick else SIZES
    rounds, burst, leave_out = (4, 5, 1) if quick else (60, 12, 2)
    found = []
    for count, dim in sizes:
        report_progress(f"  {count} x {dim} float32, {count * dim * 4} bytes")
        found.append(_size(count, dim, rounds, burst, leave_out))
    return {"sizes": found, "bars": {"plain_over_zmq_ms": BAR_PLAIN_MS, "curve_over_zmq_curve": BAR_CURVE}}


def _size(count: int, dim: int, rounds: int, burst: int, leave_out: int) -> dict[str, Any]:
    size = count * dim * 4
    calls: dict[str, tuple[Call, int]] = {}
    with contextlib.ExitStack() as stack:
        for kind in ("plain", "curve"):
            child = stack.enter_context(Child("benchmarks.hop", "echo", kind))
            raw = _Raw(size, child.read())
            stack.callback(raw.close)
            calls["raw curve" if kind == "curve" else "raw zmq"] = (_after_pause(raw), 2)
        for curve in (False, True):
            name = "curve" if curve else "plain"
            calls[f"hop {name}"] = (_runtime(stack, count, dim, {"ann": [0]}, curve=curve), 2)
        placement = {"ann": list(range(0, CHAIN_BLOCKS, 2)), "ben": list(range(1, CHAIN_BLOCKS, 2))}
        calls["chain plain"] = (_runtime(stack, count, dim, placement, curve=False), CHAIN_BLOCKS + 1)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _, name in in_turn(tuple(calls), rounds):
            call, hops = calls[name]
            bursts = [call() / hops for _ in range(burst)]
            seconds[name] += bursts[leave_out:]
    hop_ms = {name: ms(values) for name, values in seconds.items()}
    over = hop_ms["hop plain"]["p50"] - hop_ms["raw zmq"]["p50"]
    ratio = hop_ms["hop curve"]["p50"] / hop_ms["raw curve"]["p50"]
    return {
        "count": count, "dim": dim, "bytes": size, "one_way_ms": hop_ms,
        "plain_over_zmq_ms": round(over, 4), "curve_over_zmq_curve": round(ratio, 4),
        "holds": {"plain": over <= BAR_PLAIN_MS, "curve": ratio <= BAR_CURVE},
    }  # fmt: skip


def _runtime(
    stack: contextlib.ExitStack, count: int, dim: int, placement: dict[str, list[int]], *, curve: bool
) -> Call:
    """Start a caller and its peers."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    blocks = sum(map(len, placement.values()))
    _write_peers(folder, placement, curve=curve)
    for name in placement:
        key = [str(folder / f"{name}.key_secret")] if curve else []
        stack.enter_context(
            Child("benchmarks.hop", "peer", str(folder), name, str(count), str(dim), str(blocks), *key)
        ).read()  # fmt: skip
    keys = load_secret(folder / "caller.key_secret") if curve else None
    caller = _Caller(load_peers(folder / "peers.yaml"), _manifest(count, dim, blocks), keys)
    stack.callback(caller.close)
    caller.wait_ready()
    tokens = np.random.default_rng(0).standard_normal((1, count, dim), dtype=np.float32)

    def call() -> float:
        caller.idle(PAUSE_S)
        return caller.call(tokens)

    return call


def _after_pause(raw: _Raw) -> Call:
    def call() -> float:
        time.sleep(PAUSE_S)
        return raw.call()

    return call


class _Raw:
    """Our end of the raw round trips."""

    def __init__(self, size: int, endpoint: dict[str, Any]) -> None:
        self._payload = memoryview(os.urandom(size))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        if "key" in endpoint:
            self._dealer.curve_serverkey = endpoint["key"].encode()
            self._dealer.curve_publickey, self._dealer.curve_secretkey = zmq.curve_keypair()
        self._dealer.connect(f"tcp://127.0.0.1:{endpoint['port']}")

    def call(self) -> float:
        started = time.perf_counter()
        self._dealer.send(self._payload, copy=False)
        self._dealer.recv(copy=False)
        return time.perf_counter() - started

    def close(self) -> None:
        self._context.destroy(linger=0)


def _echo(kind: str) -> None:
    """Send back what arrives."""
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    endpoint: dict[str, object] = {}
    if kind == "curve":
        public, secret = zmq.curve_keypair()
        router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
        endpoint["key"] = public.decode()
    endpoint["port"] = router.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps(endpoint), flush=True)
    while True:
        router.send_multipart(router.recv_multipart(copy=False), copy=False)


def _manifest(count: int, dim: int, blocks: int) -> Manifest:
    """Return the manifest of a model that does not exist; only its token interface is used."""
    part = PartFile("none", "0" * 64, 1)
    half = (0.5, 0.5, 0.5)
    return Manifest(
        schema=SCHEMA, bundle_id="b" * 64, model_id=f"{count}x{dim}", model="none", method="shuffle",
        classes=("0", "1"), image=ImageSpec((224, 224), half, half), tokens=TokenSpec(count, dim), needs_slot=False,
        precision="fp32", opset=20, parts=PartFiles(part, part, (part,) * blocks),
    )  # fmt: skip


def _write_peers(folder: Path, placement: Mapping[str, Sequence[int]], *, curve: bool) -> None:
    """Write ``peers.yaml`` with free ports and, with ``curve``, the key files of the peers and of ``caller``."""
    names = [*placement, "caller"]
    keys = {name: new_keys(name, folder)[0].public.decode() for name in names} if curve else {}
    peers = [
        {"name": name, "address": f"tcp://127.0.0.1:{port}", "blocks": list(blocks)}
        | ({"public_key": keys[name]} if curve else {})
        for (name, blocks), port in zip(placement.items(), free_ports(len(placement)), strict=True)
    ]
    sources = [{"name": "caller", "public_key": keys["caller"]}] if curve else []
    (folder / "peers.yaml").write_text(yaml.safe_dump({"peers": peers, "sources": sources}), encoding="utf-8")


class _PassThrough:
    """Engine that returns its input."""

    kind, provider = "onnx", "none"

    def __init__(self, part: str, signature: Signature) -> None:
        self.part, self.signature = part, signature

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        return inputs["tokens"]

    def close(self) -> None:
        pass


class _Peer(Peer):
    """Peer whose engines return their input."""

    def open_engines(self, _setup: PeerSetup, _on_choice: OnChoice) -> Mapping[int, Engine]:
        """Make an engine for each block that returns its input."""
        parts = {block: f"block {block}" for block in self.entry.blocks}
        return {block: _PassThrough(part, signature_of(self.bundle.manifest, part)) for block, part in parts.items()}


class _Caller:
    """Source that sends tokens to the peers of a ``peers.yaml`` and waits until they return."""

    def __init__(self, peers: PeersFile, manifest: Manifest, keys: KeyPair | None) -> None:
        """Dial the peers; call :meth:`wait_ready` before the first :meth:`call`."""
        self._blocks = tuple(range(len(manifest.parts.blocks)))
        self._machine = source_machine("caller", limits=Limits(), rng=random.SystemRandom())
        self._peers = peers
        self._request = 0
        self._answer: Complete | None = None
        self._back = 0.0
        hello = Hello("caller", "source", new_incarnation(), MINOR, manifest.model_id, manifest.bundle_id)
        state = State(True, False, False, 0, 0, 0, 0)
        self.node = Node(
            NodeSettings("caller", "source", peers, manifest, keys),
            self._machine,
            execute=self._execute,
            hello=lambda: hello,
            state=lambda *_: state,
        )

    def _execute(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Complete):
            raise BenchmarkError(f"a request failed: {instruction}")
        self._answer, self._back = instruction, time.perf_counter()

    def wait_ready(self) -> None:
        """Wait until every peer is warm and linked to every other."""

        def ready() -> bool:
            self.node.step(0.01)
            others = len(self._peers.peers)
            states = [n.state for n in self._machine.neighbors]
            return len(states) == others and all(s is not None and s.warm and len(s.reaches) == others for s in states)

        wait_for(ready, "the peers to be linked and warm")

    def idle(self, seconds: float) -> None:
        """Handle messages for ``seconds`` without sending a request."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.node.step(left)

    def call(self, tokens: np.ndarray) -> float:
        """Return the seconds until tokens ``[1, N, D]`` return from all blocks."""
        self._request += 1
        self._answer = None
        started = time.perf_counter()
        itinerary = Itinerary("caller", "sequential", self._blocks, 0)
        self.node.feed(Submit(self._request, itinerary, tokens, time.monotonic() + 10.0))
        while self._answer is None:
            self.node.step()
        return self._back - started

    def close(self) -> None:
        """Leave the peers."""
        self.node.leave("done")


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    sizes = document["sizes"]
    table = new_table("one way, ms: p50 (p10 to p90)", ("", *(f"{size['bytes']} bytes" for size in sizes)))
    for name in sizes[0]["one_way_ms"]:
        times = [size["one_way_ms"][name] for size in sizes]
        table.add_row(name, *(f"{t['p50']:.3f} ({t['p10']:.3f} to {t['p90']:.3f})" for t in times))
    table.add_section()
    for title, key, bar in (
        (f"hop plain - raw zmq, at most {BAR_PLAIN_MS}", "plain_over_zmq_ms", "plain"),
        (f"hop curve / raw curve, at most {BAR_CURVE}", "curve_over_zmq_curve", "curve"),
    ):
        table.add_row(title, *(f"{s[key]:.3f} {'holds' if s['holds'][bar] else 'missed'}" for s in sizes))
    console.print(table)


def _peer(folder: str, name: str, count: str, dim: str, blocks: str, *key: str) -> None:
    """Serve blocks whose engines return their input."""
    bundle = Bundle(Path(folder), _manifest(int(count), int(dim), int(blocks)))
    keys = load_secret(key[0]) if key else None
    peer = _Peer(load_peers(Path(folder) / "peers.yaml"), name, bundle, keys=keys)
    print("{}", flush=True)
    peer.serve()


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    {"echo": _echo, "peer": _peer}[sys.argv[1]](*sys.argv[2:])
