"""Engines by themselves, for ``tracks``: ``python -m benchmarks.block_workers BUNDLE``.

Reads how many blocks to run, as a JSON line, runs that many one after the other on the same kind of engines and in the
same way as a peer, and says how many seconds they took; leaves when its input ends.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from ls_edge.bundle import Bundle
from ls_edge.engines.engine import warm_up
from ls_edge.engines.opening import open_block_engines


def main() -> None:
    """Serve until standard input ends."""
    bundle = Bundle.open(sys.argv[1])
    engines = open_block_engines(bundle, range(bundle.num_blocks), threads=1)
    for engine in engines.values():
        warm_up(engine)
    shape = (1, bundle.manifest.tokens.count, bundle.manifest.tokens.dim)
    tokens = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    print("{}", flush=True)
    for line in sys.stdin:
        out, started = tokens, time.perf_counter()
        for index in range(json.loads(line)):
            inputs = {"tokens": out}
            if bundle.manifest.needs_slot:
                inputs["slot"] = np.asarray([index], dtype=np.int64)
            out = engines[index].run(inputs)
        print(json.dumps(time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
