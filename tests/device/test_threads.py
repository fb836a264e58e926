"""A worker runs its jobs in order and wakes the thread that collects the results."""

import threading

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from ls_edge.device.threads import Worker


def test_results_come_back_in_order_and_wake(wait_until):
    woken = threading.Event()
    worker = Worker("test", woken.set)
    try:
        for number in range(5):
            worker.submit(lambda n=number: n * n)
        collected = []
        wait_until(lambda: collected.extend(worker.results()) or len(collected) == 5, what="five results")
        assert collected == [0, 1, 4, 9, 16]
        assert woken.is_set()
        assert worker.results() == []
    finally:
        assert worker.close()


def test_close_does_not_wait_for_a_hanging_job():
    worker = Worker("test", lambda: None)
    running, go = threading.Event(), threading.Event()
    worker.submit(lambda: running.set() or go.wait())
    assert running.wait(10)
    worker.submit(lambda: pytest.fail("queued behind the end"))
    assert not worker.close(0.05)
    go.set()
    assert worker.close(10)


def large_session():
    """A real engine that computes for a while on one thread."""
    side, times = 512, 25
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array((rng.standard_normal((side, side)) / side).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", [f"x{i}", "w"], [f"x{i + 1}"]) for i in range(times)]
    shape = [side, side]
    graph = helper.make_graph(
        nodes, "products", [helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(f"x{times}", onnx.TensorProto.FLOAT, shape)], [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x0": np.eye(side, dtype=np.float32)})


def test_a_real_engine_lets_other_threads_run_while_it_computes():
    engine = large_session()
    running, done = threading.Event(), threading.Event()
    worker = Worker("test", lambda: None)
    try:
        worker.submit(lambda: (running.set(), engine(), done.set()))
        assert running.wait(10)
        turns = 0
        while not done.wait(0.001):
            turns += 1
        # If the engine held the interpreter, there would be one turn at the end.
        assert turns > 10
    finally:
        assert worker.close(10)
