"""Models as trainings start, saved as runs."""

import pytest
import torch

from ls_edge.training.config import ModelConfig, RunRecord, TrainConfig
from ls_edge.training.runs.checkpoint import save_run
from ls_edge.training.runs.initial_weights import make_initial_weights

TINY = {"embed_dim": 16, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0}
CLASSES = ("a", "b", "c")


def start(seed=0, classes=CLASSES, model_named=True, warn=lambda text: pytest.fail(text), **kwargs):
    config = ModelConfig(**{"name": "vit_digits", "args": TINY, **kwargs})
    return make_initial_weights(config, classes, seed=seed, model_named=model_named, warn=warn)


def save(folder, made, classes=CLASSES, method="shuffle"):
    record = RunRecord(
        version="0", model=made.model, model_args=made.args, kept=made.kept, classes=classes, image=made.image,
        trained_on="", method=method, best_epoch=1,
    )  # fmt: skip
    save_run(folder, made.view, TrainConfig(), record)
    return folder


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
