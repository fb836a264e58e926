"""The choice of the engine library, and the opening of parts: a named engine is used or raises."""

import logging
import shutil
import sys

import msgspec
import numpy as np
import onnxruntime
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, DigestMismatch, EngineError, UsageError
from ls_edge.device import hardware
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import (
    announce,
    build_engines,
    choose,
    open_block_engines,
    open_engine,
    open_parts,
    usable_threads,
)
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CPU, CUDA, OPENVINO
from tests.engines.reference import ORDER, close, plain, tokens


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


@pytest.mark.parametrize(
    ("room", "advice"),
    [(5, "hold blocks 3-5 elsewhere, or"), (2, "hold blocks 0-5 elsewhere, or"), (1, "end other programs")],
)
def test_parts_that_the_free_memory_does_not_hold_are_named_before_they_are_opened(bundle, monkeypatch, room, advice):
    """A part takes its size twice while it is loaded: the stem, which is smaller here, and the first blocks fit."""
    names = ["stem", *(f"block {index}" for index in range(bundle.num_blocks))]
    free = (bundle.part("stem").bytes if room > 1 else 0) + (room - 1) * bundle.part("block 0").bytes + 1000
    monkeypatch.setattr(hardware, "memory_gib", lambda: (1.0, free / 2**30))
    with pytest.raises(EngineError, match=rf"^7 parts of .* need \d+ MiB of memory, and \d+ MiB are free; {advice}"):
        open_parts(bundle, names, provider="cpu", threads=1)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this build has CUDA")
def test_a_missing_provider_is_refused_and_auto_is_the_cpu(bundle):
    for asked, name in (("cuda", "CUDAExecutionProvider"), ("CUDAExecutionProvider", "CUDAExecutionProvider"),
                        ("Sausage", "Sausage")):  # fmt: skip
        with pytest.raises(EngineError, match=f"^{name} is not in this build"):
            open_engine(bundle, "head", provider=asked)
    for asked in (None, "auto", "cpu", CPU):
        assert open_engine(bundle, "head", provider=asked, threads=1).provider == CPU


def test_unknown_engines_and_too_few_threads_are_refused(bundle):
    for opened in (
        lambda: open_engine(bundle, "head", kind="tensorrt"),
        lambda: open_block_engines(bundle, [0], kind="tensorrt"),
    ):
        with pytest.raises(EngineError, match=r"tensorrt is not installed|CUDA runtime cannot be used"):
            opened()
    with pytest.raises(UsageError, match="'paper' is not known"):
        open_engine(bundle, "head", kind="paper")
    with pytest.raises(UsageError, match="0 threads are too few"):
        open_engine(bundle, "head", threads=0)
    assert usable_threads(None) >= 1


@pytest.mark.parametrize(
    ("kind", "provider", "why"),
    [
        ("paper", None, "engine 'paper' is not known; use auto, onnx or tensorrt"),
        ("tensorrt", "cuda", "provider 'cuda': only ONNX Runtime has providers"),
        ("auto", "tensorrt", "provider 'tensorrt' is not supported; use 'engine: tensorrt'"),
        ("onnx", "cuda:1", "provider 'cuda:1': only OpenVINOExecutionProvider takes a device"),
    ],
)
def test_contradicting_kinds_and_providers_are_refused(bundle, kind, provider, why):
    with pytest.raises(UsageError, match=why):
        choose(bundle, kind, provider)
    assert [choose(bundle, "auto", name).provider for name in ("cuda", f"{OPENVINO}:GPU")] == [CUDA, f"{OPENVINO}:GPU"]


def test_auto_chooses_cuda_and_reports_why_it_was_rejected(bundle, ort, caplog):
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


@pytest.mark.parametrize("nvidia", [True, False])
def test_auto_chooses_onnxruntime_for_a_dynamic_int8_bundle(tiny_bundle, monkeypatch, caplog, nvidia):
    opened = Bundle.open(tiny_bundle)
    bundle = Bundle(opened.folder, msgspec.structs.replace(opened.manifest, verified={"int8": "dynamic"}))
    choice = choose(bundle)
    assert choice.kind == "onnx"
    assert any(why.startswith("tensorrt: the bundle's int8 is dynamic, export it with") for why in choice.passed_over)
    monkeypatch.setattr(hardware, "has_nvidia", lambda: nvidia)
    assert not list(build_engines(bundle, ["block 0"]))
    assert [record.message for record in caplog.records] == ["no engines are built"] * nvidia  # why a GPU has none


