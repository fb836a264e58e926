"""Cost of audits: throughput and latency with shares of 0, 0.01, 0.1 and 1, and the check for finite numbers.

    python -m benchmarks audit

Two peers share the blocks. One source per share uses the same peers, in turn; results are medians over rounds, ratios
are taken within rounds. ``finite`` is the time of the check of a block's output, relative to one run of that block.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import (
    bundle_of,
    images_for,
    in_turn,
    local_cluster,
    median,
    new_table,
    ready_source,
    report_progress,
)
from ls_edge.core.bundle import Bundle
from ls_edge.engines.opening import open_engine
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.source.source import Source

SHARES = (0.0, 0.01, 0.1, 1.0)
MODELS = (("vit_digits", {"depth": 6}), ("vit_tiny_patch16_224", {}))


def run(quick: bool) -> dict[str, Any]:
    """Measure both parts with a tiny model and a larger one."""
    models = MODELS[:1] if quick else MODELS
    return {
        "audit": [_audit(bundle_of(model, args), quick=quick) for model, args in models],
        "finite": [_finite(bundle_of(model, args), 20 if quick else 500) for model, args in models],
    }


def _audit(path: Path, *, quick: bool) -> dict[str, Any]:
    bundle = Bundle.open(path)
    report_progress(f"  audit, {bundle.manifest.model}")
    small = bundle.manifest.tokens.count < 100
    rounds, count = (2, 20) if quick else (16, 500) if small else (9, 60)
    half = bundle.num_blocks // 2
    pictures = images_for(bundle, 16)
    rate: dict[str, list[float]] = {str(share): [] for share in SHARES}
    latency: dict[str, list[float]] = {str(share): [] for share in SHARES}
    with contextlib.ExitStack() as stack:
        placement = {"ann": range(half), "ben": range(half, bundle.num_blocks)}
        peers = stack.enter_context(local_cluster(path, placement))
        sources = {str(share): stack.enter_context(ready_source(peers.path, bundle, audit=share)) for share in SHARES}
        for name, source in sources.items():
            _answer(source, pictures, 20)
            report_progress(f"    share {name} is ready")
        for _, name in in_turn(list(sources), rounds):
            seconds, milliseconds = _answer(sources[name], pictures, count)
            rate[name].append(count / seconds)
            latency[name].append(median(milliseconds))
            sources[name].finish_audits(10)  # before the next source has its turn
        found = {name: source.audits for name, source in sources.items()}
    none = rate[str(SHARES[0])]
    return {
        "model": bundle.manifest.model, "images": count, "rounds": rounds, "concurrency": 4,
        "images_per_s": {name: round(median(values), 2) for name, values in rate.items()},
        "over_none": {
            name: round(median([a / b for a, b in zip(values, none, strict=True)]), 4) for name, values in rate.items()
        },
        "latency_ms_p50": {name: round(median(values), 3) for name, values in latency.items()},
        "audited": {name: a.audited for name, a in found.items() if a is not None},
        "dropped": {name: a.dropped for name, a in found.items() if a is not None},
        "mismatched": {name: a.mismatched for name, a in found.items() if a is not None},
    }  # fmt: skip


def _answer(source: Source, pictures: np.ndarray, count: int) -> tuple[float, list[float]]:
    """Answer images, four in flight; return the seconds in all and the latencies in ms."""
    started, latencies = time.perf_counter(), []
    futures = []
    for index in range(count):
        futures.append(source.submit(pictures[index % len(pictures)]))
        if len(futures) >= 4:
            latencies.append(futures.pop(0).result().latency_ms)
    latencies += [future.result().latency_ms for future in futures]
    return time.perf_counter() - started, latencies


def _finite(path: Path, runs: int) -> dict[str, Any]:
    bundle = Bundle.open(path)
    engine = open_engine(bundle, "block 0", threads=1)
    spec = bundle.manifest.tokens
    tokens = np.random.default_rng(0).standard_normal((1, spec.count, spec.dim)).astype(np.float32)
    inputs = {"tokens": tokens}
    block, check = [], []
    for _ in range(runs):
        started = time.perf_counter()
        out = engine.run(inputs)
        ran = time.perf_counter()
        is_finite(out)
        block.append((ran - started) * 1e6)
        check.append((time.perf_counter() - ran) * 1e6)
    engine.close()
    return {
        "model": bundle.manifest.model, "tokens": [spec.count, spec.dim], "block_us": round(median(block), 1),
        "check_us": round(median(check), 1), "share": round(median(check) / median(block), 4),
    }  # fmt: skip


def show(results: dict[str, Any], console: Console) -> None:
    """Print both tables."""
    for row in results["audit"]:
        table = new_table(
            f"audits, {row['model']}, {row['images']} images per round",
            ("fraction", "images/s", "ratio to fraction 0", "latency p50, ms", "audited", "dropped"),
        )
        for name, rate in row["images_per_s"].items():
            table.add_row(
                name, str(rate), str(row["over_none"][name]), str(row["latency_ms_p50"][name]),
                str(row["audited"].get(name, "")), str(row["dropped"].get(name, "")),
            )  # fmt: skip
        console.print(table)
    table = new_table("check for finite numbers", ("model", "tokens", "block, us", "check, us", "share"))
    for row in results["finite"]:
        table.add_row(
            row["model"], " x ".join(map(str, row["tokens"])), str(row["block_us"]), str(row["check_us"]),
            f"{row['share']:.2%}",
        )  # fmt: skip
    console.print(table)
