"""Short trainings of a tiny model on the embedded digits."""

import json

import msgspec
import numpy as np
import torch
from PIL import Image

from ls_edge.training.config import read_config
from ls_edge.training.models.small_models import build
from ls_edge.training.progress import Reporter

SMALL = {"embed_dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 2.0}
TINY = {**SMALL, "depth": 4}


class Silent(Reporter):
    """A reporter that keeps warnings and epochs."""

    def __init__(self):
        self.warnings, self.epochs = [], []
        super().__init__(self.finished, lambda *_: None, self.warnings.append)

    def finished(self, metrics, _epochs):
        self.epochs.append(metrics)


class Stops(Silent):
    """A reporter that presses Ctrl-C after the first epoch."""

    def finished(self, metrics, epochs):
        raise KeyboardInterrupt


def settings(data="digits", *, optim=None, args=None, changes=(), **flags):
    """Return the configuration of a training on the CPU in float32; ``args`` are those of the model."""
    usual = {"batch_size": 128, "epochs": 2, "threads": 1, "device": "cpu", "method": "shuffle", "precision": "fp32"}
    config, _ = read_config(None, {"data": data, **usual, **flags}, changes)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, args={**SMALL, **(args or {})}),
        optim=msgspec.structs.replace(config.optim, **(optim or {})),
    )


def viewed():
    torch.manual_seed(0)
    return build("vit_digits", TINY)


def criterion(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)


def set_tables(view, seed=0):
    """Fill the tables of the slots of a view with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table in view.slots.tables:
            table.normal_(std=0.3, generator=generator)


def metrics(folder):
    """Return the lines of ``metrics.jsonl`` without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in lines]


def weights(folder):
    """Return the bytes of the weights of a run."""
    return (folder / "model.safetensors").read_bytes()


def numbered(top, names=("1", "2", "10")):
    """Make class folders of four images each."""
    for place, name in enumerate(names):
        (top / name).mkdir(parents=True)
        for index in range(4):
            pixels = np.full((16, 16, 3), 60 * place + index, np.uint8)
            Image.fromarray(pixels).save(top / name / f"{name}-{index}.png")
    return top
