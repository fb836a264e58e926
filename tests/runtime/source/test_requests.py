"""Each request of a source ends once, at its deadline at the latest, in every stage of the source."""

import contextlib
import errno
import gc
import os
import re
import selectors
import threading
import warnings
import weakref
from collections import Counter
from concurrent.futures import wait

import numpy as np
import pytest

from ls_edge.core.errors import BudgetExceeded, Overloaded, SourceClosed
from ls_edge.engines.opening import open_parts
from ls_edge.runtime.source.requests import WaitingLine
from ls_edge.runtime.source.results import InFlightRequest
from ls_edge.runtime.source.source import Source


class Held:
    """A real engine of the source; after :meth:`hold`, its calls wait for ``may_run``."""

    def __init__(self, engine):
        self._engine = engine
        self.may_run = threading.Event()
        self.may_run.set()
        self.entered = threading.Event()
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, inputs):
        self.calls += 1
        self.entered.set()
        assert self.may_run.wait(60)
        return self._engine.run(inputs)

    def hold(self):
        self.calls = 0
        self.entered.clear()
        self.may_run.clear()
        return self


@pytest.fixture
def engines(monkeypatch):
    """Stem and head of the next source, by part."""
    found = {}

    def opened(bundle, parts, **options):
        found.update((part, Held(engine)) for part, engine in open_parts(bundle, parts, **options).items())
        return found

    monkeypatch.setattr("ls_edge.runtime.source.stem_and_head.open_parts", opened)
    return found


@pytest.fixture
def alone(tiny_bundle, write_peers, engines):
    """Open a source whose peers do not exist."""
    file = write_peers({"a": range(6)})
    with contextlib.ExitStack() as opened:
        yield lambda **settings: opened.enter_context(Source.open(file, tiny_bundle, **settings))


@pytest.fixture
def served(serve_peers, open_source, engines):
    """Open a source with one peer that holds everything."""
    file = serve_peers({"a": range(6)})
    return lambda **settings: open_source(file, **settings)


def settled(source):
    """Wait until the source has handled all earlier submissions and cancellations."""
    error = source.submit(np.zeros((3, 16, 16), np.float32), budget_ms=20).exception(20)
    assert "waited for its turn" in str(error)


def test_a_later_request_with_a_shorter_budget_ends_first(alone, engines, images):
    source = alone(max_inflight=1)
    stem = engines["stem"].hold()
    (image,) = images(1)
    long = [source.submit(image, budget_ms=600_000) for _ in range(2)]
    short = source.submit(image, budget_ms=50)
    with pytest.raises(Overloaded, match="waited for its turn"):
        short.result(20)
    assert not any(future.done() for future in long)
    stem.may_run.set()


def test_requests_end_although_the_stem_hangs(alone, engines, images):
    source = alone()
    stem = engines["stem"].hold()
    (image,) = images(1)
    running = source.submit(image, budget_ms=300)
    assert stem.entered.wait(20)
    behind = source.submit(image, budget_ms=300)
    with pytest.raises(BudgetExceeded, match="at the stem"):
        running.result(20)
    with pytest.raises(Overloaded, match="waited for the stem"):
        behind.result(20)
    assert {running.exception().record.id, behind.exception().record.id} == {0, 1}
    assert stem.calls == 1
    stem.may_run.set()


def test_a_request_ends_although_the_head_hangs_and_its_record_has_its_steps(served, engines, images):
    source = served()
    head = engines["head"].hold()
    (image,) = images(1)
    late = source.submit(image, budget_ms=1000)
    with pytest.raises(BudgetExceeded, match="at the head"):
        late.result(20)
    assert head.calls == 1
    assert sorted(late.exception().record.steps) == [(block, "a") for block in range(6)]
    assert late.exception().record.prediction is None
    head.may_run.set()
    answer = source.submit(image).result(20)
    assert answer.request == 1


def test_a_canceled_request_stays_in_flight_until_its_stem_has_ended(served, engines, images):
    source = served(max_inflight=2)
    stem = engines["stem"].hold()
    (image,) = images(1)
    for _ in range(10):
        futures = [source.submit(image, budget_ms=600_000) for _ in range(4)]
        settled(source)
        assert all(future.cancel() for future in futures)
        settled(source)  # one runs and one waits for the stem, although all forty are canceled
    stem.may_run.set()
    assert source.submit(image).result(20).prediction in range(10)
    assert stem.calls == 2
    assert {future.result(20).degraded for future in [source.submit(image) for _ in range(4)]} == {False}


