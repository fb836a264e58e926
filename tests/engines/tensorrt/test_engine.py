"""Engines of TensorRT on doubles of CUDA and TensorRT: results, graphs, contexts and profiles."""

import functools
import logging
import sys
from dataclasses import replace

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.engine import signature_of
from ls_edge.engines.opening import build_engines, open_engine
from ls_edge.engines.tensorrt.build import EngineOptions
from ls_edge.engines.tensorrt.engine import open_tensorrt
from ls_edge.export.file_checks import compare_engines
from tests.engines.reference import close, counted, expected, tokens


@pytest.mark.parametrize("batch", [1, 2, 8, 11])
def test_any_batch_and_order_computes_the_same_as_onnxruntime(runner, exact, any_gpu, batch):
    for seed in range(4):  # plain, captured, launched, and launched on other tokens
        order = np.random.default_rng(seed).permutation(6)[: seed + 2]
        close(runner.run(order, tokens(batch, seed)), expected(exact, order, tokens(batch, seed)))


def test_graphs_are_used_only_for_one_image_and_the_largest_batch(runner, any_gpu):
    for batch, graphs in ((1, 2), (8, 2), (3, 0)):
        for _ in range(2):
            runner.run((0, 1), tokens(batch))
        _, counts = counted(any_gpu, lambda batch=batch: runner.run((0, 1), tokens(batch)))
        assert (counts["graph"], counts["execute"]) == (graphs, 2 - graphs)


@pytest.mark.parametrize("function", ["cudaStreamBeginCapture", "cudaGraphInstantiateWithFlags"])
def test_without_graphs_an_engine_runs_and_logs_the_reason(bundle, gpu, exact, function, caplog):
    gpu.refuse[function] = (sys.modules["cudart"].CAPTURING, "not here")
    with caplog.at_level(logging.WARNING, "ls_edge.engines"):
        engine = open_engine(bundle, "block 0", kind="tensorrt")
        for _ in range(3):
            close(engine.run({"tokens": tokens()}), expected(exact, [0], tokens()))
    assert "not here" in engine.no_graphs
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["runs without CUDA graphs"]
    engine.close()


def test_a_graph_with_different_results_is_not_used(bundle, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "launch", lambda *_: None)  # reports success and does nothing
    with pytest.raises(EngineError, match=r"^block 0 computes wrong values"):
        open_engine(bundle, "block 0", kind="tensorrt")


def test_float32_is_exact_because_tf32_is_off(runner, exact, bundle, gpu, doubles, tmp_path, monkeypatch):
    """With TF32 the double rounds as the hardware does, so these tests would fail."""
    monkeypatch.setattr(doubles.IBuilderConfig, "clear_flag", lambda *_: None)
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path))
    engine = open_engine(bundle, "block 0", kind="tensorrt")
    rounded = engine.run({"tokens": tokens()})
    engine.close()
    theirs = expected(exact, [0], tokens())
    assert np.abs(rounded - theirs).max() > 1e-5 * np.abs(theirs).max()
    close(runner.run([0], tokens()), theirs)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_float32_inside_files_of_every_precision_is_exact(bundle, gpu, exact, precision):
    """Float16 and int8 files keep norms, softmax and sums in float32."""
    options, signature = EngineOptions(), signature_of(bundle.manifest, "block 0")
    workspace = CudaWorkspace.for_bundle(bundle, options.max_batch)
    engine = open_tensorrt(bundle, "block 0", signature, options, workspace)
    close(engine.run({"tokens": tokens()}), expected(exact, [0], tokens()))
    engine.close()


@pytest.mark.parametrize(
    "why",
    [
        "Error Code 1: Serialization (header.magicTag == kEXPECTED_MAGIC_TAG failed",
        "Error Code 6: API Usage Error (The engine plan file is not compatible with this version of TensorRT, "
        "expecting library version 10.12.0.36 got 10.3.0.30, please rebuild.)",
        "(The engine plan file is generated on an incompatible device, expecting compute 8.9 got compute 8.6, please "
        "rebuild.)",
        "Serialization assertion e.offset >= cursor failed",
    ],
)
def test_an_engine_of_another_version_is_built_again(bundle, gpu, doubles, monkeypatch, why):
    open_engine(bundle, "block 0", kind="tensorrt").close()
    monkeypatch.setattr(doubles, "_fail", functools.partial(lambda fail, _why: fail(why), doubles._fail))
    monkeypatch.setattr(doubles, "_MAGIC", b"another version\n")
    reported = []
    open_engine(bundle, "block 0", kind="tensorrt", on_step=lambda *step: reported.append(step[-1])).close()
    assert any("does not load in" in text for text in reported)


