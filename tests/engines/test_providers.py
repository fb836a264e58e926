"""ONNX Runtime's providers: the options that keep float32 exact, where memory is, and why one was passed over.

The CUDA provider is a double (``tests/doubles/onnxruntime_cuda.py``), the engine code is the real one.
"""

import importlib
import importlib.metadata
import inspect
import json
import logging
import os
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.engines.engine import signature_of
from ls_edge.engines.executor import Executor
from ls_edge.engines.onnxruntime import open_session
from ls_edge.engines.opening import announce, choose, open_block_engines, open_engine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CPU, CUDA, TENSORRT, memory_of, providers_of, why_not
from ls_edge.engines.tensorrt.build import EngineOptions

DOUBLES = Path(__file__).parents[1] / "doubles"
ORDER = (0, 1, 2, 3, 4, 5)


@pytest.fixture
def ort(any_gpu, monkeypatch):
    """onnxruntime-gpu, as far as the engine code can tell."""
    made = importlib.import_module("onnxruntime_cuda").OnnxRuntimeWithCuda()
    for module in ("onnxruntime", "opening"):
        monkeypatch.setattr(f"ls_edge.engines.{module}.onnxruntime_module", lambda: made)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    return made


def tokens(batch=1, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, 16, 32), dtype=np.float32)


def close(ours, theirs):
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_no_provider_rounds_float32(precision):
    options = EngineOptions(precision)
    assert dict(providers_of(CUDA, options=options))[CUDA]["use_tf32"] == "0"
    behind = providers_of(TENSORRT, options=options)
    assert [name for name, _ in behind] == [TENSORRT, CUDA, CPU]  # nodes that TensorRT rejects run on CUDA
    assert dict(behind)[CUDA]["use_tf32"] == "0"
    assert dict(behind)[CUDA]["arena_extend_strategy"] == "kSameAsRequested"  # each session's arena, on shared memory
    assert dict(behind)[TENSORRT]["trt_fp16_enable"] == str(precision == "fp16")
    assert dict(behind)[TENSORRT]["trt_int8_enable"] == str(precision == "int8")
    openvino = dict(providers_of("OpenVINOExecutionProvider", options=options))["OpenVINOExecutionProvider"]
    assert openvino == ({"precision": "FP32"} if precision == "fp32" else {})


def test_onnx_runtimes_tensorrt_has_an_engine_cache_and_a_batch_profile(bundle, monkeypatch, tmp_path):
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


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_the_sessions_of_a_peer_divide_its_gpu_memory(bundle, ort, tmp_path, monkeypatch, provider):
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path))
    for limit, share in ((3 << 20, str(1 << 20)), (None, None)):
        ort.opened.clear()
        for engine in open_block_engines(bundle, (0, 1, 2), provider=provider, gpu_mem_limit=limit).values():
            engine.close()
        assert {dict(options)[CUDA].get("gpu_mem_limit") for options in ort.opened} == {share}
        workspaces = {dict(options).get(TENSORRT, {}).get("trt_max_workspace_size") for options in ort.opened}
        assert workspaces == ({share} if provider == "tensorrt" else {None})


def test_the_recorded_options_are_those_of_the_installed_wheel(doubles):
    """Only where onnxruntime-gpu is installed; elsewhere the record of its messages counts."""
    recorded = json.loads((DOUBLES / "provider_options.json").read_text())["options"]
    try:
        files = importlib.metadata.distribution("onnxruntime-gpu").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("onnxruntime-gpu is not installed")
    binary = next(file for file in files if "onnxruntime_pybind11_state" in file.name).locate().read_bytes()
    found = importlib.import_module("read_provider_options").options_in(binary)
    used = dict(providers_of(TENSORRT, onnx_sha256="0", options=EngineOptions(gpu_mem_limit=1 << 20)))[TENSORRT]
    assert b'CUDA execution provider option "gpu_mem_limit"' in binary
    library = next(file for file in files if file.name == "libonnxruntime_providers_cuda.so").locate().read_bytes()
    cuda = dict(providers_of(CUDA, stream=1, options=EngineOptions(gpu_mem_limit=1 << 20)))[CUDA]
    words = (*cuda, cuda["arena_extend_strategy"], cuda["cudnn_conv_algo_search"])
    assert [word for word in words if word.encode() not in library] == []
    assert {key: found[key] for key in used} == {key: recorded[key] for key in used}


def test_memory_is_named_as_onnx_runtime_names_it():
    assert {name: memory_of(name) for name in (CPU, CUDA, TENSORRT)} == {CPU: "cpu", CUDA: "cuda", TENSORRT: "cuda"}
    assert memory_of("DmlExecutionProvider") == "dml"
    for name in ("OpenVINOExecutionProvider", "CoreMLExecutionProvider", "QNNExecutionProvider"):
        assert memory_of(name) == "cpu"  # they take and give memory of the host


def test_one_visit_on_cuda_makes_two_copies_and_one_synchronisation(bundle, ort, any_gpu):
    engines = open_block_engines(bundle, ORDER, kind="onnx", provider="cuda", threads=1)
    runner = Executor(engines)
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        for batch in (1, 3, 11, 1):
            order, theirs = (3, 0, 5, 1, 2, 4, 0, 3), tokens(batch)
            before = Counter(any_gpu.counts)
            ours = runner.run(order, tokens(batch))
            counts = any_gpu.counts - before
            for block in order:
                theirs = exact.block(block, theirs)
            close(ours, theirs)
            turns = -(-batch // 8)
            names = ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "synchronize")
            assert [counts[name] for name in names] == [turns * any_gpu.copies] * 2 + [turns]
        assert len({options[0][1]["user_compute_stream"] for options in ort.opened if options[0][0] == CUDA}) == 1
        assert ort.preloaded == 1
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    runner.close()


