"""``run_chaos`` and its command: no request is lost under all kinds of faults at once."""

from pathlib import Path

import pytest
import zmq

from ls_edge.data.datasets import open_data
from tests.faults.course import KINDS, plan
from tests.faults.suite import ChaosSettings, run_chaos

ROOT = Path(__file__).parents[3]
PEERS = ("anna", "ben", "cleo", "dan")


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_the_same_for_the_same_seed_and_has_every_kind(seed):
    each = len(KINDS)
    faults = plan(seed, 2 * each + 2, 25.0, PEERS)
    assert faults == plan(seed, 2 * each + 2, 25.0, PEERS)
    assert faults != plan(seed + 1, 2 * each + 2, 25.0, PEERS)
    assert {fault.kind for fault in faults[:each]} == {fault.kind for fault in faults[each : 2 * each]} == set(KINDS)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 25
    assert {fault.peer for fault in faults} <= set(PEERS)
    assert {fault.lasts_s for fault in faults if fault.kind == "pause"} == {15.0}
    assert all(fault.lasts_s > 0 for fault in faults)


@pytest.mark.release
def test_nothing_is_lost_under_every_kind_of_fault(tiny_bundle, other_bundle, tmp_path):
    seen, answers = [], []
    settings = ChaosSettings(seed=1, requests=150, faults=len(KINDS), seconds=8.0, keys=zmq.has("curve"))
    images = open_data("digits", "eval")
    result = run_chaos(tiny_bundle, other_bundle, images, tmp_path, settings, seen.append, lambda: answers.append(1))
    assert result.holds, result
    assert (result.answered, result.lost, result.twice, result.not_replayed) == (150, 0, 0, 0)
    assert (result.failed, result.degraded) == ({}, 0)
    assert result.worst_replay < 1e-4
    assert seen == result.faults
    assert {fault.kind for fault in seen} == set(KINDS)
    assert len(answers) == 150


@pytest.mark.release
def test_nothing_is_lost_with_bands(banded_bundle, tiny_bundle, tmp_path):
    """The first and the last block have a fixed place, and peers of ``tiny_bundle`` serve other bands."""
    kinds = ("kill", "stop", "hang", "all_gone", "other_bundle")
    settings = ChaosSettings(
        seed=4, requests=100, faults=len(kinds), seconds=6.0, policy="parallel", block_ms=2.0, kinds=kinds,
    )  # fmt: skip
    result = run_chaos(banded_bundle, tiny_bundle, open_data("digits", "eval"), tmp_path, settings)
    assert result.holds, result
    assert (result.answered, result.degraded, result.not_replayed) == (100, 0, 0)
    assert {fault.kind for fault in result.faults} == set(kinds)
