"""Verification: right numbers pass, wrong numbers and exchanged parts are named."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ls_edge.core.errors import VerificationError
from ls_edge.engines.engine import signature_of
from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.targets import PartsView
from ls_edge.export.verify import generated_images, verify_numbers, verify_run
from ls_edge.export.writer import export_run
from ls_edge.training.config import RunRecord, TrainConfig
from ls_edge.training.models.small_models import build, image_spec_of
from ls_edge.training.runs.checkpoint import load_run, save_run


def canceling(folder):
    """Return a run whose convolutional stem adds and subtracts 100, which is inexact in float32."""
    args = {"depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
    torch.manual_seed(0)
    view = build("vit_cifar", args)
    embed = view.model.patch_embed
    with torch.no_grad():
        embed.body[-2].bias.add_(100.0)
        embed.proj.weight.normal_()
        embed.proj.bias.copy_(-100.0 * embed.proj.weight.sum(dim=(1, 2, 3)))
    record = RunRecord(
        version="0", model="vit_cifar", model_args=args, kept=(0,), classes=tuple("0123456789"),
        image=image_spec_of(view), trained_on="", method="shuffle",
    )  # fmt: skip
    save_run(folder, view, TrainConfig(), record)
    return load_run(folder)


def test_a_bundle_is_verified_with_its_run(exported, loaded):
    verified = verify_run(exported, loaded)
    assert verified.max_rel_error <= verified.tolerance.relative == 1e-5


def test_the_run_of_another_bundle_is_refused(exported, make_run, tmp_path):
    other = load_run(make_run(tmp_path / "other", seed=5))
    with pytest.raises(VerificationError, match=f"belongs to model {exported.manifest.model_id[:12]}"):
        verify_run(exported, other)


def test_a_part_that_is_slightly_off_is_named(exported, loaded):
    images = generated_images(loaded.record.image)
    with Pipeline.open(exported, threads=1, provider="cpu") as chain:
        model = onnx.load_model_from_string(exported.read("block 1"))
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == "mlp.fc2.bias")
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(1e-3), bias.name))
        signature = signature_of(exported.manifest, "block 1")
        spoilt = OnnxEngine(model.SerializeToString(), "block 1", signature, provider=chain.provider, threads=1)
        wrong = Pipeline(exported, {**chain.executor.engines, 1: spoilt}, chain.choice)
        with pytest.raises(VerificationError, match=r"^block 1 differs from PyTorch by 0\.00"):
            verify_numbers(PartsView(loaded.view), wrong, images, source="generated", precision="fp32")
        spoilt.close()


def test_exchanged_blocks_are_named(exported, loaded):
    images = generated_images(loaded.record.image)
    with Pipeline.open(exported, threads=1, provider="cpu") as chain:
        engines = chain.executor.engines
        last = chain.num_blocks - 1
        swapped = Pipeline(exported, {**engines, 0: engines[last], last: engines[0]}, chain.choice)
        with pytest.raises(VerificationError, match=r"^block 0 differs"):
            verify_numbers(PartsView(loaded.view), swapped, images, source="generated", precision="fp32")


def test_generated_images_are_the_same_every_time(loaded):
    generated = generated_images(loaded.record.image)
    assert generated.shape[1:] == (3, *loaded.record.image.size)
    np.testing.assert_array_equal(generated, generated_images(loaded.record.image))


def test_float32_may_be_as_inexact_as_in_pytorch(tmp_path):
    run = canceling(tmp_path / "run")
    bundle = export_run(run, tmp_path / "bundle").bundle
    verified = bundle.manifest.verified
    assert 1e-5 < verified["max_rel_error"] < 4 * verified["rounding"]
    assert verified["rounding"] < 1e-3
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain, torch.no_grad():
        run.view.model.patch_embed.proj.bias[3] += 0.5  # what rounding does not explain is still refused
        with pytest.raises(VerificationError, match=r"^stem differs from PyTorch by 0\.5"):
            verify_numbers(PartsView(run.view), chain, generated_images(run.record.image), source="x", precision="fp32")
