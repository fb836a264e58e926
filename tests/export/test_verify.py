"""Verification: right numbers pass, wrong numbers and exchanged parts are named."""

import contextlib
import dataclasses
import hashlib
import re

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ls_edge.core.bundle import Bundle, PartFile, bundle_id_of, write_manifest
from ls_edge.core.errors import VerificationError
from ls_edge.core.parts import HEAD
from ls_edge.engines.engine import signature_of
from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.calibration import Samples
from ls_edge.export.file_checks import check_files
from ls_edge.export.fp16 import to_half
from ls_edge.export.settings import ExportSettings
from ls_edge.export.targets import PartsView, prepare_for_export
from ls_edge.export.trace_onnx import trace_blocks
from ls_edge.export.verify import Verified, generated_images, verify_accuracy, verify_numbers, verify_run
from ls_edge.export.writer import _draft as draft_manifest
from ls_edge.export.writer import export_run, parts_of
from ls_edge.training.config import RunRecord, TrainConfig
from ls_edge.training.models.small_models import build, image_spec_of
from ls_edge.training.runs.checkpoint import load_run, save_run
from tests.export.onnx_models import beyond_half


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


class Spoilt:
    """An engine whose results are changed."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run(self, inputs):
        return self.change(self.engine.run(inputs))


def forged(bundle, **changes):
    """Return the bundle with a changed manifest whose id is right again."""
    manifest = msgspec.structs.replace(bundle.manifest, **changes)
    opened = Bundle(bundle.folder, manifest)
    bundle_id = bundle_id_of(opened.interface, manifest.precision, manifest.parts)
    write_manifest(bundle.folder, msgspec.structs.replace(manifest, bundle_id=bundle_id))
    return Bundle.open(bundle.folder)


def rotated(names):
    return (*names[1:], names[0])


def test_classes_in_another_order_change_the_ids_and_are_named(copied, loaded):
    before = copied.manifest
    changed = forged(copied, classes=rotated(before.classes))
    assert changed.manifest.bundle_id != before.bundle_id
    with pytest.raises(VerificationError, match=r"list of classes of .* differs from .*: 0 is '1', not '0'"):
        verify_run(changed, loaded)
    assert re.search(r"says ls_edge.classes \[\"0\"", problems_of(changed)["head"])
    record = msgspec.structs.replace(loaded.record, classes=rotated(before.classes))
    renamed = dataclasses.replace(loaded, record=record)
    assert draft_manifest(renamed, parts_of(loaded), ExportSettings()).model_id != before.model_id


def test_other_preprocessing_than_the_run_has_is_named(copied, loaded):
    image = msgspec.structs.replace(copied.manifest.image, mean=(0.4, 0.5, 0.5))
    with pytest.raises(
        VerificationError, match=r"preprocessing of .* differs from .*: mean is \(0.4, 0.5, 0.5\), not \(0.5, "
    ):
        verify_run(forged(copied, image=image), loaded)


def test_exchanged_parts_are_named_without_the_run(copied):
    parts = copied.manifest.parts
    first, second, third = parts.blocks
    found = problems_of(forged(copied, parts=msgspec.structs.replace(parts, blocks=(second, first, third))))
    assert found.keys() == {"block 0", "block 1"}
    assert "(block 0) says ls_edge.part block 1" in found["block 0"]


def test_a_part_of_another_model_is_named_without_the_run(copied, make_run, tmp_path):
    other = export_run(load_run(make_run(tmp_path / "other", seed=5)), tmp_path / "theirs").bundle
    file = "blocks/02.onnx"
    (copied.folder / file).write_bytes((other.folder / file).read_bytes())
    parts = copied.manifest.parts
    found = problems_of(forged(copied, parts=msgspec.structs.replace(
        parts, blocks=(*parts.blocks[:2], other.manifest.parts.blocks[2]))))  # fmt: skip
    assert found.keys() == {"block 2"}
    assert "says ls_edge.model_id" in found["block 2"]


def test_a_wrong_whole_model_is_named(copied, loaded):
    def louder(model):
        weight = next(tensor for tensor in model.graph.initializer if 10 in tensor.dims)
        set_in_file(weight.name, lambda values: values * np.float32(1.01))(model)

    changed = changed_in_file(copied, "whole", louder)
    assert changed.manifest.bundle_id != copied.manifest.bundle_id
    with pytest.raises(VerificationError, match=r"^whole differs from PyTorch by 0\."):
        verify_run(changed, loaded)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_a_part_that_is_wrong_at_one_batch_size_is_named(exported, loaded, batch):
    """A shape that tracing has baked in works for that batch only."""

    images = generated_images(loaded.record.image)
    with Pipeline.open(exported, threads=1, provider="cpu") as chain:
        spoilt = Spoilt(chain.executor.engines[1], lambda tokens: tokens + np.float32(len(tokens) == batch))
        engines = {**chain.executor.engines, 1: spoilt}
        with pytest.raises(VerificationError, match=rf"^block 1 differs .* at batch {batch},"):
            verify_numbers(
                PartsView(loaded.view), Pipeline(exported, engines, chain.choice), images, source="", precision="fp32"
            )


class Unordered(Pipeline):
    """A chain that is right in trained order only."""

    def forward(self, images, arrangement=None):
        return super().forward(images)


def test_a_chain_that_is_wrong_in_other_orders_only_is_named(exported, loaded):
    images = generated_images(loaded.record.image)
    with Pipeline.open(exported, threads=1, provider="cpu") as chain:
        wrong = Unordered(exported, chain.executor.engines, chain.choice)
        with pytest.raises(VerificationError, match=r"^the chain in order \[(?!0, 1, 2\]).*\] differs from PyTorch"):
            verify_numbers(PartsView(loaded.view), wrong, images, source="", precision="fp32")


def test_a_loss_of_accuracy_is_named(exported, loaded):
    view, images = PartsView(loaded.view), generated_images(loaded.record.image, 20)
    with torch.no_grad():
        labels = view.forward(torch.from_numpy(images), range(view.num_blocks)).numpy().argmax(1)
    result = Verified("int8", "", "", (1, 2))
    with Pipeline.open(exported, threads=1, provider="cpu") as chain:
        verify_accuracy(view, chain, Samples(images, labels), result)
        assert result.top1 == {"pytorch": 1.0, "bundle": 1.0, "images": 20}
        engines = {**chain.executor.engines, HEAD: Spoilt(chain.executor.engines[HEAD], lambda logits: -logits)}
        with pytest.raises(VerificationError, match=r"int8 answers 0.0000 of 20 .*PyTorch 1\.0.*more than 0.01"):
            verify_accuracy(view, Pipeline(exported, engines, chain.choice), Samples(images, labels), result)


@pytest.mark.parametrize(("spread", "holds"), [(0.08, True), (0.3, False)])
def test_int8_may_turn_logits_by_a_few_degrees(exported, loaded, spread, holds):
    images = generated_images(loaded.record.image)
    with Pipeline.open(exported, threads=1, provider="cpu") as chain:
        head = Spoilt(chain.executor.engines[HEAD], lambda logits: logits * np.linspace(1 - spread, 1 + spread, 10))
        turned = Pipeline(exported, {**chain.executor.engines, HEAD: head}, chain.choice)
        refused = pytest.raises(VerificationError, match=r"the tolerance is 0\.99; export in fp16 or fp32")
        with contextlib.nullcontext() if holds else refused:
            found = verify_numbers(PartsView(loaded.view), turned, images, source="", precision="int8")
            assert 0.99 < found.min_cosine < 0.999


@pytest.mark.release
def test_a_large_mean_of_the_logits_does_not_hide_wrong_ones_in_int8(make_run, tmp_path):
    run = load_run(make_run(tmp_path / "run", change=lambda view: view.model.head.bias.fill_(1e4)))
    bundle = export_run(run, tmp_path / "bundle").bundle
    images = generated_images(run.record.image)
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        engines = {**chain.executor.engines, HEAD: Spoilt(chain.executor.engines[HEAD], lambda logits: logits[:, ::-1])}
        wrong = Pipeline(bundle, engines, chain.choice)
        with pytest.raises(VerificationError, match=r"^head in int8 has a cosine of -?0"):
            verify_numbers(PartsView(run.view), wrong, images, source="", precision="int8")


def changed_in_file(bundle, part, change):
    """Return the bundle with ``change(model)`` made to a file, whose digests are right again."""
    model = onnx.load_model_from_string(bundle.read(part))
    change(model)
    raw, file = model.SerializeToString(), bundle.part(part).file
    (bundle.folder / file).write_bytes(raw)
    entry, parts = PartFile(file, hashlib.sha256(raw).hexdigest(), len(raw)), bundle.manifest.parts
    kind, _, index = part.partition(" ")
    changed = {kind: entry} if not index else {
        "blocks": (*parts.blocks[: int(index)], entry, *parts.blocks[int(index) + 1 :])
    }  # fmt: skip
    return forged(bundle, parts=msgspec.structs.replace(parts, **changed))


def set_in_file(name, change):
    def of(model):
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))

    return of


@pytest.mark.release
def test_a_block_that_is_wrong_on_large_tokens_only_is_named(make_run, tmp_path):
    run = load_run(make_run(tmp_path / "run", change=lambda view: [p.mul_(0.6) for p in view.blocks.parameters()]))
    bundle = export_run(run, tmp_path / "bundle", ExportSettings(precision="fp16")).bundle
    verify_run(bundle, run)

    def limit(model):
        last = model.graph.node[-1]
        last.output[0] = "unlimited"
        model.graph.initializer.append(numpy_helper.from_array(np.float32(1000), "limit"))
        model.graph.node.append(onnx.helper.make_node("Min", ["unlimited", "limit"], ["tokens_out"]))

    with pytest.raises(VerificationError, match=r"^block 1 with tokens up to 1500 differs .* export in fp32"):
        verify_run(changed_in_file(bundle, "block 1", limit), run)


def test_an_agreement_that_does_not_hold_is_named(make_run, tmp_path):
    """The first two classes have almost the same logits, so a change within the tolerance changes the answer."""

    def alike(view):
        view.model.head.weight[1] = view.model.head.weight[0]
        view.model.head.bias[:2] = torch.tensor([100, 100 - 2e-4])

    run = load_run(make_run(tmp_path / "run", change=alike))
    bundle = export_run(run, tmp_path / "bundle").bundle
    assert bundle.manifest.verified["agreement"] == 1.0

    def other(bias):
        bias[1] += 4e-4
        return bias

    with pytest.raises(VerificationError, match=r"verified.agreement is 1.0, but it is 0.0; export again"):
        verify_run(changed_in_file(bundle, "head", set_in_file("head.bias", other)), run)


def test_an_error_within_the_tolerance_that_the_manifest_does_not_say_is_named(copied, loaded):
    changed = changed_in_file(copied, "block 1", set_in_file("mlp.fc2.bias", lambda bias: bias + np.float32(4e-5)))
    with pytest.raises(VerificationError, match=r"verified\.(parts block 1|max_rel_error) is .*e-0[78], but it is"):
        verify_run(changed, loaded)


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("outputs", {"block 1": [0.5] * 32}, "the manifest's outputs of block 1 differ from those of its file"),
        ("outputs", {"block 9": [0.5] * 32}, "outputs of block 9 differ"),
        ("measure", "cosine", "verified.measure is cosine, but it is relative error"),
        ("tolerance", 1e-9, "verified.tolerance is 1e-09, but it is 1e-05"),
        ("int8", "dynamic", "verified.int8 is dynamic, but it is None"),
        ("min_cosine", 1.5, "verified.min_cosine is 1.5, but it is"),
    ],
)
def test_a_false_entry_of_the_manifest_is_named(copied, loaded, entry, value, reason):
    verified = {**copied.manifest.verified, entry: value}
    with pytest.raises(VerificationError, match=reason):
        verify_run(forged(copied, verified=verified), loaded)


def test_a_false_accuracy_of_the_manifest_is_named(copied, loaded):
    images = generated_images(copied.manifest.image, 20)
    samples = Samples(images, np.arange(20) % 10)
    measured = verify_run(copied, loaded, samples, "given").to_json()
    assert measured["top1"]["images"] == 20
    better = {**measured, "top1": {**measured["top1"], "bundle": measured["top1"]["bundle"] + 0.05}}
    verify_run(forged(copied, verified=measured), loaded, samples, "given")
    with pytest.raises(VerificationError, match=r"verified.top1 bundle is \S+, but it is"):
        verify_run(forged(copied, verified=better), loaded, samples, "given")
    verify_run(forged(copied, verified=better), loaded, Samples(images[::-1].copy(), samples.labels), "given")


@pytest.mark.release
def test_a_value_that_float16_cannot_hold_is_named_although_a_cpu_computes_past_it(make_run, tmp_path):
    run = load_run(make_run(tmp_path / "run", change=beyond_half))
    bundle = export_run(run, tmp_path / "bundle", ExportSettings(precision="fp16")).bundle
    verify_run(bundle, run)
    model = to_half(list(trace_blocks(prepare_for_export(run.view)))[1])

    def all_in_half(written):
        written.graph.CopyFrom(model.graph)

    with pytest.raises(VerificationError, match=r"^block 1: the value '\w+' exceeds 65,504.* NaN; export again"):
        verify_run(changed_in_file(bundle, "block 1", all_in_half), run)


def problems_of(bundle):
    return {report.part: report.problem for report in check_files(bundle) if report.problem}
