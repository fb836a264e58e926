"""Answer images through real peers: ``python answers.py BUNDLE FOLDER OUT``; run by ``test_compiled.py``.

Writes the logits and the orders, and prints which processes have the compiled modules.
"""

import json
import sys
from pathlib import Path

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source

ANSWERS = 6
LIBRARY = "ls_edge__mypyc"


def main(bundle, folder, out):
    opened = Bundle.open(bundle)
    images = np.random.default_rng(0).standard_normal((ANSWERS, 3, *opened.manifest.image.size)).astype(np.float32)
    half = opened.num_blocks // 2
    placement = {"a": list(range(half)), "b": list(range(half, opened.num_blocks)), "c": list(range(opened.num_blocks))}
    with (
        LocalCluster(folder, bundle, placement) as cluster,
        Source.open(cluster.file, opened, policy="sequential") as source,
    ):
        cluster.wait_warm()
        assert source.wait_ready(60.0) == ()
        futures = [source.submit(image, budget_ms=20_000) for image in images]
        answers = [future.result(30.0) for future in futures]
        maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in cluster.processes.values()]
    np.save(out, np.stack([answer.logits for answer in answers]))
    found = {
        "source": LIBRARY in Path("/proc/self/maps").read_text(),
        "peers": [LIBRARY in text for text in maps],
        "degraded": [answer.degraded for answer in answers],
        "orders": [list(answer.arrangement.order) for answer in answers],
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
