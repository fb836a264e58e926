"""Cost of the engines of a bundle: a block compared with PyTorch, the chain of parts with the whole model in one file.

    python -m benchmarks engines

For each model and precision, with random weights and batch 1:

- ``block``: all blocks one after the other, as a peer runs them, and the same blocks in PyTorch (eager, float32), a few
  runs each in turn, one thread. Medians per block.
- ``chain``: the measurement of ``ls-edge bench``, repeated with new sessions, because the place of their memory changes
  the ratio by two points. Median over the repetitions.

The int8 bars apply to a CPU with AMX.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from benchmarks.common import bundle_of, new_table, report_progress
from ls_edge.core.bundle import Bundle
from ls_edge.engines.benchmark import bench
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.merge import merge

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
PRECISIONS: tuple[Literal["fp32", "int8"], ...] = ("fp32", "int8")
BLOCK_BARS = {"fp32": {}, "int8": {MODELS[0]: 0.5, MODELS[1]: 0.35, MODELS[2]: 0.25}}
CHAIN_BARS = {1: 1.03, 2: 1.05}
OPENINGS = 3


def run(quick: bool) -> dict[str, Any]:
    """Return a row for each model and precision."""
    import torch

    torch.set_num_threads(1)
    args: dict[str, Any] = {"img_size": 32, "depth": 2} if quick else {}
    rows = []
    for model in MODELS[:1] if quick else MODELS:
        for precision in PRECISIONS:
            report_progress(f"  {model}, {precision}")
            path = bundle_of(model, args, precision)
            rows.append({
                "model": model, "precision": precision,
                "block": _block(path, model, args, 0.2 if quick else 8.0),
                "chain": {str(threads): _chain(path, threads, quick) for threads in CHAIN_BARS},
            })  # fmt: skip
    return {"rows": rows}


def _block(path: Path, model: str, args: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Measure a block as an engine and in PyTorch; return milliseconds, and their ratio with its bar."""
    import torch

    from ls_edge.training.models.small_models import build

    bundle = Bundle.open(path)
    view = build(model, args).eval()
    tokens = np.zeros((1, bundle.manifest.tokens.count, bundle.manifest.tokens.dim), np.float32)
    tensor = torch.from_numpy(tokens)
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain, torch.inference_mode():

        def ours() -> None:
            for index in range(bundle.num_blocks):
                chain.block(index, tokens)

        def torchs() -> None:
            for index in range(bundle.num_blocks):
                view.block(index, tensor)

        found = [_each(times, bundle.num_blocks) for times in _turns([ours, torchs], seconds)]
    ratio = round(found[0] / found[1], 3)
    bar = BLOCK_BARS[bundle.manifest.precision].get(model, 1.0)
    return {"ms": found[0], "pytorch_ms": found[1], "over_pytorch": ratio, "bar": bar, "holds": ratio <= bar}


def _each(seconds: list[float], blocks: int) -> float:
    return round(statistics.median(seconds) * 1e3 / blocks, 4)


def _turns(calls: list[Callable[[], None]], duration: float, runs: int = 4) -> list[list[float]]:
    """Return the seconds of each function, measured in turn; the first run of a turn does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(seconds[0]) < 2 * runs:
        for call, times in zip(calls, seconds, strict=True):
            call()
            for _ in range(runs):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
    return seconds


def _chain(path: Path, threads: int, quick: bool) -> dict[str, Any]:
    bundle = Bundle.open(path)
    whole = merge(
        bundle.read("stem"), [bundle.read(f"block {i}") for i in range(bundle.num_blocks)], bundle.read("head")
    )
    chain = [
        bench(bundle, threads=threads, duration=0.1 if quick else 3.0, provider="cpu", monolith=(whole, "merged"))
        for _ in range(1 if quick else OPENINGS)
    ]
    ratios = [found.chain_over_monolith for found in chain]
    ratio = statistics.median(value for value in ratios if value is not None)
    middle = chain[ratios.index(ratio)] if ratio in ratios else chain[0]
    assert middle.monolith_ms is not None
    assert middle.monolith_default_ms is not None
    return {
        "ms": middle.chain_ms.p50, "monolith_ms": middle.monolith_ms.p50, "over_monolith": ratio, "openings": ratios,
        "default_ms": middle.monolith_default_ms.p50, "bar": CHAIN_BARS[threads], "holds": ratio <= CHAIN_BARS[threads],
    }  # fmt: skip


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = new_table(
        "engines on the CPU, batch 1, times in ms",
        ("model", "", "block", "pytorch", "ratio", "threads", "chain", "whole", "ratio", "defaults"),
        left=("model", ""),
    )
    for row in document["rows"]:
        block = row["block"]
        first = [
            row["model"].removesuffix("_patch16_224"), row["precision"], f"{block['ms']:.3f}",
            f"{block['pytorch_ms']:.3f}", _judged(block["over_pytorch"], block),
        ]  # fmt: skip
        for threads, chain in row["chain"].items():
            table.add_row(
                *first, threads, f"{chain['ms']:.2f}", f"{chain['monolith_ms']:.2f}",
                _judged(chain["over_monolith"], chain), f"{chain['default_ms']:.2f}",
            )  # fmt: skip
            first = [""] * 5
    console.print(
        table, "ratio and bar; defaults: the whole model with ONNX Runtime's default options", highlight=False
    )  # fmt: skip


def _judged(value: float, row: dict[str, Any]) -> str:
    return f"{value:.3f} {'<=' if row['holds'] else '>'} {row['bar']}"
