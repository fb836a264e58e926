"""Processes that run a bundle without the runtime, for ``throughput`` and ``tracks``.

``python -m benchmarks.workers pipeline BUNDLE THREADS`` answers images one after the other; ``python -m
benchmarks.workers blocks BUNDLE`` runs blocks one after the other, with the engines of a peer. Each line of standard
input is a JSON number of images or blocks; the answer is a line with the seconds. The process exits when that ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.common import images_for
from ls_edge.core.bundle import Bundle


@contextmanager
def pipeline(bundle: Bundle, threads: str) -> Iterator[Callable[[int], None]]:
    """Return a function that runs all parts of the bundle on a number of images."""
    from ls_edge.engines.pipeline import Pipeline

    with Pipeline.open(bundle, threads=int(threads)) as parts:
        images = images_for(bundle, 8)

        def run(count: int) -> None:
            for index in range(count):
                parts.forward(images[index % 8, None])

        run(1)
        yield run


@contextmanager
def blocks(bundle: Bundle) -> Iterator[Callable[[int], None]]:
    """Open the first blocks with one thread."""
    from ls_edge.engines.opening import open_block_engines

    engines = open_block_engines(bundle, range(bundle.num_blocks), threads=1)
    shape = (1, bundle.manifest.tokens.count, bundle.manifest.tokens.dim)
    tokens = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

    def run(count: int) -> None:
        out = tokens
        for index in range(count):
            inputs = {"tokens": out}
            if bundle.manifest.needs_slot:
                inputs["slot"] = np.asarray([index], dtype=np.int64)
            out = engines[index].run(inputs)

    run(bundle.num_blocks)
    yield run


def main() -> None:
    """Serve until standard input ends."""
    kind, bundle, *more = sys.argv[1:]
    with {"pipeline": pipeline, "blocks": blocks}[kind](Bundle.open(bundle), *more) as run:
        print("{}", flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            run(json.loads(line))
            print(json.dumps(time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
