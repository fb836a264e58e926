"""Two threads run a loop and jobs; they swap roles when a job hangs, in peers and sources, too."""

import threading
from collections import Counter
from concurrent.futures import wait

import pytest

from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.runtime.peer import incarnation, threads
from ls_edge.runtime.peer.threads import LoopThreads
from ls_edge.runtime.source import requests
from tests.faults.engines import Faults


def me():
    return threading.current_thread().name


class Loop:
    """A loop that yields the jobs of a list and records their results, until it is stopped."""

    def __init__(self):
        self.short, self.found, self.turns, self.stopped = [], [], [], threading.Event()
        self.threads = LoopThreads(self._turns(), lambda: None, names=("loop", "worker"))
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


def test_short_jobs_run_on_the_loop_thread_and_others_on_the_worker(loop, wait_until):
    loop.threads.submit(me)
    wait_until(lambda: loop.found == ["worker"], what="a result of the worker")
    loop.short.append(me)
    wait_until(lambda: loop.found == ["worker", "loop"], what="a result of the loop's thread")
    assert loop.threads.results() == []


def test_urgent_jobs_run_first_and_equal_jobs_in_order(loop, wait_until):
    running, go = threading.Event(), threading.Event()
    loop.threads.submit(lambda: running.set() or go.wait(10))
    assert running.wait(10)
    for name in ("stem 0", "stem 1", "head 0", "stem 2", "head 1"):
        loop.threads.submit(lambda n=name: n, urgent=name.startswith("head"))
    go.set()
    wait_until(lambda: len(loop.found) == 6, what="all results")
    assert loop.found[1:] == ["head 0", "head 1", "stem 0", "stem 1", "stem 2"]


def test_the_worker_continues_the_loop_while_a_short_job_hangs_and_the_threads_swap_roles(loop, wait_until):
    for leads, follows in (("loop", "worker"), ("worker", "loop")):
        go, began = threading.Event(), threading.Event()
        loop.found.clear()
        loop.short.append(lambda go=go, began=began: (began.set(), go.wait(20), me())[-1])
        assert began.wait(10)
        loop.turns.clear()
        wait_until(lambda: len(loop.turns) > 5, what="turns of the loop")
        assert set(loop.turns) == {follows}
        assert not loop.threads.may_run_here  # no thread could take the loop over once more
        loop.threads.submit(me)
        loop.turns.clear()
        wait_until(lambda: len(loop.turns) > 20, what="more turns of the loop")
        assert loop.found == []
        go.set()
        wait_until(lambda: len(loop.found) == 2, what="what hung, and the job behind it")
        assert loop.found == [leads, leads]
        wait_until(lambda: loop.threads.may_run_here, what="a worker that waits")


def test_a_job_submitted_while_another_hangs_waits(loop, wait_until):
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


def test_a_short_job_in_time_leaves_the_loop_on_its_thread(loop, wait_until, monkeypatch):
    monkeypatch.setattr(threads, "TAKE_OVER_S", 20.0)  # a busy machine may delay any job
    began, go = threading.Event(), threading.Event()
    loop.short.append(lambda: (began.set(), go.wait(20), me())[-1])
    assert began.wait(10)
    go.set()
    wait_until(lambda: loop.found, what="the short job")
    loop.turns.clear()
    wait_until(lambda: loop.turns, what="a turn of the loop")
    assert (loop.found, set(loop.turns)) == (["loop"], {"loop"})


def test_no_short_job_runs_on_the_loop_thread_while_the_worker_is_busy(loop, wait_until):
    go = threading.Event()
    loop.threads.submit(lambda: go.wait(20))
    wait_until(lambda: not loop.threads.may_run_here, what="a busy worker")
    loop.short.append(me)
    loop.turns.clear()
    wait_until(lambda: len(loop.turns) > 20, what="turns of the loop")
    assert loop.found == []
    go.set()
    wait_until(lambda: len(loop.found) == 2, what="both")


def test_an_error_of_the_loop_is_kept_and_both_threads_end():
    def broken():
        yield
        raise ValueError("in the loop")

    threads = LoopThreads(broken(), lambda: None, names=("loop", "worker"))
    threads.start()
    with pytest.raises(ValueError, match="in the loop"):
        threads.ended.result(10)
    assert threads.close(10)


def test_close_does_not_wait_for_a_hanging_job():
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
    """Count which thread ran blocks, stem and head of real engines."""
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
def served(serve_peers, open_source, engine_threads):
    """A source with one peer in this process; runs of the warm-up are not counted."""

    def start(**each):
        source = open_source(serve_peers({"a": range(6)}, **each))
        engine_threads.clear()
        return source

    return start


def blocks_on(seen, *threads):
    return sum(seen["block", thread] for thread in threads)


def test_a_peer_with_one_request_at_a_time_runs_it_on_the_thread_of_its_links(
    served, images, engine_threads, tiny_bundle, assert_replays, monkeypatch
):
    for module, name in ((incarnation, "SHORT_CALL_S"), (requests, "SHORT_US"), (threads, "TAKE_OVER_S")):
        monkeypatch.setattr(module, name, 20_000_000)  # as on a machine that is not busy
    source, batch = served(), images(20)
    answers = [source.submit(image).result(10) for image in batch]
    assert_replays(tiny_bundle, batch, answers)
    assert blocks_on(engine_threads, "links of a", "engine of a") == 20 * 6
    assert blocks_on(engine_threads, "links of a") > blocks_on(engine_threads, "engine of a")
    for part in ("stem", "head"):
        assert engine_threads[part, "source"] > engine_threads[part, "stem and head"]


def test_queued_calls_run_on_the_thread_of_the_engine(served, images, engine_threads, tiny_bundle, assert_replays):
    source, batch = served(), images(200)
    answers = [future.result(20) for future in [source.submit(image) for image in batch]]
    assert_replays(tiny_bundle, batch, answers)
    assert blocks_on(engine_threads, "links of a", "engine of a") == 200 * 6
    assert blocks_on(engine_threads, "engine of a") > 0
    assert engine_threads["stem", "stem and head"] > engine_threads["stem", "source"]


def test_a_peer_with_a_hanging_engine_leaves_on_sigterm(start_peers, open_source, images, wait_until):
    peers = start_peers({"a": range(6)})
    source = open_source(peers.file)
    (image,) = images(1)
    source.submit(image).result(10)
    peers.set_faults("a", Faults(hang=True))
    future = source.submit(image, budget_ms=60_000)
    wait_until(lambda: source.snapshot.peers["a"].queue, what="a call that hangs")
    assert peers.terminate("a") == 0
    future.cancel()
