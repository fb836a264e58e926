"""A call of a peer's engines names the first block with NaN or infinity, and spares the other requests of its batch."""

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DeviceLost
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import open_block_engines
from ls_edge.runtime.peer.executor import run_blocks
from ls_edge.runtime.protocol.messages import TransferId
from ls_edge.runtime.routing.state.events import Compute, Computed, ComputeFailed

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.fixture
def engines(tiny_bundle):
    opened = open_block_engines(Bundle.open(tiny_bundle), range(6), threads=1, max_batch=3)
    yield opened
    for engine in opened.values():
        engine.close()


def compute(blocks, rows):
    transfers = tuple(TransferId(bytes([i] * 16), 1, 1) for i in range(len(rows)))
    return Compute(blocks, transfers, tuple(rows), tuple(0 for _ in rows))


def tokens_of(bundle, seed):
    spec = Bundle.open(bundle).manifest.tokens
    return np.random.default_rng(seed).standard_normal((1, spec.count, spec.dim)).astype(np.float32)


def test_a_batch_has_outputs_for_all_images_except_the_odd_one(engines, tiny_bundle):
    rows = [tokens_of(tiny_bundle, seed) for seed in range(3)]
    fine = run_blocks(Executor(engines), compute((2, 3), rows))
    assert isinstance(fine, Computed)
    rows[1][0, 0, 0] = np.nan
    odd = compute((2, 3), rows)
    failed = run_blocks(Executor(engines), odd)
    assert isinstance(failed, ComputeFailed)
    assert failed.not_finite
    assert (failed.block, failed.transfers) == (2, (odd.transfers[1],))
    assert failed.rest.transfers == (odd.transfers[0], odd.transfers[2])
    assert failed.rest.blocks == (2, 3)
    np.testing.assert_allclose(failed.rest.outputs, [fine.outputs[0], fine.outputs[2]], rtol=1e-5)
    alone = run_blocks(Executor(engines), compute((2,), rows[1:2]))
    assert (alone.not_finite, alone.rest) == (True, None)


def test_a_lost_gpu_does_not_count_as_a_failed_block(engines, tiny_bundle):
    """Only a new process can use it again, so the peer ends with the reason, and its supervisor starts it."""

    class Lost(Spoiling):
        def run(self, inputs):
            raise DeviceLost(self._bad)

    lost = run_blocks(
        Executor({**engines, 4: Lost(engines[4], "error 719")}), compute((1, 4), [tokens_of(tiny_bundle, 0)])
    )
    assert isinstance(lost, DeviceLost)
    assert str(lost) == "error 719"


class Spoiling:
    """A real engine whose result gets a NaN or infinity."""

    def __init__(self, engine, bad):
        self._engine, self._bad = engine, bad

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, inputs):
        result = self._engine.run(inputs)
        result[-1].flat[-1] = self._bad
        return result


@pytest.mark.parametrize("bad", BAD)
def test_the_first_block_with_nan_or_infinity_is_named(engines, tiny_bundle, bad):
    spoiled = {**engines, 4: Spoiling(engines[4], bad)}
    failed = run_blocks(Executor(spoiled), compute((1, 4, 5), [tokens_of(tiny_bundle, 0)]))
    assert (failed.block, failed.not_finite, failed.rest) == (4, True, None)
