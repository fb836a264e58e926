"""Engines on doubles of CUDA and TensorRT: results, copies, graphs, memory, and errors.

tests/doubles/README.md describes the doubles.
"""

import logging
import sys
from collections import Counter

import numpy as np
import onnx
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.engines.executor import Executor, PartFailed
from ls_edge.engines.opening import choose, open_block_engines, open_engine
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.tensorrt import build as tensorrt_build
from ls_edge.engines.tensorrt.build import EngineOptions
from tests.engines.reference import ORDER, close, expected, tokens

COPIES = ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost")


@pytest.fixture
def runner(bundle, any_gpu):
    engines = open_block_engines(bundle, ORDER, kind="tensorrt", max_batch=2)
    runner = Executor(engines)
    yield runner
    runner.close()


def counted(gpu, call):
    before = Counter(gpu.counts)
    result = call()
    return result, gpu.counts - before


def test_one_visit_of_eight_blocks_makes_two_copies_and_one_synchronisation(runner, exact, any_gpu):
    runner.warm_up(1)
    order = (3, 0, 5, 1, 2, 4, 0, 3)
    result, counts = counted(any_gpu, lambda: runner.run(order, tokens()))
    close(result, expected(exact, order, tokens()))
    assert [counts[name] for name in (*COPIES, "synchronize")] == [any_gpu.copies, any_gpu.copies, 1]
    assert counts["graph"] == 8  # and no kernel is launched separately
    assert counts["execute"] == 0


@pytest.mark.parametrize("batch", [1, 2, 8, 11])
def test_any_batch_and_order_is_what_onnx_runtime_gives(runner, exact, any_gpu, batch):
    for seed in range(4):  # plain, captured, launched, and launched on other tokens
        order = np.random.default_rng(seed).permutation(6)[: seed + 2]
        close(runner.run(order, tokens(batch, seed)), expected(exact, order, tokens(batch, seed)))


def test_graphs_are_used_for_one_image_and_the_largest_batch_and_others_run_without(runner, any_gpu):
    for batch, graphs in ((1, 2), (8, 2), (3, 0)):
        for _ in range(2):
            runner.run((0, 1), tokens(batch))
        _, counts = counted(any_gpu, lambda batch=batch: runner.run((0, 1), tokens(batch)))
        assert (counts["graph"], counts["execute"]) == (graphs, 2 - graphs)


@pytest.mark.parametrize("function", ["cudaStreamBeginCapture", "cudaGraphInstantiateWithFlags"])
def test_without_graphs_it_runs_all_the_same_and_says_why(bundle, gpu, exact, function, caplog):
    code = sys.modules["cudart"].cudaError_t.cudaErrorStreamCaptureUnsupported
    gpu.refuse[function] = (code, "not here")
    engine = open_engine(bundle, "block 0", kind="tensorrt")
    with caplog.at_level(logging.WARNING, "ls_edge.engines"):
        for _ in range(3):
            close(engine.run({"tokens": tokens()}), expected(exact, [0], tokens()))
    assert "not here" in engine.no_graphs
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["runs without CUDA graphs"]
    engine.close()


def test_a_graph_with_other_numbers_is_not_used(runner, any_gpu, exact):
    launch = sys.modules["cudart"].cudaGraphLaunch
    sys.modules["cudart"].cudaGraphLaunch = lambda *_: (0,)  # reports success and does nothing
    try:
        runner.warm_up(1)
    finally:
        sys.modules["cudart"].cudaGraphLaunch = launch
    assert "different values" in runner.engines[0].no_graphs
    close(runner.run(ORDER, tokens()), expected(exact, ORDER, tokens()))


def test_a_pipeline_on_the_gpu_is_the_pipeline_on_the_cpu(bundle, any_gpu, exact):
    images = np.random.default_rng(3).standard_normal((3, 3, 16, 16), dtype=np.float32)
    with Pipeline.open(bundle, kind="tensorrt", max_batch=4) as pipeline:
        for order in (ORDER, (5, 2), ()):
            logits, counts = counted(any_gpu, lambda order=order: pipeline.forward(images, order))
            close(logits, exact.forward(images, order))
            assert (counts[COPIES[0]], counts[COPIES[1]]) == (any_gpu.copies,) * 2
        close(pipeline.profile(images)[0], exact.forward(images))


def test_slots_reach_each_block(any_gpu, slot_bundle):
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


def test_float32_is_exact_because_tf32_is_off(runner, exact, bundle, gpu, monkeypatch):
    """With TF32 the double rounds as the hardware does, so these tests would fail."""
    monkeypatch.setattr(EngineOptions, "flags", ("strongly typed",))
    engine = open_engine(bundle, "block 0", kind="tensorrt")
    rounded = engine.run({"tokens": tokens()})
    engine.close()
    theirs = expected(exact, [0], tokens())
    assert np.abs(rounded - theirs).max() > 1e-5 * np.abs(theirs).max()
    close(runner.run([0], tokens()), theirs)