def test_an_engine_with_other_tensors_than_the_manifest_is_refused(bundle, gpu):
    options, signature = EngineOptions(), signature_of(bundle.manifest, "block 0")
    workspace = CudaWorkspace.for_bundle(bundle, options.max_batch)
    other = replace(signature, output=replace(signature.output, dtype="float16"))
    words = r"^block 0: the engine has tokens float32 .*; tokens_out float32 .*, the manifest .*tokens_out float16"
    with pytest.raises(EngineError, match=words):
        open_tensorrt(bundle, "block 0", other, options, workspace)
    workspace.hold()
    workspace.release()


def test_contexts_are_created_when_they_are_needed(runner, any_gpu):
    """Each takes memory, which a board shares between CPU and GPU; opening runs one image."""

    def contexts():
        return [len(engine._contexts) for engine in runner.engines.values()]

    assert contexts() == [1] * 6
    for _ in range(3):
        runner.run((0, 1), tokens(1))
    assert contexts() == [1, 2, 1, 1, 1, 1]  # a graph for each buffer that it reads
    runner.run((0, 1), tokens(3))
    runner.run((0, 1), tokens(4))
    assert contexts() == [2, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("graphs", [True, False])
def test_single_images_and_batches_run_in_the_profile_that_is_tuned_for_them(bundle, any_gpu, graphs):
    engine = open_engine(bundle, "block 0", kind="tensorrt", max_batch=16)
    engine.no_graphs = "" if graphs else "not here"
    engine.drop_contexts()
    opened = engine._engine._contexts
    assert [p["tokens"][1][0] for p in engine._engine._header["profiles"]] == [1, 16]
    for batch, profile in ((1, 0), (2, 1), (9, 1), (16, 1), (1, 0)):
        engine.run({"tokens": tokens(batch)})
        assert any_gpu.profile == profile, batch
    assert engine._engine._contexts - opened == (3 if graphs else 2)
    engine.close()


class Wrong:
    """A session of the double whose results are wrong: always, only for batches, or only in a slot."""

    def __init__(self, session, least, slot=None):
        self._session, self._least, self._slot = session, least, slot

    def __getattr__(self, name):
        return getattr(self._session, name)

    def run(self, names, given):
        outputs = self._session.run(names, given)
        if self._slot is not None:
            wrong = np.where(given["slot"] == self._slot, -1, 1)[:, None, None]
            return [output * wrong.astype(output.dtype) for output in outputs]
        return [-output if len(output) >= self._least else output for output in outputs]


@pytest.mark.parametrize("least", [1, 2])
def test_an_engine_that_computes_wrong_values_is_not_used(bundle, gpu, doubles, monkeypatch, caplog, least):
    right = doubles._session
    monkeypatch.setattr(doubles, "_session", lambda raw: Wrong(right(raw), least))
    with pytest.raises(EngineError, match=rf"^block 0 computes wrong values on .* in a batch of {least}, at most"):
        open_engine(bundle, "block 0", kind="tensorrt")
    for compared in (lambda: list(build_engines(bundle, ["stem", "block 0"], kind="tensorrt")),
                     lambda: compare_engines(bundle, "tensorrt")):  # fmt: skip
        with pytest.raises(EngineError, match="computes wrong values"):
            compared()
    engine = open_engine(bundle, "block 0")
    assert engine.provider == "CPUExecutionProvider"
    assert [record.why for record in caplog.records if record.message == "engine does not open"]
    engine.close()


@pytest.mark.parametrize("slot", [0, 3])
def test_a_shared_block_is_compared_in_each_slot(shared_bundle, gpu, doubles, monkeypatch, slot):
    right = doubles._session
    monkeypatch.setattr(doubles, "_session", lambda raw: Wrong(right(raw), 1, slot))
    with pytest.raises(EngineError, match=rf"^block {slot} computes wrong values"):
        open_engine(Bundle.open(shared_bundle), "block 0", kind="tensorrt")


def test_right_engines_are_compared_again_by_verify(bundle, gpu):
    assert compare_engines(bundle, "tensorrt") == "tensorrt TensorRT 10.3.0 on Double of a GPU"
    assert compare_engines(bundle, "onnx").startswith("onnx CPUExecutionProvider")


def test_an_engine_is_checked_once(bundle, gpu):
    runs = []
    for _ in range(3):
        before = gpu.counts["execute"] + gpu.counts["graph"]
        open_engine(bundle, "block 0", kind="tensorrt").close()
        runs.append(gpu.counts["execute"] + gpu.counts["graph"] - before)
    assert runs[0] > runs[1] == runs[2]
