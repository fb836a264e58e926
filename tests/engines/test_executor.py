"""Blocks that share two buffers return the values of one block at a time, for every order, batch and slot."""

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.core.parts import STEM
from ls_edge.engines import executor
from ls_edge.engines.executor import Executor, PartFailed
from ls_edge.engines.opening import open_block_engines


@pytest.fixture(params=["plain", "slots"], scope="module")
def opened(request, tiny_bundle, slot_bundle):
    bundle = Bundle.open(tiny_bundle if request.param == "plain" else slot_bundle)
    engines = open_block_engines(bundle, range(6), threads=1)
    runner = Executor(engines)
    yield engines, runner
    runner.close()


def tokens(batch=1, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, 16, 32), dtype=np.float32)


def one_by_one(engines, runner, blocks, given, slots):
    for index, block in enumerate(blocks):
        inputs = {"tokens": given} | ({"slot": slots + index} if runner.needs_slot else {})
        given = engines[block].run(inputs)
    return given


def test_they_compute_what_the_engines_do_one_by_one(opened):
    engines, runner = opened
    rng = np.random.default_rng(1)
    for batch in (1, 3, 2, 8, 1, 5, 3):
        for length in (1, 2, 3, 6):
            blocks = tuple(map(int, rng.permutation(6)[:length]))
            slots = rng.integers(0, 7 - length, batch)
            given = tokens(batch, seed=batch)
            expected = one_by_one(engines, runner, blocks, given, slots)
            alone = runner.run(blocks, given, slots)
            several = runner.run(blocks, [given[row : row + 1] for row in range(batch)], slots)
            np.testing.assert_array_equal(alone, expected)
            np.testing.assert_array_equal(several, expected)
            steps = runner.steps(blocks, [given[row : row + 1] for row in range(batch)], slots)
            assert len(steps) == length
            np.testing.assert_array_equal(steps[0], one_by_one(engines, runner, blocks[:1], given, slots))
            np.testing.assert_array_equal(steps[-1], expected)


def test_inputs_are_left_alone_and_results_belong_to_the_caller(opened):
    _, runner = opened
    given = tokens(2)
    given.flags.writeable = False  # as a frame that was received
    slots = np.zeros(2, np.int64)
    first = runner.run((0, 1, 2), given, slots)
    kept = first.copy()
    for blocks in ((3,), (3, 4), (0, 1, 2)):
        runner.run(blocks, tokens(2, seed=5), slots)
        runner.run(blocks, tokens(8, seed=6), np.zeros(8, np.int64))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(given, tokens(2))
    np.testing.assert_array_equal(slots, [0, 0])
    first[...] = 0
    np.testing.assert_array_equal(runner.run((0, 1, 2), given, slots), kept)


def test_more_batch_sizes_than_are_kept(opened, monkeypatch):
    engines, _ = opened
    monkeypatch.setattr(executor, "KEPT_BATCH_SIZES", 2)
    runner = Executor(engines)
    for batch in (1, 2, 3, 1, 4, 2):
        runner.warm_up(batch)
        for blocks in ((0,), (1, 0), (2, 3), (0,), (1, 0)):
            slots = np.zeros(batch, np.int64)
            expected = one_by_one(engines, runner, blocks, tokens(batch), slots)
            np.testing.assert_array_equal(runner.run(blocks, tokens(batch), slots), expected)


def test_what_the_engines_do_not_take_is_refused_in_their_words(opened):
    _, runner = opened
    good, slots = tokens(2), np.zeros(2, np.int64)
    for given, words in (
        (good.astype(np.float64), "tokens is float64"),
        (good[:, :15], r"float32 \[2, 15, 32\]"),
        (good[:0], "B at least 1"),
        ([good, good[:, :15]], "dimension"),
        ([good, good.astype(np.float64)], r"tokens is float64 \[4, 16, 32\]"),
    ):
        with pytest.raises((PartFailed, ValueError), match=words):
            runner.run((3, 1), given, slots)
    if runner.needs_slot:
        for bad in ([0, 5], [-1, 0]):
            with pytest.raises(PartFailed, match="slot is"):
                runner.run((3, 1), good, np.array(bad, np.int64))


class Failing:
    """A session's binding that works until it has been called ``after`` times."""

    def __init__(self, step, after):
        self._step, self.left = step, after

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise EngineError("out of luck")
        self._step()


def test_the_block_that_fails_is_named(opened, monkeypatch):
    engines, _ = opened
    bind = type(engines[4]).bind

    def failing(engine, *buffers):
        return Failing(bind(engine, *buffers), 2 if engine is engines[4] else 99)

    monkeypatch.setattr(type(engines[4]), "bind", failing)
    runner = Executor(engines)
    slots = np.zeros(1, np.int64)
    runner.run((1, 4), tokens(), slots)
    runner.run((2, 4), tokens(), slots)
    with pytest.raises(PartFailed, match="out of luck") as caught:
        runner.run((3, 4, 0), tokens(), slots)
    assert caught.value.part == 4


def test_a_closed_runner_lets_go_of_its_sessions(tiny_bundle):
    engines = open_block_engines(Bundle.open(tiny_bundle), range(2), threads=1)
    runner = Executor(engines)
    runner.run((0, 1), tokens())
    runner.close()
    with pytest.raises(EngineError, match="block 1 was closed"):
        runner.run((1, 0), tokens())


def test_engines_of_another_kind_are_run_one_by_one(opened):
    engines, runner = opened

    class Other:
        def __getattr__(self, name):
            return getattr(engines[0], name)

    mixed = Executor({**engines, 0: Other()})
    slots = np.zeros(1, np.int64)
    np.testing.assert_array_equal(mixed.run((1, 0), tokens(), slots), runner.run((1, 0), tokens(), slots))


@pytest.mark.parametrize("max_batch", [1, 2, 3, 4, 8, 9])
def test_the_typical_time_is_of_one_image_whatever_the_largest_batch(tiny_bundle, monkeypatch, max_batch):
    runner = Executor(open_block_engines(Bundle.open(tiny_bundle), range(2), threads=1))
    monkeypatch.setattr("ls_edge.engines.executor.warm_up", lambda engine, batch: float(batch))
    assert runner.measure(max_batch) == 1.0
    runner.close()


@pytest.mark.parametrize("order", [(0, 1, 2, STEM), (STEM, 2, 0, 1), (1, STEM, 0, 2)])
def test_the_typical_time_is_that_of_the_blocks_in_any_order(tiny_bundle, monkeypatch, order):
    runner = Executor(open_block_engines(Bundle.open(tiny_bundle), order, threads=1))
    times = {"block 0": 5.0, "block 1": 1.0, "block 2": 3.0, "stem": 100.0}
    monkeypatch.setattr("ls_edge.engines.executor.warm_up", lambda engine, batch: times[engine.part])
    assert runner.measure(1) == 3.0
    runner.close()
