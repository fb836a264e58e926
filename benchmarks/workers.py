"""One process that runs a bundle by itself, for ``throughput``: ``python -m benchmarks.workers BUNDLE THREADS``.

Reads how many images to answer, as a JSON line, and says how many seconds that took; leaves when its input ends.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.common import images_for
from ls_edge.bundle import Bundle
from ls_edge.engines.pipeline import Pipeline


def main() -> None:
    """Serve until standard input ends."""
    bundle = Bundle.open(sys.argv[1])
    with Pipeline.open(bundle, threads=int(sys.argv[2])) as chain:
        images = images_for(bundle, 8)
        chain.forward(images[:1])
        print("{}", flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            for index in range(json.loads(line)):
                chain.forward(images[index % 8, None])
            print(json.dumps(time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
