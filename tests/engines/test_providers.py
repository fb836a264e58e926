"""Execution providers of ONNX Runtime: options that keep float32 exact, memory, and reasons of the loader."""

import importlib
import inspect

import numpy as np
import onnxruntime
import pytest

from ls_edge.engines.opening import open_engine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CPU, CUDA, OPENVINO, memory_of, providers_of, why_not
from ls_edge.engines.tensorrt.build import EngineOptions
from tests.engines.reference import close, tokens


def test_providers_keep_the_types_of_the_file():
    limited = EngineOptions(gpu_mem_limit=9)
    assert dict(providers_of(CUDA, options=limited, stream=7))[CUDA] == {
        "use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC", "user_compute_stream": "7", "gpu_mem_limit": "9",
        "arena_extend_strategy": "kSameAsRequested",
    }  # fmt: skip
    for device in ("CPU", "GPU", "NPU", "AUTO:GPU,CPU"):
        named = f"{OPENVINO}:{device}".removesuffix(":CPU")
        options = {"device_type": device, "precision": "ACCURACY", "num_of_threads": "2"}
        assert providers_of(named, threads=2) == [(OPENVINO, options), (CPU, {})]


def test_openvino_runs_a_part(bundle):
    if OPENVINO not in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime has no OpenVINO")
    engine = open_engine(bundle, "block 0", provider=f"{OPENVINO}:CPU", threads=1)
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        close(engine.run({"tokens": tokens()}), exact.block(0, tokens()))


def test_memory_has_the_name_that_onnxruntime_uses():
    assert {name: memory_of(name) for name in (CPU, CUDA)} == {CPU: "cpu", CUDA: "cuda"}
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