def test_a_request_that_is_overdue_while_it_starts_ends_once_and_frees_its_place(served, images):
    source = served(max_inflight=2)
    (image,) = images(1)
    ended = Counter()
    late = []

    def submit(who):
        for number in range(100):
            late.append(source.submit(image, budget_ms=0.001 * (1 + number % 50)))
            late[-1].add_done_callback(lambda _, key=(who, number): ended.update([key]))

    submitters = [threading.Thread(target=submit, args=(who,)) for who in range(3)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join(20)
    assert {type(future.exception(20)) for future in late} <= {Overloaded, BudgetExceeded}
    assert ended == Counter((who, number) for who in range(3) for number in range(100))
    assert {future.result(20).degraded for future in [source.submit(image) for _ in range(4)]} == {False}


def test_closing_ends_every_request_once_in_any_stage(served, engines, images):
    source = served(max_inflight=8)
    head = engines["head"].hold()
    pictures = images(40)
    outcomes = Counter()
    futures = []
    for index, image in enumerate(pictures):
        future = source.submit(image, budget_ms=50 if index % 5 == 4 else 60_000)
        future.add_done_callback(lambda _, index=index: outcomes.update([index]))
        futures.append(future)
    assert head.entered.wait(20)
    for future in futures[::5]:  # only requests whose budget is certainly not over
        future.cancel()
    closer = threading.Thread(target=source.close)
    closer.start()
    done, left = wait(futures, 20)
    head.may_run.set()
    closer.join(20)
    assert not left
    ended = Counter("canceled" if f.cancelled() else type(f.exception()).__name__ for f in done)
    assert set(ended) <= {"canceled", "SourceClosed", "Overloaded", "BudgetExceeded"}
    assert ended["SourceClosed"] > 10
    assert ended["canceled"] == 8
    assert outcomes == Counter(range(40))
    with pytest.raises(SourceClosed):
        source.submit(pictures[0])


def test_requests_submitted_while_the_source_fails_end(alone, images, monkeypatch, caplog):
    source = alone()
    (image,) = images(1)

    select = selectors.DefaultSelector.select

    def broken(selector, timeout=None):
        if threading.current_thread().name in ("source", "stem and head"):  # either may run the loop
            raise OSError(errno.EIO, "the kernel fails")
        return select(selector, timeout)

    futures, stop = [], threading.Event()

    def submit():
        while not stop.is_set():
            try:
                futures.append(source.submit(image, budget_ms=600_000))
            except SourceClosed:
                return

    submitter = threading.Thread(target=submit)
    submitter.start()
    monkeypatch.setattr(selectors.DefaultSelector, "select", broken)
    submitter.join(20)
    stop.set()
    assert not submitter.is_alive()
    assert not wait(futures, 20).not_done
    assert {type(future.exception()) for future in futures} == {SourceClosed}
    (logged,) = [record for record in caplog.records if record.getMessage() == "the source failed"]
    assert "the kernel fails" in str(logged.exc_info[1])


def test_a_callback_may_close_the_source(served, images):
    source = served()
    closed = threading.Event()

    def close(_future):
        source.close()
        closed.set()

    future = source.submit(images(1)[0])
    future.add_done_callback(close)
    assert future.result(20).prediction in range(10)
    assert closed.wait(20)


def test_unreferenced_answers_are_freed_without_garbage_collection(served, images, wait_until):
    """Future and request must not refer to each other, or logits and records stay until a collection."""
    source = served()
    gc.collect()
    gc.disable()
    try:
        answers = [weakref.ref(source.submit(image).result(20)) for image in images(4)]
        wait_until(lambda: not any(answer() for answer in answers[:-1]), what="the answers to be freed")
    finally:
        gc.enable()


def test_the_next_request_starts_when_one_ends():
    """It does not wait for the next turn of the source."""
    started = []
    line = WaitingLine(1, lambda inflight, _alone: started.append(inflight.request))
    first, second, third = (InFlightRequest(number, None, 0.0, 1.0, 0, "", None) for number in range(3))
    for one in (first, second, third):
        line.join(one)
    assert started == [0]
    line.leave(first)
    assert started == [0, 1]
    line.close()
    line.leave(second)
    assert started == [0, 1]


def in_a_fork(act):
    """Return what ``act`` returns or raises in a forked process, as text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is the subject
        process = os.fork()
    if not process:
        try:
            text = repr(act())
        except Exception as error:  # noqa: BLE001
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(process, 0)
    return text


def test_a_forked_process_gets_an_error_and_its_parent_continues(served, images):
    """The threads of a source are not forked, so that a request there would never end."""
    source = served()
    (image,) = images(1)
    assert re.match(r"SourceClosed\('this source belongs to process", in_a_fork(lambda: source.submit(image).result(5)))
    assert in_a_fork(source.close) == "None"
    assert source.submit(image).result(20).record.error is None
