"""Training speed with a random order in every step, compared with timm's forward and with blocks indexed by a tensor.

    python -m benchmarks train
    python -m benchmarks.train --models vit_small_patch16_224 --batch 64    # with its own settings

For each model, forward, backward and AdamW on images in memory:

- ``ours``: the view, with an order of Python ints in each step, blocks compiled one by one (on CUDA);
- ``timm``: the forward of the same timm model in trained order, with the same precision and compilation of blocks;
- ``index fp32``, ``index``: timm's model with its blocks indexed by a permutation on the device, eager, in float32 and
  in the precision of the others.

Rounds alternate, so that other load affects all contenders equally; results are medians over rounds. ``mfu`` is model
FLOPs (counted by torch in the forward pass, times three) over the peak of the device, if it is known. Data loading is
not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import new_table
from ls_edge.training.models.small_models import create
from ls_edge.training.models.view import BlockView
from ls_edge.training.precision import autocast, choose_device, choose_precision, plain_attention

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s, by a part of the device's name."""


BARS = {"over_timm": 0.97, "over_index_fp32": 1.5}


class Contender:
    """Contender: a way to compute the logits, with its own optimizer."""

    def __init__(self, name: str, forward: Callable[[Tensor], Tensor], module: nn.Module, dtype: torch.dtype) -> None:
        self.name, self.forward, self.dtype = name, forward, dtype
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        self.seconds: list[float] = []

    def step(self, images: Tensor, targets: Tensor) -> None:
        """Run forward, backward and update."""
        with autocast(images.device, self.dtype):
            loss = nn.functional.cross_entropy(self.forward(images).float(), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def round(self, images: Tensor, targets: Tensor, steps: int) -> None:
        """Time some steps."""
        settle(images.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(images, targets)
        settle(images.device)
        self.seconds.append((time.perf_counter() - start) / steps)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def contenders(name: str, device: torch.device, dtype: torch.dtype, args: dict[str, Any], *, compiled: bool) -> Any:
    rng = random.Random(0)
    view = BlockView(create(name, **args).to(device).train())

    def shuffled(images: Tensor) -> Tensor:
        order = list(range(view.num_blocks))
        rng.shuffle(order)
        return view(images, order)

    timm: Any = create(name, **args).to(device).train()
    indexed: Any = create(name, **args).to(device).train()
    blocks = nn.ModuleList(indexed.blocks)
    if compiled:
        view.compile_blocks()
        timm.blocks = nn.Sequential(*(torch.compile(block, dynamic=False) for block in timm.blocks))

    def by_tensor(images: Tensor) -> Tensor:
        tokens = indexed.norm_pre(indexed.patch_drop(indexed._pos_embed(indexed.patch_embed(images))))
        for index in torch.randperm(len(blocks), device=device):
            tokens = blocks[index](tokens)
        logits: Tensor = indexed.forward_head(indexed.norm(tokens))
        return logits

    made = [Contender("ours", shuffled, view, dtype), Contender("timm", timm, timm, dtype),
            Contender("index fp32", by_tensor, indexed, torch.float32)]  # fmt: skip
    if dtype != torch.float32:
        made.append(Contender("index", by_tensor, indexed, dtype))
    return view, made


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(options.device)
    dtype = choose_precision(options.precision, device)
    compiled = options.compile == "on" or (options.compile == "auto" and device.type == "cuda")
    batch = options.batch or (256 if device.type == "cuda" else 8)
    args = {} if options.img_size is None else {"img_size": options.img_size}
    view, made = contenders(name, device, dtype, args, compiled=compiled)
    images = torch.randn(batch, 3, *view.image_size, device=device)
    targets = torch.randint(0, view.num_classes, (batch,), device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        view(images)
    flops = 3 * counter.get_total_flops()
    modules = nn.ModuleList([view, *(c.forward for c in made if isinstance(c.forward, nn.Module))])
    with plain_attention(modules, device):
        for contender in made:
            for _ in range(options.warmup):
                contender.step(images, targets)
        for _ in range(options.rounds):
            for contender in made:
                contender.round(images, targets, options.steps)
    median = {contender.name: statistics.median(contender.seconds) for contender in made}
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = next((value for part, value in PEAK.items() if part in title and dtype != torch.float32), None)
    return {
        "model": name, "device": title, "precision": str(dtype).split(".")[-1], "compiled": compiled,
        "batch": batch, "torch": torch.__version__,
        "images_per_second": {key: round(batch / value, 2) for key, value in median.items()},
        "spread": {c.name: round((max(c.seconds) - min(c.seconds)) / median[c.name], 3) for c in made},
        "over_timm": round(median["timm"] / median["ours"], 3),
        "over_index_fp32": round(median["index fp32"] / median["ours"], 3),
        "over_index": round(median.get("index", median["index fp32"]) / median["ours"], 3),
        "mfu": None if peak is None else round(flops / median["ours"] / peak, 3),
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.train", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--models", default="vit_small_patch16_224,vit_base_patch16_224")
    made.add_argument("--batch", type=int, help="default: 256 on CUDA, 8 on a CPU")
    made.add_argument("--steps", type=int, default=10, help="steps per round")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--warmup", type=int, default=3)
    made.add_argument("--img-size", type=int)
    made.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    made.add_argument("--precision", choices=["auto", "fp32", "bf16", "fp16"], default="auto")
    made.add_argument("--compile", choices=["auto", "on", "off"], default="auto")
    made.add_argument("--json", type=Path, help="also write the results to this file")
    return made


QUICK = ["--models", "vit_tiny_patch16_224", "--batch", "2", "--steps", "1", "--rounds", "2", "--warmup", "1",
         "--img-size", "32"]  # fmt: skip


def run(quick: bool, argv: list[str] | None = None) -> dict[str, Any]:
    """Return the results of each model."""
    options = parser().parse_args(QUICK if quick else argv or [])
    return {"bars": BARS, "models": [measure(name, options) for name in options.models.split(",")]}


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    first = document["models"][0]
    title = f"training, {first['device']}, {first['precision']}{', compiled' if first['compiled'] else ''}"
    table = new_table(
        title,
        ("model", "batch", "ours", "timm", "index", "index fp32", "over timm", "over index fp32", "mfu"),
        left=("model",),
    )
    for row in document["models"]:
        speeds = row["images_per_second"]
        table.add_row(
            row["model"], str(row["batch"]), *(str(speeds.get(key, "")) for key in ("ours", "timm", "index")),
            str(speeds["index fp32"]), str(row["over_timm"]), str(row["over_index_fp32"]), str(row["mfu"] or ""),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"images per second; bars: {BARS['over_timm']} of timm's, on a GPU {BARS['over_index_fp32']} of index fp32"
    )


def main() -> int:
    """Run with the settings of the command line."""
    options = parser().parse_args()
    document = run(False, sys.argv[1:])
    show(document, Console())
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