def test_a_pipeline_on_cuda_is_the_pipeline_on_the_cpu(ort, any_gpu, slot_bundle):
    bundle = Bundle.open(slot_bundle)
    images = np.random.default_rng(3).standard_normal((2, 3, 16, 16), dtype=np.float32)
    with (
        Pipeline.open(bundle, threads=1, provider="cpu") as exact,
        Pipeline.open(bundle, threads=1, provider="cuda") as pipeline,
    ):
        for order in (ORDER, (4, 1)):
            close(pipeline.forward(images, order), exact.forward(images, order))
        close(pipeline.profile(images)[0], exact.forward(images))


def test_with_tf32_the_double_rounds(bundle, ort, monkeypatch):
    monkeypatch.setattr(
        "ls_edge.engines.onnxruntime.providers_of",
        lambda provider, stream=None, **_: [(CUDA, {"user_compute_stream": str(stream)}), (CPU, {})]
        if provider == CUDA else [(CPU, {})],
    )  # fmt: skip
    engine = open_engine(bundle, "block 0", provider="cuda", threads=1)
    rounded = engine.run({"tokens": tokens()})
    engine.close()
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        theirs = exact.block(0, tokens())
    assert np.abs(rounded - theirs).max() > 1e-5 * np.abs(theirs).max()


def test_auto_takes_cuda_and_says_what_it_passed_over(bundle, ort, caplog):
    choice = choose(bundle, "onnx")
    assert (choice.kind, choice.provider, choice.passed_over) == ("onnx", CUDA, ())
    ort.broken = (CUDA,)
    choice = choose(bundle, "onnx")
    assert (choice.kind, choice.provider) == ("onnx", CPU)
    assert choice.passed_over[0].startswith(f"{CUDA}: stem: {CUDA} did not load (")
    with caplog.at_level(logging.INFO, "ls_edge.engines"):
        announce(choice)
    assert caplog.records[0].passed_over == choice.passed_over[0]
    assert str(choice) == f"onnx {CPU} (not {choice.passed_over[0]})"


def test_a_session_on_cuda_says_why_it_does_not_load(bundle, ort):
    ort.broken = (CUDA,)
    with pytest.raises(EngineError, match=rf"^block 0: {CUDA} did not load \(.*\); see 'ls-edge doctor', or ask"):
        open_engine(bundle, "block 0", provider="cuda", threads=1)


def test_the_words_of_the_loader_are_the_reason(tmp_path):
    class Build:
        __file__ = str(tmp_path / "__init__.py")

    (tmp_path / "capi").mkdir()
    assert "libonnxruntime_providers_shared.so: cannot open shared object file" in why_not(Build, CUDA)
    assert why_not(Build, "CoreMLExecutionProvider") == ""


def test_without_a_cuda_runtime_onnx_runtime_copies_and_it_is_logged(bundle, ort, any_gpu, monkeypatch, caplog):
    def missing(*_, **__):
        raise EngineError("the CUDA runtime cannot be used")

    monkeypatch.setattr("ls_edge.engines.opening.CudaWorkspace.for_bundle", missing)
    monkeypatch.setattr("ls_edge.engines.onnxruntime.memory_of", lambda provider: "cpu")  # the double has no OrtValue
    with caplog.at_level(logging.WARNING, "ls_edge.engines"):
        engines = open_block_engines(bundle, (0, 1), provider="cuda", threads=1)
    assert [record.message for record in caplog.records] == ["tokens are copied for each block"]
    runner = Executor(engines)
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        close(runner.run((0, 1), tokens()), exact.block(1, exact.block(0, tokens())))
    runner.close()


def test_dynamic_int8_on_cuda_is_refused_with_the_way_out(bundle, ort, tmp_path):
    import onnx

    model = onnx.load_model_from_string(bundle.read("block 0"))
    model.graph.node.add(op_type="DynamicQuantizeLinear", input=["tokens"], output=["a", "b", "c"], name="dynamic")
    words = "computes its int8 scales for each image, .*--engine tensorrt --calibrate DATA, or ask for cpu"
    for provider in (CUDA, TENSORRT):
        with pytest.raises(EngineError, match=words):
            open_session(model.SerializeToString(), "block 0", provider=provider, threads=1)
    assert open_session(model.SerializeToString(), "block 0", provider=CPU, threads=1) is not None
    assert ort.opened[-1] == [(CPU, {})]


def test_auto_on_a_dynamic_int8_bundle_is_onnx_runtime_and_says_so(tiny_bundle):
    bundle = Bundle.open(tiny_bundle)
    manifest = msgspec.structs.replace(bundle.manifest, verified={"int8": "dynamic"})
    choice = choose(Bundle(bundle.folder, manifest))
    assert choice.kind == "onnx"
    assert any(why.startswith("tensorrt: the bundle's int8 is dynamic, export with") for why in choice.passed_over)


def test_names_that_cannot_be(bundle):
    with pytest.raises(UsageError, match="engine 'paper' is not known; use auto, onnx or tensorrt"):
        choose(bundle, "paper")
    with pytest.raises(UsageError, match=r"engine tensorrt has no providers.*leave out 'cuda'"):
        choose(bundle, "tensorrt", "cuda")
    assert choose(bundle, "auto", "cuda").provider == CUDA


def test_the_double_has_the_signatures_of_onnx_runtime(gpu):
    double = importlib.import_module("onnxruntime_cuda")
    for name in ("bind_input", "bind_output"):
        ours, theirs = (inspect.signature(getattr(c, name)) for c in (double.Binding, onnxruntime.IOBinding))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]
    ours = inspect.signature(double.Session.run_with_iobinding)
    assert list(ours.parameters) == list(inspect.signature(onnxruntime.InferenceSession.run_with_iobinding).parameters)
