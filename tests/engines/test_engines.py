"""Engines: right numbers, one part a file, the provider that was asked for, one clear line for everything else."""

import shutil

import numpy as np
import onnxruntime
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, DigestMismatch, EngineError, UsageError
from ls_edge.engines.engine import signature_of, warm_up
from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.engines.opening import open_block_engines, open_engine, usable_threads

CPU = "CPUExecutionProvider"


def tokens(batch=2, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, 16, 32), dtype=np.float32)


def plain(bundle, part, inputs):
    session = onnxruntime.InferenceSession(bundle.read(part), providers=[CPU])
    return session.run(None, inputs)[0]


def test_an_engine_computes_what_the_file_says(bundle):
    engine = open_engine(bundle, "block 3", threads=1)
    assert (engine.part, engine.kind, engine.provider) == ("block 3", "onnx", CPU)
    for batch in (1, 2, 5, 3, 4, 7, 1):
        given = tokens(batch, seed=batch)
        np.testing.assert_allclose(
            engine.run({"tokens": given}), plain(bundle, "block 3", {"tokens": given}), rtol=0, atol=2e-6
        )
    assert warm_up(engine, 2) > 0
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match=r"block 3 was closed"):
        engine.run({"tokens": tokens()})


def test_results_belong_to_the_caller(bundle):
    engine = open_engine(bundle, "block 0", threads=1)
    given = tokens(seed=1)
    first = engine.run({"tokens": given})
    kept = first.copy()
    engine.run({"tokens": tokens(seed=2)})
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(engine.run({"tokens": np.asfortranarray(given)}), kept)


def test_inputs_are_checked_against_the_manifest(bundle):
    engine = open_engine(bundle, "block 0", threads=1)
    good = tokens()
    for inputs, words in (
        ({"tokens": good.astype(np.float64)}, r"tokens is float64 \[2, 16, 32\], must be tokens float32 \[B, 16, 32\]"),
        ({"tokens": good[:, :15]}, r"float32 \[2, 15, 32\]"),
        ({"tokens": good[0]}, r"float32 \[16, 32\]"),
        ({"tokens": good[:0]}, "B at least 1"),
        ({"images": good}, "takes tokens, received images"),
        ({"tokens": good, "slot": np.zeros(2, np.int64)}, "takes tokens, received tokens, slot"),
        ({}, "takes tokens"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.run(inputs)


def test_block_engines_need_only_their_own_files(tiny_bundle, tmp_path):
    copied = tmp_path / "bundle"
    (copied / "blocks").mkdir(parents=True)
    shutil.copy(tiny_bundle / "manifest.json", copied)
    for block in (1, 4):
        shutil.copy(tiny_bundle / f"blocks/{block:02d}.onnx", copied / "blocks")
    bundle = Bundle.open(copied)
    found = open_block_engines(bundle, [4, 1], threads=1)
    assert list(found) == [4, 1]
    assert [engine.part for engine in found.values()] == ["block 4", "block 1"]
    given = tokens()
    whole = Bundle.open(tiny_bundle)
    for block, engine in found.items():
        expected = plain(whole, f"block {block}", {"tokens": given})
        np.testing.assert_allclose(engine.run({"tokens": given}), expected, rtol=0, atol=2e-6)
    with pytest.raises(BundleError, match="is missing"):
        open_block_engines(bundle, [0], threads=1)
    with pytest.raises(BundleError, match="no block 6; it has blocks 0 to 5"):
        open_block_engines(bundle, [6], threads=1)
    (copied / "blocks/01.onnx").write_bytes(b"other")
    with pytest.raises(DigestMismatch, match=r"01\.onnx"):
        open_block_engines(bundle, [1], threads=1)


def test_bytes_that_are_no_part_are_named(bundle):
    signature = signature_of(bundle.manifest, "block 2")
    raw = bundle.read("block 2")
    for bad in (b"", b"not an onnx file", raw[: len(raw) // 2]):
        with pytest.raises(EngineError, match=r"^block 2 does not load") as caught:
            OnnxEngine(bad, "block 2", signature, provider=CPU, threads=1)
        assert "\n" not in str(caught.value)
    with pytest.raises(EngineError, match="the file's inputs are images float32"):
        OnnxEngine(bundle.read("stem"), "block 2", signature, provider=CPU, threads=1)


def test_weights_in_another_file_are_never_read(bundle, tmp_path, monkeypatch):
    """Only the checked bytes count, not files that they refer to, even if these exist."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    monkeypatch.chdir(tmp_path)
    for place in ("weights.bin", str(tmp_path / "weights.bin")):
        model = onnx.load_model_from_string(bundle.read("block 2"))
        tensor = next(t for t in model.graph.initializer if len(t.dims) == 2)
        (tmp_path / "weights.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=place)
        with pytest.raises(EngineError, match=r"^block 2 does not load: its weights are in another file"):
            OnnxEngine(
                model.SerializeToString(), "block 2", signature_of(bundle.manifest, "block 2"), provider=CPU, threads=1
            )


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this build has CUDA")
def test_a_provider_that_is_not_there_is_an_error_and_auto_is_cpu(bundle):
    for asked, name in (("cuda", "CUDAExecutionProvider"), ("CUDAExecutionProvider", "CUDAExecutionProvider"),
                        ("tensorrt", "TensorrtExecutionProvider"), ("Sausage", "Sausage")):  # fmt: skip
        with pytest.raises(EngineError, match=f"^{name} is not in this build"):
            open_engine(bundle, "head", provider=asked)
    for asked in (None, "auto", "cpu", CPU):
        assert open_engine(bundle, "head", provider=asked, threads=1).provider == CPU


@pytest.mark.skipif("CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs CUDA")
def test_cuda_gives_the_same_numbers(bundle):
    given = tokens()
    engine = open_engine(bundle, "block 3", provider="cuda")
    assert engine.provider == "CUDAExecutionProvider"
    for _ in range(2):
        expected = plain(bundle, "block 3", {"tokens": given})
        np.testing.assert_allclose(engine.run({"tokens": given}), expected, rtol=0, atol=1e-2)
        given = tokens(seed=3)


def test_engines_and_threads_that_do_not_exist(bundle):
    with pytest.raises(EngineError, match="tensorrt"):
        open_engine(bundle, "head", kind="tensorrt")
    with pytest.raises(EngineError, match="tensorrt"):
        open_block_engines(bundle, [0], kind="tensorrt")
    with pytest.raises(UsageError, match="'paper' is not known"):
        open_engine(bundle, "head", kind="paper")
    with pytest.raises(UsageError, match="0 threads are too few"):
        open_engine(bundle, "head", threads=0)
    assert usable_threads(None) >= 1
