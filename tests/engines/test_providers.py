"""Execution providers of ONNX Runtime: options that keep float32 exact, memory, and reasons of the loader."""

import importlib
import inspect

import numpy as np
import onnxruntime
import pytest

from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import signature_of
from ls_edge.engines.onnxruntime import open_session
from ls_edge.engines.opening import open_block_engines, open_engine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CPU, CUDA, TENSORRT, memory_of, providers_of, why_not
from ls_edge.engines.tensorrt.build import EngineOptions
from tests.engines.reference import close, tokens


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_no_provider_rounds_float32(precision):
    options = EngineOptions(precision)
    assert dict(providers_of(CUDA, options=options))[CUDA]["use_tf32"] == "0"
    openvino = dict(providers_of("OpenVINOExecutionProvider", options=options))["OpenVINOExecutionProvider"]
    assert openvino == {"precision": "FP32" if precision == "fp32" else "ACCURACY"}


def test_nodes_that_tensorrt_rejects_run_on_cuda():
    behind = providers_of(TENSORRT)
    assert [name for name, _ in behind] == [TENSORRT, CUDA, CPU]
    assert dict(behind)[CUDA]["use_tf32"] == "0"
    assert dict(behind)[CUDA]["arena_extend_strategy"] == "kSameAsRequested"  # each session's arena, on shared memory


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_onnxruntimes_tensorrt_is_refused_where_it_would_round_norms(precision):
    """With its flag for half precision, TensorRT chooses the precision of each layer, whatever the file says."""
    with pytest.raises(EngineError, match=f"runs LayerNorm and softmax of {precision} parts in half precision"):
        providers_of(TENSORRT, options=EngineOptions(precision))


def test_onnxruntimes_tensorrt_has_an_engine_cache_and_a_batch_profile(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path))
    signature = signature_of(bundle.manifest, "block 0")
    options = dict(providers_of(TENSORRT, signature=signature, onnx_sha256="ab" * 32))[TENSORRT]
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
    assert options["trt_engine_cache_prefix"] == "ab" * 32
    folder = tmp_path / "onnxruntime-tensorrt"
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    shapes = [options[f"trt_profile_{which}_shapes"] for which in ("min", "opt", "max")]
    assert shapes == ["tokens:1x16x32", "tokens:1x16x32", "tokens:8x16x32"]
    folder.chmod(0o777)
    with pytest.raises(EngineError, match="can be written by others"):
        providers_of(TENSORRT)


def test_blocks_with_the_same_names_do_not_share_a_cached_engine(bundle, ort, tmp_path, monkeypatch):
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path))
    engines = open_block_engines(bundle, (0, 1), provider="tensorrt", threads=1)
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        for block, engine in engines.items():
            close(engine.run({"tokens": tokens()}), exact.block(block, tokens()))
    assert len(ort.engines) == 2
    open_session(bundle.read("block 2"), "block 2", provider=TENSORRT, threads=1)  # not known by a digest
    assert len(ort.engines) == 2


def test_memory_has_the_name_that_onnxruntime_uses():
    assert {name: memory_of(name) for name in (CPU, CUDA, TENSORRT)} == {CPU: "cpu", CUDA: "cuda", TENSORRT: "cuda"}
    assert memory_of("DmlExecutionProvider") == "dml"
    for name in ("OpenVINOExecutionProvider", "CoreMLExecutionProvider", "QNNExecutionProvider"):
        assert memory_of(name) == "cpu"  # they take and give memory of the host


def test_with_tf32_the_double_rounds(bundle, ort):
    """The tests of exact results have to be able to fail."""
    engine = open_engine(bundle, "block 0", provider="cuda", threads=1)
    engine.session._options.pop("use_tf32")
    rounded = engine.run({"tokens": tokens()})
    engine.close()
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        theirs = exact.block(0, tokens())
    assert np.abs(rounded - theirs).max() > 1e-5 * np.abs(theirs).max()


def test_the_reason_is_that_of_the_loader(tmp_path):
    class Build:
        __file__ = str(tmp_path / "__init__.py")

    (tmp_path / "capi").mkdir()
    assert "libonnxruntime_providers_shared.so: cannot open shared object file" in why_not(Build, CUDA)
    assert why_not(Build, "CoreMLExecutionProvider") == ""


def test_the_double_has_the_signatures_of_onnx_runtime(gpu):
    double = importlib.import_module("onnxruntime_cuda")
    for name in ("bind_input", "bind_output"):
        ours, theirs = (inspect.signature(getattr(c, name)) for c in (double.Binding, onnxruntime.IOBinding))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]
    ours = inspect.signature(double.Session.run_with_iobinding)
    assert list(ours.parameters) == list(inspect.signature(onnxruntime.InferenceSession.run_with_iobinding).parameters)
