"""A loop and a worker on two threads that change places: who runs what, also where a job or the process hangs."""

import os
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from pathlib import Path

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.runtime.peer import incarnation, threads
from ls_edge.runtime.peer.cores import EngineCores
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.threads import TAKE_OVER_S, LoopThreads
from ls_edge.runtime.source import requests
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

NO_CORES = EngineCores()


def me():
    return threading.current_thread().name


class Loop:
    """A loop that yields the jobs of a list and notes what they returned, until it is stopped."""

    def __init__(self, cores=NO_CORES):
        self.short, self.found, self.turns, self.stopped = [], [], [], threading.Event()
        self.threads = LoopThreads(self._turns(), lambda: None, names=("loop", "worker"), cores=cores)
        self.threads.start()

    def _turns(self):
        while not self.stopped.wait(0.001):
            self.turns.append(me())
            self.found += self.threads.results()
            if self.short and self.threads.may_run_here:
                self.threads.submit_short(self.short.pop())
                yield

    def end(self):
        self.stopped.set()
        wait([self.threads.ended], 10)
        return self.threads.close(10)


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    assert loop.end()


def test_the_loops_thread_runs_what_is_yielded_and_the_worker_what_is_submitted(loop, wait_until):
    loop.threads.submit(me)
    wait_until(lambda: loop.found == ["worker"], what="a result of the worker")
    loop.short.append(me)
    wait_until(lambda: loop.found == ["worker", "loop"], what="a result of the loop's thread")
    assert loop.threads.results() == []


def test_urgent_jobs_go_first_and_equals_in_turn(loop, wait_until):
    running, go = threading.Event(), threading.Event()
    loop.threads.submit(lambda: running.set() or go.wait(10))
    assert running.wait(10)
    for name in ("stem 0", "stem 1", "head 0", "stem 2", "head 1"):
        loop.threads.submit(lambda n=name: n, urgent=name.startswith("head"))
    go.set()
    wait_until(lambda: len(loop.found) == 6, what="all results")
    assert loop.found[1:] == ["head 0", "head 1", "stem 0", "stem 1", "stem 2"]


def test_where_a_job_hangs_the_worker_goes_on_with_the_loop_and_both_change_places(loop, wait_until):
    for leads, follows in (("loop", "worker"), ("worker", "loop")):
        go, began = threading.Event(), threading.Event()
        loop.found.clear()
        loop.short.append(lambda go=go, began=began: (began.set(), go.wait(20), me())[-1])
        assert began.wait(10)
        loop.turns.clear()
        wait_until(lambda: len(loop.turns) > 5, what="turns of the loop")
        assert set(loop.turns) == {follows}
        assert not loop.threads.may_run_here  # nobody could take the loop over once more
        loop.threads.submit(me)
        time.sleep(0.05)
        assert loop.found == []
        go.set()
        wait_until(lambda: len(loop.found) == 2, what="what hung, and the job behind it")
        assert loop.found == [leads, leads]
        wait_until(lambda: loop.threads.may_run_here, what="a worker that waits")


def test_a_job_that_is_submitted_while_one_hangs_waits_and_does_not_hang_the_other_thread(loop, wait_until):
    go, began = threading.Event(), threading.Event()
    loop.short.append(lambda: (began.set(), go.wait(20), "first")[-1])
    assert began.wait(10)
    loop.threads.submit(lambda: (go.wait(20), "second")[-1])
    loop.turns.clear()
    wait_until(lambda: len(loop.turns) > 5, what="turns of the loop")
    assert set(loop.turns) == {"worker"}
    assert loop.found == []
    go.set()
    wait_until(lambda: loop.found == ["first", "second"], what="both jobs")


def test_a_job_that_is_submitted_meanwhile_runs_after_the_short_one(loop, wait_until, monkeypatch):
    monkeypatch.setattr(threads, "TAKE_OVER_S", 20.0)
    began = threading.Event()
    loop.short.append(lambda: (began.set(), time.sleep(0.15), time.monotonic())[-1])
    assert began.wait(10)
    loop.threads.submit(lambda: (me(), time.monotonic()))
    wait_until(lambda: len(loop.found) == 2, what="both jobs")
    first, (name, second) = loop.found
    assert name == "worker"
    assert first <= second


def test_a_job_that_is_in_time_keeps_the_loop_where_it_is(loop, wait_until, monkeypatch):
    monkeypatch.setattr(threads, "TAKE_OVER_S", 20.0)
    for _ in range(5):
        loop.short.append(lambda: time.sleep(0.15) or me())
    wait_until(lambda: len(loop.found) == 5, what="five jobs")
    assert set(loop.found) == {"loop"}
    assert set(loop.turns) == {"loop"}


def test_nothing_is_run_here_while_the_worker_has_a_job_or_cores_of_its_own(loop, wait_until):
    go = threading.Event()
    loop.threads.submit(lambda: go.wait(20))
    wait_until(lambda: not loop.threads.may_run_here, what="a busy worker")
    loop.short.append(me)
    time.sleep(0.05)
    assert loop.found == []
    go.set()
    wait_until(lambda: len(loop.found) == 2, what="both")
    if hasattr(os, "sched_getaffinity") and len(cores := os.sched_getaffinity(0)) > 1:
        own = Loop(EngineCores(frozenset([max(cores)]), frozenset(cores - {max(cores)})))
        own.threads.submit(lambda: os.sched_getaffinity(0))
        wait_until(lambda: own.found == [{max(cores)}], what="a job on the core of the engine")
        assert not own.threads.may_run_here
        assert own.end()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_worker_looks_at_the_loop_only_while_there_are_short_jobs(loop, wait_until):
    def switches():
        (worker,) = [thread for thread in threading.enumerate() if thread.name == "worker"]
        status = Path(f"/proc/self/task/{worker.native_id}/status").read_text()
        return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", status, re.M)[1])

    def is_quiet():
        before = switches()
        time.sleep(0.3)
        return switches() == before

    wait_until(is_quiet, what="a worker that sleeps")
    before = switches()
    loop.short.append(me)
    wait_until(lambda: loop.found, what="a short job")
    wait_until(lambda: switches() > before + 3, what="looks at the loop's thread")
    wait_until(is_quiet, what="a worker that sleeps again")


