"""The model that comes with the project is a run that loads, as small as is said, and does what is said."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

from ls_edge.arrangement import Arrangement, random_orders
from ls_edge.training.checkpoint import load_run

FOLDER = Path(__file__).parents[2] / "examples" / "cifar10"


@pytest.fixture(scope="module")
def run():
    return load_run(FOLDER)


def test_it_is_small_and_stored_in_half_precision():
    assert (FOLDER / "model.safetensors").stat().st_size <= 6_000_000
    with safetensors.safe_open(FOLDER / "model.safetensors", "pt") as file:
        kinds = {str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    assert kinds == {"torch.float16", "torch.int64"}


def test_it_is_what_its_configuration_says(run):
    assert (run.model, run.method, run.view.num_blocks) == ("vit_cifar", "anyorder", 8)
    assert run.classes == (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip


def test_orders_and_waves_hardly_change_its_answers(run):
    """On smooth pictures that it has never seen: what the training was for, without the data set."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(24, 3, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic").clamp(-1, 1)
    waves = [Arrangement((((0, 2, 4, 6), (1, 3, 5, 7)),)), Arrangement((((3, 1), (0, 2)), ((7, 5), (4, 6))))]
    with torch.no_grad():
        trained = run.view(images).numpy()
        others = [run.view(images, order).numpy() for order in (*random_orders(8, 6, seed=0), *waves)]
    cosines = [float((trained * other).sum() / np.linalg.norm(trained) / np.linalg.norm(other)) for other in others]
    assert min(cosines) > 0.9
    assert all(not np.array_equal(trained, other) for other in others)


def test_what_is_said_of_it_was_measured():
    said = json.loads((FOLDER / "eval.json").read_text())
    assert said["images"] == 5000
    assert said["arbitrary"]["orders"] >= 64
    assert said["sequential"]["top1"] >= 0.80
    assert said["arbitrary"]["top1_mean"] >= 0.95 * said["sequential"]["top1"]
    text = (FOLDER / "README.md").read_text()
    for figure in (said["sequential"]["top1"], said["arbitrary"]["top1_mean"]):
        assert f"{100 * figure:.1f} %" in text