def test_a_failing_engine_is_named_and_the_memory_can_be_used_again(runner, any_gpu, exact, monkeypatch):
    def fails(batch, addresses):
        raise EngineError("no")

    monkeypatch.setattr(runner.engines[2], "enqueue", fails)
    with pytest.raises(PartFailed, match="no") as caught:
        runner.run((0, 2, 1), tokens(3))
    assert caught.value.part == 2
    close(runner.run((0, 1), tokens(3)), expected(exact, (0, 1), tokens(3)))


def test_no_memory_is_one_clear_line_and_nothing_is_left(bundle, gpu):
    gpu.memory = 40_000
    engines = open_block_engines(bundle, ORDER, kind="tensorrt")
    with pytest.raises(EngineError, match=r"CUDA failed while making .*out of memory; see 'ls-edge doctor'"):
        Executor(engines).run(ORDER, tokens())
    for engine in engines.values():
        engine.close()
    gpu.memory = 1 << 30
    assert gpu.left() == []


def test_an_integrated_gpu_reads_and_writes_the_memory_of_the_host_in_place(bundle, gpu, exact, monkeypatch):
    """Each batch of a call is copied once, into the memory that the first engine reads."""
    gpu.integrated = 1
    engines = open_block_engines(bundle, ORDER, kind="tensorrt")
    runner = Executor(engines)
    rows = [tokens(1, seed) for seed in range(3)]
    joins = []
    concatenate = np.concatenate

    def joined(arrays, **given):
        joins.append(given.get("out"))
        return concatenate(arrays, **given)

    with monkeypatch.context() as patched:
        patched.setattr(np, "concatenate", joined)
        ours = runner.run((0, 1), rows)
    close(ours, expected(exact, (0, 1), np.concatenate(rows)))
    pinned = [a for a in gpu.allocations if a.kind == "pinned"]
    assert [any(np.shares_memory(join, a.bytes) for a in pinned) for join in joins] == [True]
    assert all(a.mapped for a in pinned)
    assert {a.kind for a in gpu.allocations if np.shares_memory(a.bytes, pinned[0].bytes)} == {"pinned", "mapped"}
    device = [a.size for a in gpu.allocations if a.kind == "device"]
    assert device == [runner.workspace.scratch(0)[1]]  # memory for kernels, none for tokens
    with pytest.raises(PartFailed, match="tokens is float64"):
        runner.run((0, 1), [tokens(1), tokens(1).astype(np.float64)])
    runner.close()


def test_an_illegal_access_is_an_error_and_everything_can_be_closed(bundle, gpu):
    engine = open_engine(bundle, "block 0", kind="tensorrt")
    engine.run({"tokens": tokens()})
    for allocation in gpu.allocations:
        if allocation.kind == "device":
            gpu.free("device", allocation.address)
    with pytest.raises(EngineError, match="was freed; see 'ls-edge doctor'"):
        engine.run({"tokens": tokens()})
    with pytest.raises(EngineError, match="was freed"):  # CUDA answers with it from then on
        engine.run({"tokens": tokens()})
    engine.close()
    gpu.reset()


def test_engines_that_do_not_open_leave_nothing(bundle, gpu, doubles, monkeypatch):
    build = tensorrt_build.build

    def fails(raw, part, *rest):
        if part == "block 3":
            raise EngineError("block 3: no")
        return build(raw, part, *rest)

    monkeypatch.setattr(tensorrt_build, "build", fails)
    with pytest.raises(EngineError, match="block 3: no"):
        open_block_engines(bundle, ORDER, kind="tensorrt")
    with pytest.raises(EngineError, match="block 3: no"):
        Pipeline.open(bundle, kind="tensorrt")
    assert gpu.left() == []


def test_tensorrts_own_words_are_in_the_error_and_the_progress_is_reported(bundle, gpu, doubles, monkeypatch, caplog):
    monkeypatch.setattr(tensorrt_build, "PROGRESS_EVERY_S", 0.0)
    reported = []
    with caplog.at_level(logging.INFO, "ls_edge.engines"):
        open_engine(
            bundle, "block 0", kind="tensorrt", on_step=lambda _done, _total, text: reported.append(text)
        ).close()
    assert (reported.pop(0), reported.pop()) == ("block 0", "ready")
    assert reported[0] == "block 0: building an engine: there is none of this file yet"
    assert "block 0: Building Engine, step 1 of 2" in reported
    assert reported[-1].startswith("block 0: ready after ")
    assert [f"{record.part}: {record.status}" for record in caplog.records if record.message == "engine"] == reported
    monkeypatch.setattr(doubles.Builder, "refuse", "no tactic fits the workspace")
    with pytest.raises(
        EngineError, match=r"could not build an engine for Double of a GPU \(no tactic fits the workspace"
    ):
        open_engine(bundle, "block 1", kind="tensorrt")


