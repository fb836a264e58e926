"""Engines of ONNX Runtime: exact results, and one clear line for a file or a provider that does not load."""

import sys
from types import ModuleType

import numpy as np
import onnx
import pytest

from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import signature_of, warm_up
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module, open_session
from ls_edge.engines.opening import open_engine
from ls_edge.engines.providers import CPU, CUDA
from tests.engines.reference import plain, tokens


def test_an_engine_computes_the_same_as_a_plain_session(bundle):
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


def test_invalid_files_are_named(bundle):
    signature = signature_of(bundle.manifest, "block 2")
    raw = bundle.read("block 2")
    for bad in (b"", b"not an onnx file", raw[: len(raw) // 2]):
        with pytest.raises(EngineError, match=r"^block 2 does not load") as caught:
            OnnxEngine(bad, "block 2", signature, provider=CPU, threads=1)
        assert "\n" not in str(caught.value)
    with pytest.raises(EngineError, match="the file's inputs are images float32"):
        OnnxEngine(bundle.read("stem"), "block 2", signature, provider=CPU, threads=1)


def test_a_folder_that_is_called_onnxruntime_is_not_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(EngineError, match=r"^onnxruntime does not load \(.*InferenceSession.*\); to install it: pip"):
        onnxruntime_module()


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


def test_a_session_on_cuda_that_does_not_load_gives_the_reason(bundle, ort):
    ort.broken = (CUDA,)
    with pytest.raises(EngineError, match=rf"^block 0: {CUDA} did not load \(.*\); see 'ls-edge doctor', or use cpu"):
        open_engine(bundle, "block 0", provider="cuda", threads=1)


def test_dynamic_int8_on_cuda_is_refused_with_advice(bundle, ort):

    model = onnx.load_model_from_string(bundle.read("block 0"))
    model.graph.node.add(op_type="DynamicQuantizeLinear", input=["tokens"], output=["a", "b", "c"], name="dynamic")
    words = "computes its int8 scales for each image, .*--engine tensorrt --calibrate DATA, or use cpu"
    with pytest.raises(EngineError, match=words):
        open_session(model.SerializeToString(), "block 0", provider=CUDA, threads=1)
    assert open_session(model.SerializeToString(), "block 0", provider=CPU, threads=1) is not None
    assert ort.opened[-1] == [(CPU, {})]
