"""A liar as a process: ``python -m tests.faults.liar_process PEERS BUNDLE NAME LIE``.

It writes its counts to a file, so that a test can check whether other processes sent it work.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.runtime.protocol.messages import (
    MINOR,
    Hello,
)
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import load_secret
from ls_edge.runtime.transport.node import Node, NodeSettings, new_incarnation
from tests.faults.liar import EVERY_S, Liar, LiarCounts, Lie, write_counts
from tests.faults.lies import LIES


def start_node(peers: PeersFile, bundle: Bundle, name: str, lie: Lie, key: Path | None, seed: int) -> tuple[Node, Liar]:
    """Open the links of a liar and create its routing machine."""
    manifest = bundle.manifest
    called = name if lie.role == "peer" else new_alias(name)
    blocks = peers.peer(name).blocks if lie.role == "peer" else ()
    shape = (1, manifest.tokens.count, manifest.tokens.dim)
    incarnation = new_incarnation()

    def hello(as_name: str, role: str, said_blocks: Sequence[int]) -> Hello:
        return Hello(
            as_name, role, incarnation, MINOR, manifest.model_id, manifest.bundle_id, tuple(said_blocks)
        )  # fmt: skip

    liar = Liar(
        called, blocks, bundle.num_blocks, lie, hello, np.zeros(shape, np.float32), seed=seed,
        bands=bundle.bands,
    )  # fmt: skip
    liar.logits = np.arange(len(manifest.classes), dtype=np.float32)[None]
    keys = None if key is None else load_secret(key)
    node = Node(
        NodeSettings(called, lie.role, peers, manifest, keys),
        liar,
        execute=lambda _: None,
        hello=lambda: hello(called, lie.role, blocks),
        state=liar.state,
    )
    return node, liar


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM, or until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.liar_process", description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("name", help="its name among the peers or sources of PEERS")
    parser.add_argument("lie", choices=LIES)
    parser.add_argument("--secret-key", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--counts", type=Path, help="file for its counts, as JSON")
    given = parser.parse_args(arguments)
    bundle, lie = Bundle.open(given.bundle), LIES[given.lie]
    peers = load_peers(given.peers).of_model(bundle.num_blocks)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    os.set_blocking(0, False)
    pairs = [
        start_node(peers, bundle, given.name, lie, given.secret_key, given.seed + number)
        for number in range(lie.processes)
    ]
    before, write_at = LiarCounts(), 0.0
    try:
        while not over.is_set():
            for node, _ in pairs:
                node.step(EVERY_S / len(pairs))
            now = time.monotonic()
            for _, liar in pairs:
                liar.counts.linked = len(liar.neighbors.by_name)
            if now >= write_at:
                write_at = now + 5 * EVERY_S
                if _at_end():
                    over.set()
                sums = LiarCounts(
                    *(sum(getattr(liar.counts, f) for _, liar in pairs) for f in LiarCounts.__struct_fields__)
                )
                if given.counts is not None and sums != before:
                    before = sums
                    write_counts(given.counts, sums)
    finally:
        for node, _ in pairs:
            node.close()


def _at_end() -> bool:
    """Return whether standard input has ended, since its parent is gone."""
    try:
        return os.read(0, 4096) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    main()
