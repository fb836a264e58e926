"""Blocks that share two buffers return the values of one block at a time, for every order, batch and slot."""

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.engines.executor import Executor, PartFailed, typical_ms
from ls_edge.engines.opening import open_block_engines
from tests.engines.reference import tokens


@pytest.fixture(params=["plain", "slots"], scope="module")
def opened(request, tiny_bundle, slot_bundle):
    bundle = Bundle.open(tiny_bundle if request.param == "plain" else slot_bundle)
    engines = open_block_engines(bundle, range(6), threads=1)
    runner = Executor(engines)
    yield engines, runner
    runner.close()


def one_by_one(engines, runner, blocks, given, slots):
    for index, block in enumerate(blocks):
        inputs = {"tokens": given} | ({"slot": slots + index} if runner.needs_slot else {})
        given = engines[block].run(inputs)
    return given


def test_a_sequence_computes_the_same_as_its_engines_one_by_one(opened):
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


def test_inputs_are_unchanged_and_results_belong_to_the_caller(opened):
    _, runner = opened
    given = tokens(2)
    given.setflags(write=False)  # as a frame that was received
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


def test_results_are_right_with_several_batch_sizes(opened):
    engines, _ = opened
    runner = Executor(engines)
    for batch in (1, 2, 3, 1, 4, 2):
        runner.warm_up(batch)
        for blocks in ((0,), (1, 0), (2, 3), (0,), (1, 0)):
            slots = np.zeros(batch, np.int64)
            expected = one_by_one(engines, runner, blocks, tokens(batch), slots)
            np.testing.assert_array_equal(runner.run(blocks, tokens(batch), slots), expected)


def test_invalid_inputs_are_refused_with_the_error_of_the_engine(opened):
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


def test_the_block_that_fails_is_named_and_a_closed_executor_releases_its_sessions(bundle):
    engines = open_block_engines(bundle, range(6), threads=1)
    runner = Executor(engines)
    engines[4].close()
    with pytest.raises(PartFailed, match="block 4 was closed") as caught:
        runner.run((1, 4, 3), tokens())
    assert caught.value.part == 4
    np.testing.assert_array_equal(runner.run((3,), tokens()), engines[3].run({"tokens": tokens()}))
    runner.close()
    with pytest.raises(EngineError, match="block 1 was closed"):
        runner.run((1, 0), tokens())


def test_engines_of_another_kind_run_one_by_one(opened):
    engines, runner = opened

    class Other:
        def __getattr__(self, name):
            return getattr(engines[0], name)

    mixed = Executor({**engines, 0: Other()})
    slots = np.zeros(1, np.int64)
    np.testing.assert_array_equal(mixed.run((1, 0), tokens(), slots), runner.run((1, 0), tokens(), slots))


class Recorded:
    """An engine that notes the batch of each run."""

    def __init__(self, engine):
        self._engine, self.batches = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, inputs):
        self.batches.append(len(inputs["tokens"]))
        return self._engine.run(inputs)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 4, 8, 9])
def test_the_typical_time_is_of_one_image_after_a_run_of_the_largest_batch(bundle, max_batch):
    engines = {block: Recorded(engine) for block, engine in open_block_engines(bundle, range(2), threads=1).items()}
    runner = Executor(engines)
    assert runner.measure(max_batch) > 0
    for engine in engines.values():
        assert engine.batches[-1] == 1
        assert max_batch in engine.batches
    runner.close()


@pytest.mark.parametrize("order", [(0, 1, 2, STEM), (STEM, 2, 0, 1), (1, STEM, 0, 2)])
def test_the_typical_time_is_the_median_of_the_blocks_in_any_order(order):
    times = {0: 5.0, 1: 1.0, 2: 3.0, STEM: 100.0}
    assert typical_ms({part: times[part] for part in order}) == 3.0


def test_the_typical_time_without_blocks_is_that_of_the_ends():
    assert typical_ms({STEM: 100.0, HEAD: 50.0}) == 75.0
