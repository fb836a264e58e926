"""The document of ``ls-edge bench``: its keys with and without a monolith, and the turns of the calls."""

import json
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from ls_edge.core.errors import EngineError, UsageError
from ls_edge.engines import benchmark
from ls_edge.engines.benchmark import bench
from ls_edge.export.merge import merge


@pytest.fixture(scope="module")
def whole(bundle):
    blocks = [bundle.read(f"block {index}") for index in range(bundle.num_blocks)]
    return merge(bundle.read("stem"), blocks, bundle.read("head"))


def document(result):
    return json.loads(msgspec.json.encode(result))


def test_with_a_monolith(bundle, whole):
    found = document(bench(bundle, threads=1, batch=2, duration=0.05, monolith=(whole, "merged")))
    assert found["bundle_id"] == bundle.manifest.bundle_id
    assert (found["threads"], found["batch"], found["monolith"], found["monolith_reason"]) == (1, 2, "merged", None)
    assert len(found["blocks_ms"]) == 6
    times = [found[key] for key in ("stem_ms", "head_ms", "chain_ms", "monolith_ms", "monolith_default_ms")]
    for entry in (*times, *found["blocks_ms"]):
        assert 0 < entry["min"] <= entry["p50"] <= entry["p95"]
    assert found["chain_over_monolith"] == pytest.approx(
        found["chain_ms"]["p50"] / found["monolith_ms"]["p50"], abs=1e-3
    )
    assert found["repeats"] >= 3


@pytest.mark.parametrize("integrated", [0, 1])
def test_visits_and_the_memory_of_the_gpu(bundle, gpu, integrated):
    gpu.integrated = integrated
    before = Counter(gpu.counts)
    found = bench(bundle, batch=2, duration=0.02, kind="tensorrt")
    assert list(found.visits_ms) == ["1", "2", "6"]
    assert found.memory_bytes > 0
    counts = gpu.counts - before
    # besides the chain and its parts, each visit copied once in and once out
    assert counts["cudaMemcpyHostToDevice"] == counts["cudaMemcpyDeviceToHost"]
    assert (counts["cudaMemcpyHostToDevice"] == 0) == bool(integrated)


def test_without_one_the_reason_is_said(bundle):
    found = document(bench(bundle, threads=1, duration=0.02, monolith=(None, "no onnx here")))
    assert found["monolith_ms"] is found["chain_over_monolith"] is found["monolith_default_ms"] is None
    assert found["monolith_reason"] == "no onnx here"
    assert found["chain_ms"]["p50"] > 0


def test_what_cannot_be_timed(bundle, whole):
    for wrong in ({"batch": 0}, {"duration": 0.0}, {"duration": float("nan")}, {"threads": 0}):
        with pytest.raises(UsageError):
            bench(bundle, **{"threads": 1, "duration": 0.02, **wrong})
    with pytest.raises(EngineError, match=r"^whole does not load"):
        bench(bundle, threads=1, duration=0.02, monolith=(whole[:1000], "broken"))


@pytest.mark.parametrize(("duration", "runs"), [(10, 1), (79, 1), (80, 2), (120, 3), (1000, benchmark.RUNS_A_TURN)])
def test_calls_are_timed_in_turns_whose_first_run_does_not_count(monkeypatch, duration, runs):
    """A call takes 5 s if another one ran before it, else 1 s; all turns together take at most a fourth of the time."""
    clock, called = [0.0], []
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def call(name):
        clock[0] += 1.0 if called[-1:] == [name] else 5.0
        called.append(name)

    first, second = benchmark._alternate([lambda: call("a"), lambda: call("b")], float(duration))
    rounds = len(first) // runs
    assert rounds * runs == len(first) == len(second) >= 3
    assert set(first) | set(second) == {1.0}
    turns = [letter * (runs + 1) for letter in "ab"]
    assert "".join(called) == "ab" + "".join("".join(turns[:: -1 if n % 2 else 1]) for n in range(rounds))
    assert clock[0] >= 10.0 + min(duration, 3 * 2 * runs)
