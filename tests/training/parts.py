"""Trainings of a few steps in parts and processes, for comparison; ``python -m tests.training.parts RANK FOLDER``."""

import itertools
import sys
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.data.datasets import open_data
from ls_edge.training.config import DataConfig, OptimConfig, RunRecord, TrainConfig
from ls_edge.training.data import Batches
from ls_edge.training.distributed import DistributedContext, process_group
from ls_edge.training.methods.registry import METHODS, make_method
from ls_edge.training.models.small_models import build, image_spec_of
from ls_edge.training.precision import seed_epoch
from ls_edge.training.task import TrainingTask

ALONE = DistributedContext()
BATCH = 10
SHAPES = {
    "plain": ("vit_digits", {"embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 2}),
    "norm": ("vit_cifar", {"embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 2, "img_size": 16}),
}
ROWS = {**{name: {} for name in METHODS}, "position without dropout": {"dropout": 0.0}}
"""Methods with their settings."""
TABLE = [
    *itertools.product(ROWS, ("plain",), ("broken",), (1, 3)),
    *itertools.product(("shuffle",), SHAPES, ("cached",), (1, 4, BATCH)),
]
"""Method, model, kind of data, and number of parts."""
PROBE = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(7))


def trained(folder, row, shape, data, accumulate, context=ALONE):
    """Return logits and losses after three steps, or the reason of a refusal."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, args = SHAPES[shape]
    view, method = build(name, args), make_method(row.split()[0], ROWS[row])
    bands, image = Bands(3), image_spec_of(view)
    images = open_data(str(Path(folder) / data), "train").images
    source = DataConfig(cache_mb=512 if data == "cached" else 0, workers=0)
    config = TrainConfig(
        data=source, optim=OptimConfig(lr=1e-3), epochs=1, batch_size=BATCH, accumulate=accumulate, precision="fp32"
    )
    batches = Batches(images, image, config, augment="shift", on_skipped=lambda _: None, context=context)
    places = method.reshape(view, bands, None, trained=True)
    method.attach(view)
    method.prepare(view, PROBE)
    record = RunRecord("0", name, args, tuple(places), ("cat", "dog"), image, "", row.split()[0])
    try:
        task = TrainingTask(view, method, config, record, bands, context, None)
    except UsageError as error:
        return {"refused": str(error)}
    seed_epoch(0, 1)
    loss, _, seen = task.epoch(1, batches, lambda _: None)
    with torch.no_grad():
        logits = view.eval()(PROBE)
    return {"logits": logits, "loss": torch.tensor(loss), "seen": torch.tensor(seen)}


def main(rank, folder):
    """Train all rows of the table as one of two processes, and write the results."""
    context = DistributedContext(int(rank), 2, int(rank))
    results = {}
    with process_group(context, torch.device("cpu")):
        for number, row in enumerate(TABLE):
            results[number] = trained(folder, *row, context)
    if context.is_main:
        refused = {number: found["refused"] for number, found in results.items() if "refused" in found}
        tensors = {f"{n} {key}": v for n, found in results.items() if n not in refused for key, v in found.items()}
        safetensors.torch.save_file(tensors, str(Path(folder) / "results.safetensors"))
        (Path(folder) / "refused.json").write_bytes(msgspec.json.encode(refused))


if __name__ == "__main__":
    main(*sys.argv[1:])
