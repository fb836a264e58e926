"""Exports in every precision: verified, reproducible, read by another engine, refused beyond the tolerance."""

import contextlib
import functools
import re

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from ls_edge.core.errors import UsageError, VerificationError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.settings import ExportSettings
from ls_edge.export.verify import verify_run
from ls_edge.export.writer import build_engines, export_run
from ls_edge.training.runs.checkpoint import load_run
from tests.export.onnx_models import beyond_half, model_of, session_of, types_of

IMAGES = np.random.default_rng(1).standard_normal((4, 3, 16, 16), dtype=np.float32)


@pytest.fixture(scope="module")
def gentle(make_run, tmp_path_factory):
    """Return a run with weights of realistic size; large ones amplify every rounding error."""

    def soften(view):
        for block in view.blocks:
            for parameter in block.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.6)

    return load_run(make_run(tmp_path_factory.mktemp("gentle") / "run", change=soften))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tract_runs_all_parts(make_run, tmp_path, precision):
    """Another engine reads the files; it refuses a float16 ``Gemm`` with a bias."""
    tract = pytest.importorskip("tract", reason="tract is not installed; run with 0.23.9")

    def lean(view):
        view.model.head.bias.normal_(generator=torch.Generator().manual_seed(0))

    bundle = export_run(
        load_run(make_run(tmp_path / "run", change=lean)), tmp_path / "bundle", ExportSettings(precision=precision)
    ).bundle
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        now = IMAGES
        for name, engine in (
            ("stem", chain.executor.engines[STEM]),
            ("block 0", chain.executor.engines[0]),
            ("head", chain.executor.engines[HEAD]),
        ):
            wanted = engine.run({engine.signature.inputs[0].name: now})
            file = str(bundle.folder / bundle.part(name).file)
            found = tract.onnx().load(file).into_model().into_runnable().run([now])[0].to_numpy()
            np.testing.assert_allclose(
                found, wanted, rtol=0, atol=(1e-4 if precision == "fp32" else 2e-2) * wanted.max()
            )
            now = wanted if name == "stem" else now


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        (ExportSettings(precision="fp16", whole=True), False),
        pytest.param(ExportSettings(precision="int8", whole=True), False, marks=pytest.mark.release),
        pytest.param(ExportSettings(precision="int8", engine="tensorrt", max_batch=3), True, marks=pytest.mark.release),
    ],
    ids=lambda value: f"{value.precision} {value.engine}" if isinstance(value, ExportSettings) else "",
)
def test_an_export_is_verified_and_gives_the_same_bytes_again(
    gentle, few_images, tmp_path, monkeypatch, settings, again
):
    given = few_images if settings.engine == "tensorrt" else None
    bundle = export_run(gentle, tmp_path / "one", settings, calibration=given).bundle
    manifest = bundle.manifest
    found = manifest.verified
    assert manifest.precision == settings.precision
    assert found["batches"] == sorted({1, 2, 3, settings.max_batch})
    assert found["measure"] == ("cosine" if settings.precision == "int8" else "relative error")
    assert (found["residual_1500"] is not None) == (settings.precision == "fp16")
    assert (found["top1"] is not None) == (given is not None)
    verify_run(bundle, gentle)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # although TensorRT for RTX is installed with the tools of development
    assert build_engines(bundle, settings.max_batch) is None
    if settings.engine == "tensorrt":
        model = model_of(bundle, "block 0")
        types = types_of(model)
        products = {
            (node.op_type, *(types[name] for name in node.input))
            for node in model.graph.node
            if node.op_type in ("MatMul", "LayerNormalization", "Softmax")
        }
        half, whole = TensorProto.FLOAT16, TensorProto.FLOAT
        assert products == {("MatMul", half, half), ("LayerNormalization", whole, whole, whole), ("Softmax", whole)}
        consumers = {name: node.op_type for node in model.graph.node for name in node.input}
        made = {node.output[0]: node.op_type for node in model.graph.node}
        # a cast between them would keep TensorRT from computing in int8
        assert {consumers[name] for name, kind in made.items() if kind == "DequantizeLinear"} == {"MatMul"}
        assert {consumers[name] for name, kind in made.items() if kind == "QuantizeLinear"} == {"DequantizeLinear"}
    if again:
        once_more = export_run(gentle, tmp_path / "two", settings, calibration=given).bundle
        assert once_more.manifest.bundle_id == manifest.bundle_id
        assert once_more.manifest.parts == manifest.parts
    if settings.whole:
        with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
            logits = chain.forward(IMAGES)
        whole = session_of(bundle.read("whole")).run(None, {"images": IMAGES})[0]
        np.testing.assert_allclose(whole, logits, rtol=0, atol=1e-2)


def test_int8_for_tensorrt_without_calibration_is_refused(loaded, tmp_path):
    with pytest.raises(UsageError, match="--calibrate"):
        export_run(loaded, tmp_path / "bundle", ExportSettings(precision="int8", engine="tensorrt"))
    assert list(tmp_path.iterdir()) == []


def test_a_precision_beyond_its_tolerance_is_refused_and_leaves_nothing(make_run, tmp_path):
    def sharpen(view):
        view.blocks[2].attn.qkv.weight.mul_(30)

    run_ = load_run(make_run(tmp_path / "run", change=sharpen))
    with pytest.raises(VerificationError, match=r"^block 2 .* export in fp32"):
        export_run(run_, tmp_path / "bundle", ExportSettings(precision="fp16"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_nodes_whose_values_float16_cannot_hold_stay_in_float32(make_run, tmp_path):
    run = load_run(make_run(tmp_path / "run", change=beyond_half))
    result = export_run(run, tmp_path / "bundle", ExportSettings(precision="fp16"))
    product = r"MatMul_\d+ \(mlp\.fc%d\.weight\.t\)"
    assert re.match(rf"block 1: {product % 1}, .*Erf_\d+, .*, {product % 2}, .* run in float32", result.warnings[0])
    assert result.bundle.manifest.verified["float32"].keys() == {"block 1"}
    # numpy's float16 really rounds and overflows where a CPU engine may compute in float32 between the casts
    tokens = run.view.stem(torch.from_numpy(IMAGES))
    with torch.no_grad():
        expected = run.view.head(functools.reduce(lambda now, index: run.view.block(index, now), range(3), tokens))
    found = tokens.detach().numpy()
    for index in range(result.bundle.num_blocks):
        found = ReferenceEvaluator(model_of(result.bundle, f"block {index}")).run(None, {"tokens": found})[0]
    logits = ReferenceEvaluator(model_of(result.bundle, "head")).run(None, {"tokens": found})[0]
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=5e-3 * float(expected.abs().max()))


@pytest.mark.release
def test_scales_of_int8_that_float16_cannot_hold_stay_in_float32(make_run, few_images, tmp_path):
    run = load_run(make_run(tmp_path / "run", change=beyond_half))
    settings = ExportSettings(precision="int8", engine="tensorrt")
    with contextlib.suppress(VerificationError):  # of the accuracy, which random weights lose
        export_run(run, tmp_path / "bundle", settings, calibration=few_images)
