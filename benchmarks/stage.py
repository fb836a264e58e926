"""Stage of the minimal chain, for ``chain``: ``python -m benchmarks.stage BUNDLE FIRST COUNT``.

Runs the engines of ``COUNT`` consecutive blocks between two ZeroMQ PAIR sockets, and nothing else. Prints its port as a
JSON line, reads the port of the next stage, and exits when its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import numpy as np
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.engines.engine import warm_up
from ls_edge.engines.opening import open_block_engines


def main() -> None:
    """Serve until standard input ends."""
    bundle, first, count = Bundle.open(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    blocks = range(first, first + count)
    engines = open_block_engines(bundle, blocks, threads=1)
    for engine in engines.values():
        warm_up(engine)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    upstream, downstream = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    print(json.dumps(upstream.bind_to_random_port("tcp://127.0.0.1")), flush=True)
    downstream.connect(f"tcp://127.0.0.1:{json.loads(sys.stdin.readline())}")
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    print("{}", flush=True)
    shape = (1, bundle.manifest.tokens.count, bundle.manifest.tokens.dim)
    while True:
        tokens = np.frombuffer(upstream.recv(copy=False).buffer, np.float32).reshape(shape)
        for block in blocks:
            inputs = {"tokens": tokens}
            if bundle.manifest.needs_slot:
                inputs["slot"] = np.asarray([block], dtype=np.int64)
            tokens = engines[block].run(inputs)
        downstream.send(memoryview(tokens).cast("B"), copy=False)


if __name__ == "__main__":
    main()
