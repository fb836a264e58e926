"""Everything goes wrong at once, and what is left of it: ``run_chaos`` and its command."""

import json
import subprocess
import sys

import pytest

from ls_edge.datasets import open_data
from ls_edge.runtime.chaos.suite import KINDS, ChaosResult, plan, run_chaos

PEERS = ("anna", "ben", "cleo", "dan")


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_the_same_for_the_same_seed_and_has_every_kind(seed):
    faults = plan(seed, 20, 25.0, PEERS)
    assert faults == plan(seed, 20, 25.0, PEERS)
    assert faults != plan(seed + 1, 20, 25.0, PEERS)
    assert {fault.kind for fault in faults[:9]} == {fault.kind for fault in faults[9:18]} == set(KINDS)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 25
    assert {fault.peer for fault in faults} <= set(PEERS)
    assert all(fault.lasts_s > 0 for fault in faults)


def test_a_plan_without_a_kind_lacks_only_that():
    kinds = tuple(kind for kind in KINDS if kind != "other_bundle")
    assert {fault.kind for fault in plan(0, 8, 10.0, PEERS, kinds)} == set(kinds)
    assert plan(0, 0, 10.0, PEERS) == []


def test_nothing_is_lost_under_every_kind_of_fault(tiny_bundle, other_bundle, tmp_path):
    seen, answers = [], []
    result = run_chaos(
        tiny_bundle,
        other_bundle,
        open_data("digits", "eval"),
        tmp_path,
        seed=1,
        requests=150,
        faults=len(KINDS),
        seconds=8.0,
        on_fault=seen.append,
        on_answer=lambda: answers.append(1),
    )
    assert result.holds, result
    assert (result.answered, result.lost, result.twice, result.not_replayed) == (150, 0, 0, 0)
    assert (result.failed, result.degraded) == ({}, 0)
    assert result.worst_replay < 1e-4
    assert seen == result.faults
    assert {fault.kind for fault in seen} == set(KINDS)
    assert len(answers) == 150


def document(**changes):
    fine = {
        "seed": 0, "requests": 3, "answered": 3, "failed": {}, "lost": 0, "twice": 0, "not_replayed": 0,
        "worst_replay": 0.0, "duplicates_dropped": 1, "reroutes": 2, "degraded": 0, "in_waves": 0, "latency_ms": {},
        "seconds": 1.0, "faults": [], "dropped": {},
    }  # fmt: skip
    return ChaosResult(**(fine | changes))


def test_what_a_result_holds():
    assert document().holds
    for wrong in ({"lost": 1}, {"failed": {"Overloaded": 1}}, {"twice": 1}, {"not_replayed": 1}):
        assert not document(**wrong).holds


def test_the_command_prints_one_json_document(tiny_bundle):
    arguments = ["--requests", "40", "--faults", "3", "--seconds", "2", "--seed", "5", "--json"]
    command = [sys.executable, "-m", "ls_edge", "chaos", str(tiny_bundle), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert set(result) == set(ChaosResult.__struct_fields__)
    assert (result["seed"], result["requests"], result["answered"], result["lost"]) == (5, 40, 40, 0)
    assert len(result["faults"]) == 3
    assert "other_bundle" not in {fault["kind"] for fault in result["faults"]}
