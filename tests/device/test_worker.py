"""Threads that compute: order of jobs, and that nothing they do keeps a process from answering its neighbors."""

import threading

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import HeartbeatSettings, load_peers
from ls_edge.device.worker import Worker
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSettings
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Complaint, Hello, State
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.connections import Incoming, Link, LinkUp
from ls_edge.runtime.transport.links import Links
from tests.faults.engines import Faults, inject, write


def test_results_come_back_and_wake(wait_until):
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


def test_closing_does_not_wait_for_ever_for_a_job_that_hangs():
    worker = Worker("test", lambda: None)
    running, go = threading.Event(), threading.Event()
    worker.submit(lambda: running.set() or go.wait())
    assert running.wait(10)
    worker.submit(lambda: pytest.fail("queued behind the end"))
    assert not worker.close(0.05)
    go.set()
    assert worker.close(10)


def large_session():
    """A real engine that computes for a good while on one thread."""
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
        # With the interpreter held there would be one turn, when all is over.
        assert turns > 10
    finally:
        assert worker.close(10)


@pytest.fixture
def hanging(tiny_bundle, write_peers, serve, wait_until, tmp_path):
    """The file of a peer whose engines hang, and that of its faults; patient limits, so that nobody gives up."""
    file, faults = load_peers(write_peers({"a": range(6)})), tmp_path / "a.faults"
    peer = serve(inject(Peer(file, "a", Bundle.open(tiny_bundle), PeerSettings(limits=Limits(hop_floor=60.0))), faults))
    wait_until(lambda: peer.machine.rules.warm, what="warm engines")
    write(faults, Faults(hang=True))
    yield file, faults
    write(faults, Faults())


def test_an_engine_that_hangs_does_not_keep_a_peer_from_its_neighbors(
    hanging, tiny_bundle, images, assert_replays, wait_until
):
    file, faults = hanging
    bundle = Bundle.open(tiny_bundle)
    batch = images(3)
    dial = {"a": file.peer("a").address}
    links = Links(dial, bind=None, heartbeat=HeartbeatSettings(), max_frame=1 << 20)
    heard = []

    def listen():
        for event in links.poll(0.01):
            if isinstance(event, LinkUp):
                manifest = bundle.manifest
                hello = Hello("onlooker", "source", 1, 0, manifest.model_id, manifest.bundle_id)
                links.send(Link("a"), [framing.encode(hello)])
            elif isinstance(event, Incoming):
                heard.append(framing.decode(event.frames[0].bytes))
        return heard

    try:
        with Source(file, bundle, limits=Limits(hop_floor=60.0)) as source:
            assert source.wait_ready() == ()
            futures = [source.submit(image, budget_ms=60_000) for image in batch]
            wait_until(lambda: any(isinstance(m, State) and m.queue == 3 for m in listen()), what="three requests")
            heard.clear()
            # Five more of what it says every tenth of a second, and answers to what it is asked, all while it hangs.
            wait_until(lambda: sum(isinstance(m, State) for m in listen()) >= 5, what="five STATE")
            links.send(Link("a"), [b"nonsense"])
            wait_until(lambda: any(isinstance(m, Complaint) for m in listen()), what="a complaint")
            assert {(m.queue, m.calls) for m in heard if isinstance(m, State)} == {(3, 0)}
            assert not any(future.done() for future in futures)
            write(faults, Faults())
            answers = [future.result(30) for future in futures]
    finally:
        links.close()
    assert_replays(tiny_bundle, batch, answers)
