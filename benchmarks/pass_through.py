"""Peer whose engines return their input, and its caller: the path of the runtime without a model, for ``hop``.

``python -m benchmarks.pass_through FOLDER NAME COUNT DIM BLOCKS [SECRET_KEY]`` is a
:class:`ls_edge.runtime.peer.peer.Peer` with its links, routing machine and engine thread. :class:`Caller` is a source
without stem and head: its node and routing machine run on the measuring thread.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from benchmarks.common import BenchmarkError, wait_for
from ls_edge.core.bundle import Bundle, ImageSpec, Manifest, PartFile, PartFiles, TokenSpec
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.engines.engine import Engine, Signature, signature_of
from ls_edge.engines.opening import OnChoice
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSetup
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.events import Complete, Instruction, Submit
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.transport.keys import KeyPair, load_secret, new_keys
from ls_edge.runtime.transport.node import Node, NodeSettings, new_incarnation


def manifest_of(count: int, dim: int, blocks: int) -> Manifest:
    """Return the manifest of a model that does not exist; only its token interface is used."""
    part = PartFile("none", "0" * 64, 1)
    half = (0.5, 0.5, 0.5)
    return Manifest(
        schema=1, bundle_id="b" * 64, model_id=f"{count}x{dim}", model="none", method="shuffle", classes=("0", "1"),
        image=ImageSpec((224, 224), half, half), tokens=TokenSpec(count, dim), needs_slot=False, precision="fp32",
        opset=20, parts=PartFiles(part, part, (part,) * blocks),
    )  # fmt: skip


def write_peers(folder: Path, placement: Mapping[str, Sequence[int]], *, curve: bool) -> None:
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


class PassThroughPeer(Peer):
    """Peer whose engines return their input."""

    def open_engines(self, _setup: PeerSetup, _on_choice: OnChoice) -> Mapping[int, Engine]:
        """Make an engine for each block that returns its input."""
        parts = {block: f"block {block}" for block in self.entry.blocks}
        return {block: _PassThrough(part, signature_of(self.bundle.manifest, part)) for block, part in parts.items()}


class Caller:
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


def main() -> None:
    """Serve until standard input is closed."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    count, dim, blocks = map(int, sys.argv[3:6])
    keys = load_secret(sys.argv[6]) if len(sys.argv) > 6 else None
    bundle = Bundle(folder, manifest_of(count, dim, blocks))
    peer = PassThroughPeer(load_peers(folder / "peers.yaml"), name, bundle, keys=keys)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    print("{}", flush=True)
    peer.serve()


if __name__ == "__main__":
    main()
