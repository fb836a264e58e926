"""Benchmarks run with real processes and tiny models; their results are checked for sense, not for speed."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import copies
from ls_edge.cli.main import main
from ls_edge.report.charts import svg_of
from tests.faults.namespaces import reason_to_skip

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


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
        "hop", "throughput", "recovery", "tracks", "audit", "engines", "chain", "idle", "bombs", "serve", "goodput",
        "links", "--quick", "--json", str(folder / "results.json"), TMPDIR=str(folder), timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "raw zmq" in done.stdout
    assert "fastest over sequential" in done.stdout
    assert "engines only" in done.stdout
    assert "ratio and bar" in done.stdout
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
def test_more_connections_are_answered_or_refused(document):
    rows = [row for row in document["benchmarks"]["goodput"]["rows"] if row["server"] != "FastAPI"]
    assert [row["connections"] for row in rows] == [4, 16] * 2
    for row in rows:
        assert row["good_per_s"] > 0
        assert row["failed"] == 0


@pytest.mark.timeout(420)
def test_answers_over_http_are_compared_with_those_of_a_source(document):
    rows = document["benchmarks"]["serve"]["rows"]
    assert [row["path"] for row in rows] == ["/predict", "/v2/models/vit_digits/infer"]
    for row in rows:
        assert row["http_ms"]["p50"] > 0
        assert row["overhead_ms"]["runs"] >= 20


@pytest.mark.timeout(420)
def test_bombs_are_answered_and_so_are_others(document):
    rows = document["benchmarks"]["bombs"]["rows"]
    assert len(rows) == 3
    for row in rows:
        assert set(row["bombs"]) <= {"400"}
        statuses = {path: set(of["statuses"]) for path, of in row["paths"].items()}
        assert statuses == {path: {"200"} for path in ("/health/live", "/health/ready", "/metrics", "/predict")}
        assert row["peak_mb"] > 0
    assert rows[0]["bombs"] == {}
    assert all(row["bombs"]["400"] > 0 for row in rows[1:])


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
    has_cores = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
    pinned = {"real, cpus"} if has_cores else set()
    assert set(contenders) == {"process", "process, pauses", "minimal", "real", "minimal one", "real one"} | pinned
    assert ("cpus_hop_over_minimal_ms" in model) == has_cores
    for name, results in contenders.items():
        assert results["ms"]["p50"] > 0
        peers = 0 if name.startswith("process") else 1 if name.endswith(" one") else 3
        assert len(results["processes"]) == peers + 1
        assert all(process["cpu_ms"] > 0 for process in results["processes"].values())
    assert model["traffic"]["messages"]["run"] == 4
    assert set(model["throughput"]["in_flight"]) == {"1", "8", "64"}


@pytest.mark.timeout(420)
def test_hop_compares_the_runtime_with_raw_sockets(document):
    sizes = document["benchmarks"]["hop"]["sizes"]
    assert [size["bytes"] for size in sizes] == [4352, 151296]
    for size in sizes:
        times = size["one_way_ms"]
        assert set(times) == {"raw tcp", "raw zmq", "raw curve", "hop plain", "hop curve", "chain plain"}
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
    assert slow["digits"] is None
    assert all(is_ratio(row["on_over_off"]) and row["max_batch"] == 8 for row in results["batches"])


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


@pytest.mark.timeout(420)
def test_tracks_over_limited_links_have_reasons(document):
    links = document["benchmarks"]["tracks"]["links"]
    if reason := reason_to_skip():
        assert links == {"skipped": reason}
        pytest.skip(reason)
    (row,) = links["rows"]
    assert (row["mbit"], row["bytes"]) == (100, 4096)
    assert is_ratio(row["transfer_ms"])
    assert set(row["holds"]) == {"1 wave", "2 waves", "3 waves"}
    for name in row["holds"]:
        policy_run = row["policy_runs"][name]
        assert sum(policy_run["shapes"].values()) == row["rounds"]
        assert all(is_ratio(why["expected_ms"]) and why["times"] > 0 for why in policy_run["why_not"].values())
        if "one track" in policy_run["shapes"]:
            assert policy_run["why_not"]


@pytest.mark.timeout(420)
def test_a_thin_source_is_compared_with_one_that_has_the_bundle(document):
    results = document["benchmarks"]["links"]
    copies = results["copies"]
    assert is_ratio(copies["over_processes"])
    assert copies["holds"] is (copies["over_processes"] >= copies["bar"])
    if reason := reason_to_skip():
        assert results["links"] == {"skipped": reason}
        pytest.skip(reason)
    (row,) = results["links"]["rows"]
    assert (row["boards"], row["mbit"]) == (2, 100)
    assert all(map(is_ratio, row["ratio"].values()))
    assert row["holds"] == {key: row["ratio"][key] <= bar for key, bar in row["bars"].items()}
    thin = row["sources"]["thin"]
    assert 0 < thin["rest_ms"] < thin["ms"]["p90"]
    assert thin["bytes"] > results["image_bytes"]


@pytest.mark.timeout(420)
def test_accuracy_in_tracks_is_compared_with_random_orders(document):
    results = document["benchmarks"]["tracks"]["trained"]
    assert (results["data"], results["images"]) == ("digits", 20)
    assert {"nearest", "random", "1 wave", "2 waves", "3 waves"} < set(results["policy_runs"])
    assert all(
        0.0 <= policy_run["top1"] <= 1.0 and is_ratio(policy_run["ratio"])
        for policy_run in results["policy_runs"].values()
    )
    equal = results["two_equal_devices"]
    assert [len(track) for track in equal["1 wave"]["arrangement"][0]] == [3, 3]
    assert all(sorted(b for w in row["arrangement"] for t in w for b in t) == list(range(6)) for row in equal.values())


@pytest.mark.timeout(420)
def test_engines_compares_blocks_with_pytorch_and_the_chain_with_the_whole(document):
    rows = document["benchmarks"]["engines"]["rows"]
    assert [row["precision"] for row in rows] == ["fp32", "int8"]
    for row in rows:
        assert is_ratio(row["block"]["over_pytorch"])
        assert row["block"]["holds"] is (row["block"]["over_pytorch"] <= row["block"]["bar"])
        assert all(is_ratio(row["chain"][threads]["over_monolith"]) for threads in ("1", "2"))


def test_routing_counts_events_and_decisions_by_requests_in_flight(tmp_path):
    done = benchmarks("routing", "--quick", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["benchmarks"]["routing"]["rows"]
    cases = {(row["placement"], row["policy"]) for row in rows}
    assert sorted(row["in_flight"] for row in rows) == sorted(len(cases) * [1, 8, 64])
    for row in rows:
        assert is_ratio(row["cpu_us_an_event"])
        assert row["events_an_answer"] > 5  # submitted, given to a peer, accepted, computed, brought back
        assert row["decisions_an_answer"] >= 3  # of the source, of a peer for its engine and for the way home


def test_an_unknown_benchmark_is_a_usage_error():
    done = benchmarks("hops")
    assert done.returncode == 2
    assert "no benchmark is called hops" in done.stderr
    assert not done.stdout


@pytest.fixture(scope="module")
def with_costs(tmp_path_factory):
    """A bundle that was never trained, with order costs from very few orders."""
    folder = tmp_path_factory.mktemp("costs")
    (folder / "tiny.yaml").write_text("model: {args: {embed_dim: 16, depth: 4, num_heads: 2}}\n")
    for words in (
        f"train --config {folder}/tiny.yaml --data digits --out {folder}/run --epochs 0 --device cpu",
        f"export {folder}/run --out {folder}/bundle --per-block --calibrate digits --cost-orders 16",
    ):
        with pytest.raises(SystemExit) as ended:  # in this process, which has torch loaded
            main(words.split())
        assert not ended.value.code
    return folder / "bundle"


@pytest.mark.timeout(420)
def test_quality_reports_gain_and_time(with_costs, tmp_path):
    done = benchmarks("quality", "--quick", "--trained", str(with_costs), "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stderr
    assert "won back" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())["benchmarks"]["quality"]
    assert sorted(block for held in results["placement"].values() for block in held) == [0, 1, 2, 3]
    runs = {"random", "nearest", "fastest", "quality, weight 1", "quality, weight 0"}
    found, real = results["reachable"], results["peers"]["policy_runs"]
    assert set(found["policy_runs"]) == {"trained order", *runs}
    assert set(real) == runs
    assert all(
        is_ratio(found["policy_runs"][name]["time_over_fastest"]) and is_ratio(real[name]["ms"]["p50"]) for name in runs
    )
    gap = found["policy_runs"]["trained order"]["top1"] - found["policy_runs"]["random"]["top1"]
    assert found["gap"] == pytest.approx(gap)
    assert found["holds"] is (found["policy_runs"]["quality, weight 0"]["won_back"] >= 0.5 if gap > 0 else None)
    least = min(found["policy_runs"][name]["expected_loss"] for name in runs)
    assert found["policy_runs"]["quality, weight 0"]["expected_loss"] <= least + 0.01


def test_quality_needs_a_bundle_with_costs(tmp_path):
    done = benchmarks("quality", "--quick")
    assert done.returncode == 1
    assert "needs --trained BUNDLE, one exported with --calibrate" in done.stderr


@pytest.mark.timeout(420)
def test_fleet_compares_plans_policies_and_pushes_with_real_peers(folder):
    done = benchmarks("fleet", "--quick", "--json", str(folder / "fleet.json"), TMPDIR=str(folder), timeout=380)
    assert done.returncode == 0, done.stderr
    assert "planned and measured" in done.stdout
    results = json.loads((folder / "fleet.json").read_text())["benchmarks"]["fleet"]
    plan = results["plan"]
    assert set(plan["rows"]) == {"plan", "single"}
    assert all(is_ratio(value) for row in plan["rows"].values() for value in row.get("ratio", {}).values())
    assert plan["holds"] is all(abs(value - 1) <= 0.2 for value in plan["rows"]["plan"]["ratio"].values())
    assert set(plan["runtime_ms"]) == set(plan["boards"])
    slow = results["slow_board"]
    assert is_ratio(slow["over"]["sequential, two holders"]["fastest, two holders"])
    assert all(0 < rate <= 1.1 * slow["bound_images_per_s"] for rate in slow["images_per_s"].values())
    push = results["push"]
    assert (push["failed"], push["degraded"]) == (0, 0)
    assert min(push["requests"].values()) > 0
    assert all(map(is_ratio, push["with_over_without"].values()))


@pytest.mark.leaks_ok("vl-convert keeps the runtime that draws the first figure of a process")
def test_models_that_need_the_same_copies_are_drawn_next_to_each_other():
    answers = {"availability": 0.9, "answers": "95 % of the accuracy", "copies": 3}
    drawn = svg_of(copies._chart([{**answers, "model": model} for model in ("any order", "in bands")]))
    places = re.findall(r' what: (any order|in bands)[^"]*"[^>]*? (?:transform|d)="([^"]+)"', drawn)
    first, second = ({place for name, place in places if name == one} for one in ("any order", "in bands"))
    assert first
    assert second
    assert first.isdisjoint(second)