def test_what_the_loop_raises_is_kept_and_both_threads_end():
    def broken():
        yield
        raise ValueError("in the loop")

    threads = LoopThreads(broken(), lambda: None, names=("loop", "worker"), cores=EngineCores())
    threads.start()
    with pytest.raises(ValueError, match="in the loop"):
        threads.ended.result(10)
    assert threads.close(10)


def test_closing_does_not_wait_for_ever_for_a_job_that_hangs():
    go, began = threading.Event(), threading.Event()
    loop = Loop()
    loop.short.append(lambda: (began.set(), go.wait(20)))
    assert began.wait(10)
    loop.stopped.set()
    wait([loop.threads.ended], 10)  # on the other thread
    assert not loop.threads.close(0.05)
    go.set()
    assert loop.threads.close(10)


# In peers.


@pytest.fixture
def engine_threads(monkeypatch):
    """How often which thread ran a block, stem or head, with real engines."""
    seen = Counter()
    bind = OnnxEngine.bind

    def noting(self, *arguments):
        step = bind(self, *arguments)

        def run():
            seen[self.part.split()[0], me()] += 1
            step()

        return run

    def noting_run(self, inputs):
        seen[self.part.split()[0], me()] += 1
        return whole(self, inputs)

    whole = OnnxEngine.run
    monkeypatch.setattr(OnnxEngine, "bind", noting)
    monkeypatch.setattr(OnnxEngine, "run", noting_run)
    return seen


@pytest.fixture
def served(tiny_bundle, write_peers, serve, engine_threads):
    """A source with one peer of this process; what warming up ran is not counted."""
    opened = []

    def start(**each):
        file, bundle = load_peers(write_peers({"a": range(6)}, **each)), Bundle.open(tiny_bundle)
        serve(Peer(file, "a", bundle))
        opened.append(Source(file, bundle))
        assert opened[-1].wait_ready() == ()
        engine_threads.clear()
        return opened[-1]

    yield start
    for source in opened:
        source.close()


def blocks_on(seen, *threads):
    return sum(seen["block", thread] for thread in threads)


def test_a_peer_runs_the_calls_of_one_request_at_a_time_on_the_thread_of_its_links(
    served, images, engine_threads, tiny_bundle, assert_replays, monkeypatch
):
    monkeypatch.setattr(incarnation, "SHORT_CALL_S", 20.0)  # as on a machine that is not busy
    monkeypatch.setattr(requests, "SHORT_US", 20_000_000)
    source, batch = served(), images(20)
    answers = [source.submit(image).result(10) for image in batch]
    assert_replays(tiny_bundle, batch, answers)
    assert blocks_on(engine_threads, "links of a", "engine of a") == 20 * 6
    assert blocks_on(engine_threads, "links of a") > blocks_on(engine_threads, "engine of a")
    for part in ("stem", "head"):
        assert engine_threads[part, "source"] > engine_threads[part, "stem and head"]


def test_what_waits_for_the_engine_is_given_to_its_own_thread(
    served, images, engine_threads, tiny_bundle, assert_replays
):
    source, batch = served(), images(200)
    answers = [future.result(20) for future in [source.submit(image) for image in batch]]
    assert_replays(tiny_bundle, batch, answers)
    assert blocks_on(engine_threads, "links of a", "engine of a") == 200 * 6
    assert blocks_on(engine_threads, "engine of a") > 0
    assert engine_threads["stem", "stem and head"] > engine_threads["stem", "source"]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)
def test_cores_of_its_own_keep_the_engine_on_its_thread(served, images, engine_threads):
    source = served(cpus=[max(os.sched_getaffinity(0))])
    for image in images(5):
        source.submit(image).result(10)
    assert blocks_on(engine_threads, "engine of a") == 5 * 6


def test_a_long_call_is_never_run_on_the_thread_of_the_links(served, images, engine_threads, monkeypatch):
    monkeypatch.setattr(incarnation, "SHORT_CALL_S", 1e-9)
    source = served()
    for image in images(5):
        source.submit(image).result(10)
    assert blocks_on(engine_threads, "engine of a") == 5 * 6


def test_a_peer_whose_engine_hangs_leaves_when_it_is_told_to(tiny_bundle, tmp_path, images, wait_until):
    with FaultyCluster(tmp_path, tiny_bundle, {"a": range(6)}) as cluster:
        cluster.wait_warm(timeout=60)
        with Source.open(cluster.file, tiny_bundle) as source:
            assert source.wait_ready(30) == ()
            (image,) = images(1)
            source.submit(image).result(10)
            cluster.set_faults("a", Faults(hang=True))
            future = source.submit(image, budget_ms=60_000)
            time.sleep(2 * TAKE_OVER_S)
            assert cluster.terminate("a") == 0
            future.cancel()