def test_the_sessions_of_a_peer_divide_its_gpu_memory(bundle, ort):
    for limit, share in ((3 << 20, str(1 << 20)), (None, None)):
        ort.opened.clear()
        for engine in open_block_engines(bundle, (0, 1, 2), provider="cuda", gpu_mem_limit=limit).values():
            engine.close()
        assert {dict(options)[CUDA].get("gpu_mem_limit") for options in ort.opened} == {share}


def test_without_a_cuda_runtime_tokens_are_copied_and_a_warning_is_logged(bundle, ort, any_gpu, caplog):
    any_gpu.runtime = 12080  # newer than the driver supports
    with caplog.at_level(logging.WARNING, "ls_edge.engines"):
        engines = open_block_engines(bundle, (0, 1), provider="cuda", threads=1)
    assert [record.message for record in caplog.records] == ["tokens are copied for each block"]
    runner = Executor(engines)
    with Pipeline.open(bundle, provider="cpu", threads=1) as exact:
        close(runner.run((0, 1), tokens()), exact.block(1, exact.block(0, tokens())))
    runner.close()


def test_opening_reports_its_steps(tiny_bundle):
    reported = []
    open_block_engines(Bundle.open(tiny_bundle), [3, 1], threads=1, on_step=lambda *step: reported.append(step))
    assert reported == [(0, 2, "block 3"), (1, 2, "block 1"), (2, 2, "ready")]


def test_auto_chooses_tensorrt_or_reports_why_not(bundle, gpu, doubles):
    assert choose(bundle).kind == "tensorrt"
    gpu.refuse["cudaGetDevice"] = (1, "no driver")
    choice = choose(bundle)
    assert (choice.kind, choice.provider) == ("onnx", "CPUExecutionProvider")
    assert "tensorrt: CUDA failed while looking for a GPU: no driver" in choice.passed_over


def test_an_engine_that_cannot_be_built_is_replaced_unless_it_was_named(bundle, gpu, doubles, monkeypatch):
    monkeypatch.setattr(doubles.Builder, "refuse", "no tactic fits the workspace")
    chosen = []
    engines = open_block_engines(bundle, ORDER, threads=1, on_choice=chosen.append)
    assert [choice.kind for choice in chosen] == ["tensorrt", "onnx"]
    assert "tensorrt: block 0: TensorRT 10.3.0 could not build an engine" in str(chosen[-1])
    assert {engine.kind for engine in engines.values()} == {"onnx"}
    for engine in engines.values():
        engine.close()
    with Pipeline.open(bundle, threads=1) as pipeline:
        assert pipeline.choice.kind == "onnx"
        assert "tensorrt: stem: TensorRT 10.3.0 could not build an engine" in str(pipeline.choice)
    with pytest.raises(EngineError, match="no tactic fits the workspace"):
        open_block_engines(bundle, ORDER, kind="tensorrt")


@pytest.mark.parametrize("fault", ["contexts", "buffers"])
def test_memory_that_runs_out_in_the_first_run_is_found_while_there_are_other_choices(
    bundle, gpu, doubles, monkeypatch, fault
):
    """Contexts, graphs and buffers are made by the first run."""
    if fault == "contexts":
        monkeypatch.setattr(doubles.ICudaEngine, "context_bytes", gpu.memory)
    else:
        gpu.refuse["cudaHostAlloc"] = (2, "out of memory")
    chosen = []
    engines = open_block_engines(bundle, ORDER, threads=1, on_choice=chosen.append)
    assert [choice.kind for choice in chosen] == ["tensorrt", "onnx"]
    assert {engine.kind for engine in engines.values()} == {"onnx"}
    assert "ut of memory" in str(chosen[-1]) or "OutOfMemory" in str(chosen[-1])
    for engine in engines.values():
        engine.close()
    with pytest.raises(EngineError, match=r"OutOfMemory|out of memory"):
        open_block_engines(bundle, ORDER, kind="tensorrt")
    assert gpu.left() == []


def test_engines_that_do_not_open_leave_nothing(bundle, gpu, tmp_path):
    shutil.copytree(bundle.folder, tmp_path / "bundle")
    (tmp_path / "bundle/blocks/03.onnx").write_bytes(b"other")
    damaged = Bundle.open(tmp_path / "bundle")
    with pytest.raises(DigestMismatch, match="block 3"):
        open_block_engines(damaged, ORDER, kind="tensorrt")
    with pytest.raises(DigestMismatch, match="block 3"):
        Pipeline.open(damaged, kind="tensorrt")
    assert gpu.left() == []


def test_without_onnxruntime_the_error_has_the_reason_against_tensorrt(bundle, gpu, monkeypatch):
    gpu.runtime = 12080  # newer than the driver supports
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        EngineError, match=r"^tensorrt: the CUDA runtime cannot be used: .*error 35.*; onnxruntime does not load"
    ):
        choose(bundle)
