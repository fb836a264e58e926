"""Memory that engines share on a GPU: copies, synchronization, slots, and errors, on doubles of CUDA and TensorRT."""

import os
import sys
from collections import Counter

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DeviceLost, EngineError
from ls_edge.device import hardware
from ls_edge.engines.executor import Executor, PartFailed
from ls_edge.engines.opening import open_block_engines, open_engine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CUDA
from tests.engines.reference import ORDER, close, counted, expected, tokens

COPIES = ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost")


def test_one_visit_of_eight_blocks_makes_two_copies_and_one_synchronization(runner, exact, any_gpu):
    runner.warm_up(1)
    order = (3, 0, 5, 1, 2, 4, 0, 3)
    result, counts = counted(any_gpu, lambda: runner.run(order, tokens()))
    close(result, expected(exact, order, tokens()))
    assert [counts[name] for name in (*COPIES, "synchronize")] == [1, 1, 1]
    assert counts["graph"] == 8  # and no kernel is launched separately
    assert counts["execute"] == 0


def test_each_block_gets_its_slot(any_gpu, slot_bundle):
    bundle = Bundle.open(slot_bundle)
    images = np.random.default_rng(3).standard_normal((2, 3, 16, 16), dtype=np.float32)
    order = (4, 1, 0, 5, 3, 2)
    with (
        Pipeline.open(bundle, threads=1, provider="cpu") as exact,
        Pipeline.open(bundle, kind="tensorrt") as pipeline,
    ):
        for _ in range(3):
            close(pipeline.forward(images, order), exact.forward(images, order))
        engines = open_block_engines(bundle, ORDER, kind="tensorrt")
        runner = Executor(engines)
        runner.warm_up(2)
        slots = np.array([0, 2], np.int64)
        theirs = tokens(2)
        for index, block in enumerate((3, 1)):
            theirs = exact.block(block, theirs, slots + index)
        close(runner.run((3, 1), tokens(2), slots), theirs)
        for engine in engines.values():
            engine.close()


def test_a_failing_engine_is_named_and_the_memory_can_be_used_again(runner, any_gpu, exact):
    runner.engines[2].close()
    with pytest.raises(PartFailed, match="the engine of block 2 was closed") as caught:
        runner.run((0, 2, 1), tokens(3))
    assert caught.value.part == 2
    close(runner.run((0, 1), tokens(3)), expected(exact, (0, 1), tokens(3)))


@pytest.mark.parametrize(
    ("release", "advice"), [(None, "see 'ls-edge doctor'"), ("36.4.7", r"free memory for the GPU \(swap does not help")]
)
def test_too_little_memory_is_one_line_and_nothing_is_left(bundle, gpu, monkeypatch, release, advice):
    monkeypatch.setattr("ls_edge.engines.cuda.runtime.jetson_linux", lambda: release)
    gpu.memory = 40_000
    with pytest.raises(EngineError, match=rf"CUDA failed while making .*out of memory; {advice}"):
        open_block_engines(bundle, ORDER, kind="tensorrt")
    gpu.memory = 1 << 30
    assert gpu.left() == []


def test_files_in_the_page_cache_are_no_memory_of_engines_on_an_integrated_gpu(bundle, gpu, monkeypatch):
    gpu.integrated = 1
    available = [4.0]
    monkeypatch.setattr(hardware, "memory_gib", lambda: (8.0, available[0]))
    runner = Executor(open_block_engines(bundle, ORDER, kind="tensorrt"))
    gpu.page_cache = 100 << 20  # reading the bundle fills it
    assert runner.workspace.taken_bytes() == 0
    available[0] = 3.5
    assert runner.workspace.taken_bytes() == 1 << 29
    runner.close()


def test_an_illegal_access_is_an_error_and_everything_can_be_closed(bundle, gpu):
    engine = open_engine(bundle, "block 0", kind="tensorrt")
    engine.run({"tokens": tokens()})
    for allocation in gpu.allocations:
        if allocation.kind == "device":
            gpu.free("device", allocation.address)
    for _ in range(2):  # CUDA answers with it from then on
        with pytest.raises(DeviceLost, match=r"was freed \(error 700\); this process cannot use the GPU any more"):
            engine.run({"tokens": tokens()})
    engine.close()
    gpu.reset()


@pytest.mark.parametrize("code", [700, 719, 999])
def test_an_error_that_stays_is_not_taken_for_that_of_a_block(bundle, gpu, doubles, monkeypatch, code):
    """TensorRT only says that a run failed; CUDA's next answer tells whether the process can continue."""
    runner = Executor(open_block_engines(bundle, (0, 1), kind="tensorrt"))
    runner.run((0, 1), tokens(3))

    def fail(*_):
        gpu.sticky = sys.modules["cudart"].Fault(code, "unspecified launch failure")
        return False

    monkeypatch.setattr(doubles.IExecutionContext, "execute_async_v3", fail)
    with pytest.raises(DeviceLost, match=rf"running block 0 to block 1: unspecified launch failure \(error {code}\)"):
        runner.run((0, 1), tokens(3))
    runner.close()
    gpu.reset()


def test_one_visit_on_cuda_makes_two_copies_and_one_synchronization(bundle, ort, any_gpu):
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
            assert [counts[name] for name in names] == [turns] * 3
        assert len({options[0][1]["user_compute_stream"] for options in ort.opened if options[0][0] == CUDA}) == 1
        assert ort.preloaded == 1
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    runner.close()


def test_a_pipeline_on_cuda_computes_the_same_as_on_the_cpu(ort, any_gpu, slot_bundle):
    bundle = Bundle.open(slot_bundle)
    images = np.random.default_rng(3).standard_normal((2, 3, 16, 16), dtype=np.float32)
    with (
        Pipeline.open(bundle, threads=1, provider="cpu") as exact,
        Pipeline.open(bundle, threads=1, provider="cuda") as pipeline,
    ):
        for order in (ORDER, (4, 1)):
            close(pipeline.forward(images, order), exact.forward(images, order))
        close(pipeline.profile(images)[0], exact.forward(images))
