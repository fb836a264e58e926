"""Benchmarks run with real processes and tiny models; their results are checked for sense, not for speed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.release


def benchmarks(*arguments, timeout=150, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the bundles of the benchmarks."""
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def document(folder):
    done = benchmarks(
        "hop", "throughput", "recovery", "tracks", "chain", "idle", "serve", "memory", "--quick",
        "--json", str(folder / "results.json"), TMPDIR=str(folder), timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "raw zmq" in done.stdout
    assert "fastest over sequential" in done.stdout
    assert "engines only" in done.stdout
    return json.loads((folder / "results.json").read_text())


def is_ratio(value):
    return isinstance(value, float) and math.isfinite(value) and value > 0


@pytest.mark.timeout(420)
def test_idle_peers_answer_and_lose_no_link(document):
    (fleet,) = document["benchmarks"]["idle"]["fleets"]
    assert (fleet["peers"], fleet["failed"], fleet["links_lost"]) == (3, 0, 0)
    assert fleet["answers"] >= 100
    assert fleet["idle_cores"] >= 0


@pytest.mark.timeout(420)
def test_requests_are_answered_while_a_fleet_changes(folder):
    done = benchmarks("apply", "--quick", "--json", str(folder / "apply.json"), TMPDIR=str(folder), timeout=400)
    assert done.returncode == 0, done.stderr
    tasks = json.loads((folder / "apply.json").read_text())["benchmarks"]["apply"]["tasks"]
    assert list(tasks) == ["new plan", "add", "replace", "new model"]
    for row in tasks.values():
        assert (row["failed"], row["degraded"]) == (0, 0)
        assert is_ratio(row["ratio"])


@pytest.mark.timeout(420)
def test_memory_is_that_of_commands_and_peers(document):
    rows = document["benchmarks"]["memory"]["rows"]
    commands = ["train --epochs 0", "train --init", "export, fp32"]
    assert [row["what"] for row in rows] == [*commands, "peer with a quarter, fp32", "peer with all, fp32"]
    assert all(row["peak_mib"] > row["weights_mib"] > 0 for row in rows)
    assert all(row["resident_mib"] <= row["peak_mib"] <= 1.05 * row["weights_mib"] + 90 for row in rows[3:])


@pytest.mark.timeout(420)
def test_serve_measures_overhead_and_goodput(document):
    results = document["benchmarks"]["serve"]
    rows = results["rows"]
    assert [row["path"] for row in rows] == ["/predict", "/v2/models/vit_digits/infer"]
    for row in rows:
        assert row["http_ms"]["p50"] > 0
        assert row["overhead_ms"]["runs"] >= 20
    assert [row["connections"] for row in results["goodput"]] == [4, 16]
    assert any(row["good_per_s"] > 0 for row in results["goodput"])
    assert [row["failed"] for row in results["goodput"]] == [0, 0]


@pytest.mark.timeout(420)
def test_results_name_the_machine(document):
    assert document["quick"] is True
    assert document["machine"]["cores"] >= 1
    assert {"cpu", "load", "memory_gib", "libraries"} <= set(document["machine"])
    for results in document["benchmarks"].values():
        assert len(results["load"]["before"]) == len(results["load"]["after"]) == 3


@pytest.mark.timeout(420)
def test_chain_compares_peers_with_a_minimal_chain_and_one_process(document):
    (model,) = document["benchmarks"]["chain"]["models"]
    contenders = model["contenders"]
    assert set(contenders) == {"process", "minimal", "real", "minimal one", "real one"}
    for name, results in contenders.items():
        assert results["ms"]["p50"] > 0
        peers = 0 if name == "process" else 1 if name.endswith(" one") else 3
        assert len(results["cpu_ms"]) == peers + 1
        assert min(results["cpu_ms"].values()) > 0
    assert set(model["throughput"]) == {"1", "8", "64"}


@pytest.mark.timeout(420)
def test_hop_compares_the_runtime_with_raw_sockets(document):
    sizes = document["benchmarks"]["hop"]["sizes"]
    assert [size["bytes"] for size in sizes] == [4352, 151296]
    for size in sizes:
        times = size["one_way_ms"]
        assert set(times) == {"raw zmq", "raw curve", "hop plain", "hop curve", "chain plain"}
        assert all(is_ratio(each["p50"]) and each["p10"] <= each["p50"] <= each["p90"] for each in times.values())
        assert len({each["runs"] for each in times.values()}) == 1
        assert is_ratio(size["curve_over_zmq_curve"])
        assert set(size["holds"]) == {"plain", "curve"}


@pytest.mark.timeout(420)
def test_throughput_compares_in_turn(document):
    results = document["benchmarks"]["throughput"]
    (two,) = results["two_peers"]
    assert set(two["images_per_s"]) == {"two peers", "two threads", "two processes", "minimal chain"}
    assert all(map(is_ratio, (*two["images_per_s"].values(), *two["over_two_processes"].values())))
    assert two["holds"] == {"two peers": two["over_two_processes"]["two peers"] >= two["bars"]["two peers"]}
    slow = results["slow_peer"]
    assert set(slow["images_per_s"]) == {"fastest", "sequential"}
    assert is_ratio(slow["fastest_over_sequential"])


@pytest.mark.timeout(420)
def test_recovery_hits_the_peer_that_has_the_request(document):
    kinds = document["benchmarks"]["recovery"]["kinds"]
    assert set(kinds) == {"kill", "stop", "hang"}
    assert all(math.isfinite(kind["added_ms"]["p50"]) and kind["bar_ms"] > 0 for kind in kinds.values())
    last = document["benchmarks"]["recovery"]["last_holder"]
    assert last["runs"] == 1
    assert last["p50"] > 0


@pytest.mark.timeout(420)
def test_tracks_are_compared_with_one_peer_in_turn(document):
    results = document["benchmarks"]["tracks"]
    (row,) = results["two_cores"]
    assert set(row["policy_runs"]) == {"one peer", "1 wave", "2 waves", "3 waves"}
    assert row["policy_runs"]["one peer"]["ratio"] == 1.0
    assert row["policy_runs"]["one peer"]["shapes"] == {"one track": row["rounds"]}
    assert all(
        is_ratio(policy_run["ratio"]) and policy_run["ms"]["runs"] == row["rounds"]
        for policy_run in row["policy_runs"].values()
    )
    assert is_ratio(row["s"])
    ratios = {name: run["ratio"] for name, run in row["policy_runs"].items() if "wave" in name}
    assert row["holds"] == {name: ratio <= row["s"] + 0.1 for name, ratio in ratios.items()}


def test_an_unknown_benchmark_is_a_usage_error():
    done = benchmarks("hops")
    assert done.returncode == 2
    assert "no benchmark is called hops" in done.stderr
    assert not done.stdout