def test_an_engine_of_another_version_is_built_again(bundle, gpu, doubles, monkeypatch):
    open_engine(bundle, "block 0", kind="tensorrt").close()
    monkeypatch.setattr(doubles, "_MAGIC", b"another version\n")
    reported = []
    open_engine(bundle, "block 0", kind="tensorrt", on_step=lambda *step: reported.append(step[-1])).close()
    assert any("does not load in" in text for text in reported)


def test_auto_takes_tensorrt_where_it_is_and_says_why_not(bundle, gpu, doubles):
    assert choose(bundle).kind == "tensorrt"
    gpu.refuse["cudaGetDevice"] = (sys.modules["cudart"].cudaError_t.cudaErrorInvalidValue, "no driver")
    choice = choose(bundle)
    assert (choice.kind, choice.provider) == ("onnx", "CPUExecutionProvider")
    assert "tensorrt: CUDA failed while looking for a GPU: no driver" in choice.passed_over


def test_an_engine_that_cannot_be_built_gives_way_to_the_next_unless_it_was_named(bundle, gpu, doubles, monkeypatch):
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


def test_contexts_are_made_when_they_are_needed(runner, any_gpu):
    """Each takes memory, which a board shares between CPU and GPU."""

    def contexts():
        return [engine._engine._contexts for engine in runner.engines.values()]

    assert contexts() == [0] * 6
    for _ in range(3):
        runner.run((0, 1), tokens(1))
    assert contexts() == [1, 1, 0, 0, 0, 0]  # those of the graphs
    runner.run((0, 1), tokens(3))
    runner.run((0, 1), tokens(4))
    assert contexts() == [2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("graphs", [True, False])
def test_single_images_and_batches_run_in_the_profile_that_is_tuned_for_them(bundle, any_gpu, graphs):
    engine = open_engine(bundle, "block 0", kind="tensorrt", max_batch=16)
    if not graphs:
        engine.drop_graphs("not here")
    assert [p["tokens"][1][0] for p in engine._engine._header["profiles"]] == [1, 16]
    for batch, profile in ((1, 0), (2, 1), (9, 1), (16, 1), (1, 0)):
        engine.run({"tokens": tokens(batch)})
        assert any_gpu.profile == profile, batch
    assert engine._engine._contexts == (3 if graphs else 2)
    engine.close()


def test_tensorrt_does_not_read_weights_from_another_file(bundle, gpu, monkeypatch):
    model = onnx.load_model_from_string(bundle.read("block 0"))
    tensor = next(tensor for tensor in model.graph.initializer if tensor.raw_data)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/hostname")
    monkeypatch.setattr(Bundle, "read", lambda self, name: model.SerializeToString())
    with pytest.raises(EngineError, match=r"^block 0 does not load: .* weights are in another file; export it again"):
        open_engine(bundle, "block 0", kind="tensorrt")


@pytest.mark.parametrize("version", ["10.0.1", "8.6.1", "12.0.0"])
def test_a_tensorrt_of_another_version_is_refused_in_one_line(bundle, gpu, doubles, monkeypatch, version):
    monkeypatch.setattr(doubles, "__version__", version)
    with pytest.raises(EngineError, match=rf"^tensorrt is version {version}, this ls-edge supports 10.3 to 11; update"):
        open_block_engines(bundle, ORDER, kind="tensorrt")


@pytest.mark.parametrize(("limit", "workspace"), [(None, 1 << 30), (1 << 33, 1 << 30), (1 << 25, 1 << 25)])
def test_kernels_of_tensorrt_get_at_most_the_limit_of_the_peer(bundle, gpu, limit, workspace):
    engine = open_engine(bundle, "block 0", kind="tensorrt", gpu_mem_limit=limit)
    assert engine._engine._header["workspace"] == workspace
    engine.close()


def test_without_onnx_runtime_the_reason_against_tensorrt_stays(bundle, gpu, monkeypatch):
    gpu.runtime = 12080  # newer than the driver supports

    def missing():
        raise EngineError("onnxruntime is not installed; pip install onnxruntime")

    monkeypatch.setattr("ls_edge.engines.opening.onnxruntime_module", missing)
    with pytest.raises(EngineError, match=r"^tensorrt: the CUDA runtime cannot be used: .*error 35.*; onnxruntime is"):
        choose(bundle)
