"""The bundled models load, are as small as documented, and reach the documented accuracy."""

import json
from pathlib import Path

import pytest
import safetensors
import torch

from ls_edge.training.runs.checkpoint import load_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", params=["cifar10", "cifar10-plain"])
def folder(request):
    return EXAMPLES / request.param


@pytest.fixture(scope="module")
def run(folder):
    return load_run(folder)


def test_an_example_is_small_and_stored_in_half_precision(folder):
    assert (folder / "model.safetensors").stat().st_size <= 6_000_000
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        kinds = {str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    assert kinds - {"torch.int64"} == {"torch.float16"}  # counts of batches stay whole numbers


def test_the_shared_example_is_one_block_for_all_steps_in_any_order():
    run = load_run(EXAMPLES / "cifar10-shared")
    plain = load_run(EXAMPLES / "cifar10-plain")
    assert (run.record.model, run.record.method, run.view.owners, str(run.bands)) == (
        plain.record.model,
        "shared",
        (0,) * 8,
        "0-7",
    )
    assert run.record.classes == plain.record.classes
    shared, every = (
        sum(value.numel() for name, value in each.view.weights().items() if "blocks" in name or "slots" in name)
        for each in (run, plain)
    )
    assert 0.2 < shared / every < 0.25
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trained = run.view(images)
        assert all(torch.equal(run.view(images, order), trained) for order in run.bands.random_orders(6, seed=0))
    said = json.loads((EXAMPLES / "cifar10-shared" / "eval.json").read_text())
    assert (said["images"], said["settings"]["weights"]) == (5000, run.weights_sha256)
    assert said["sequential"]["top1"] == said["arbitrary"]["top1_worst"] >= 0.66
    assert said["kept"]["6"]["arbitrary"] >= said["sequential"]["top1"] - 0.03
    text = (EXAMPLES / "cifar10-shared" / "README.md").read_text()
    for figure in (said["sequential"]["top1"], *(said["kept"][kept]["arbitrary"] for kept in ("6", "4", "2"))):
        assert f"{100 * figure:.1f} %" in text


def test_an_example_matches_its_configuration(run, folder):
    model, bands = {
        "cifar10": ("vit_cifar", "0-7"),
        "cifar10-plain": ("vit_tiny_patch16_224", "0/1-6/7"),
    }[folder.name]
    assert (run.record.model, run.record.method, run.view.num_blocks, str(run.bands)) == (model, "anyorder", 8, bands)
    assert run.record.classes == (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip


def test_the_documented_accuracies_match_the_evaluation(folder, run):
    said = json.loads((folder / "eval.json").read_text())
    assert said["images"] == 5000
    assert said["arbitrary"]["orders"] >= 64
    assert said["sequential"]["top1"] >= {"cifar10": 0.80, "cifar10-plain": 0.66}[folder.name]
    assert said["arbitrary"]["top1_mean"] >= 0.95 * said["sequential"]["top1"]
    assert (said["settings"]["bands"], said["settings"]["weights"]) == (run.bands.to_json(), run.weights_sha256)
    text = (folder / "README.md").read_text()
    for figure in (said["sequential"]["top1"], said["arbitrary"]["top1_mean"]):
        assert f"{100 * figure:.1f} %" in text
