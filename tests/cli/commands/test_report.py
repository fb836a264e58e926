"""``ls-edge report``: documents as the commands print them, side by side."""

import json
import re

import msgspec
import pytest

from ls_edge.api.comparison import side_by_side
from ls_edge.core.text import show_ms
from ls_edge.device.profile import Times
from ls_edge.engines.benchmark import Bench
from ls_edge.evaluation.evaluate import Arbitrary, Evaluation, SequentialAccuracy
from ls_edge.runtime.peer.peer import Peer
from tests.report.drawing import rows_of


@pytest.fixture
def documents(command, bundle, measured, write_peers, serve, tmp_path):
    """Files of a profile, a plan, a run of one request at a time, and one of several."""
    board = msgspec.structs.replace(measured, device=msgspec.structs.replace(measured.device, name="a"))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(board))
    planning = ("plan", "--bundle", bundle, "--profiles", tmp_path / "profile.json", "--objective", "latency", "--json")
    path = write_peers({"a": [0, 1], "b": [2, 3]})
    for name in "ab":
        serve(Peer.open(path, name, bundle))
    running = ("run", "--peers", path, "--bundle", bundle, "--data", "digits", "--limit", 6, "--json", "--concurrency")
    for name, words in (("plan", planning), ("alone", (*running, 1)), ("several", (*running, 32))):
        code, printed, errors = command(*words)
        assert code == 0, errors
        document = json.loads(printed)
        if name == "plan":
            document["placement"] = {"a": [0, 1], "b": [2, 3], "idle": []}  # that of the runs
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return [tmp_path / f"{name}.json" for name in ("profile", "plan", "alone", "several")]


@pytest.mark.leaks_ok  # the library that packs the charts' scripts keeps its threads
def test_documents_of_commands_are_compared(command, documents, tmp_path):
    out = tmp_path / "compared.html"
    code, printed, errors = command("report", *documents, "--out", out, "--json")
    assert code == 0, errors
    found = json.loads(printed)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["profile.json", "plan.json", "plan.json: alone", "alone.json", "several.json"]
    assert [row["kind"] for row in found["rows"]] == ["profile", "plan", "plan, alone", "run", "run"]
    measured = json.loads(documents[2].read_text(encoding="utf-8"))
    assert rows["alone.json"]["latency_ms"] == measured["latency_ms"]["p50"]
    assert rows["alone.json"]["accuracy"] == measured["top1"]
    assert (rows["alone.json"]["at_once"], rows["several.json"]["at_once"]) == (1, 32)
    pairs = {(pair["run"], pair["figure"]): pair for pair in found["planned_against_measured"]}
    assert set(pairs) == {("alone.json", "latency_ms"), ("several.json", "throughput")}
    pair = pairs["alone.json", "latency_ms"]
    planned = json.loads(documents[1].read_text(encoding="utf-8"))["expected"]["latency_ms"]
    assert (pair["value"], pair["measured"]) == (planned, measured["latency_ms"]["p50"])
    assert pair["ratio"] == pytest.approx(pair["measured"] / planned, abs=1e-3)
    alone = {(pair["run"], pair["figure"]): pair for pair in found["fleet_against_alone"]}
    assert set(alone) == {("alone.json", "latency_ms")}  # the profile has one image in flight, the other run 32
    (apart,) = found["not_compared"]
    assert (apart["document"], apart["run"]) == ("profile.json", "several.json")
    assert "run --local 1 --concurrency 32" in apart["reason"]
    pair = alone["alone.json", "latency_ms"]
    assert (pair["other"], pair["value"]) == ("profile.json", rows["profile.json"]["latency_ms"])
    assert pair["ratio"] == pytest.approx(rows["alone.json"]["latency_ms"] / pair["value"], abs=1e-3)
    page = out.read_text(encoding="utf-8")
    assert "The fleet and one device alone" in page
    assert "several.json" in page
    answer = re.search(r'<p class="lede">(.*?)</p>', page)[1].replace("\N{NO-BREAK SPACE}", " ")
    for pair in (*found["planned_against_measured"], *found["fleet_against_alone"]):
        assert f"{pair['run']} has {pair['ratio']:.2f} times" in answer
    specs = re.findall(r'<script type="application/json" id="[^"]*">(.*?)</script>', page)
    drawn = [
        {row["document"]: row["value"] for row in rows_of(json.loads(spec)) if "document" in row} for spec in specs
    ]
    for figure in ("latency_ms", "throughput"):
        values = {name: row[figure] for name, row in rows.items() if row[figure] is not None}
        assert values in [{name: pytest.approx(value) for name, value in one.items()} for one in drawn]
    assert "Planned and measured" in page
    code, printed, _ = command("report", *documents)
    assert code == 0
    assert "images / s" in printed
    assert printed.split("\n")[0].startswith(answer[:40])


def test_the_answer_compares_only_runs_under_the_same_load(command, documents, tmp_path):
    run = json.loads(documents[2].read_text(encoding="utf-8"))
    faster = run | {"latency_ms": {name: 0.5 * value for name, value in run["latency_ms"].items()}}
    (tmp_path / "faster.json").write_text(json.dumps(faster), encoding="utf-8")
    code, printed, errors = command("report", *documents[2:], tmp_path / "faster.json")
    assert code == 0, errors
    answer = printed.partition("\n")[0]
    p50 = run["latency_ms"]["p50"]
    assert f"faster.json {show_ms(0.5 * p50)}, alone.json {show_ms(p50)}." in answer
    assert answer.count("several.json") == 1  # its accuracy
    code, printed, _ = command("report", documents[0])
    assert printed.startswith("No two of these documents")


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ({"a": [0, 1]}, "the run used peer b, which has no blocks in the plan"),
        ({"a": [0, 1], "b": [2, 3], "c": [3]}, "the plan has peer c, which the run did not use"),
        ({"a": [0], "b": [1, 2, 3]}, "a has blocks 0 in the plan, 0-1 in the run"),
    ],
)
def test_a_plan_is_not_compared_with_a_run_of_another_placement(command, documents, tmp_path, placement, reason):
    plan = json.loads(documents[1].read_text(encoding="utf-8"))
    documents[1].write_text(json.dumps(plan | {"placement": placement}), encoding="utf-8")
    out = tmp_path / "compared.html"
    code, printed, errors = command("report", *documents, "--out", out, "--json")
    assert code == 0, errors
    found = json.loads(printed)
    assert found["planned_against_measured"] == []
    assert [one for one in found["not_compared"] if one["document"] == "plan.json"] == [
        {"document": "plan.json", "run": name, "reason": reason} for name in ("alone.json", "several.json")
    ]
    assert reason in out.read_text(encoding="utf-8")
    code, printed, _ = command("report", *documents)
    assert code == 0
    assert f"plan.json and alone.json are not compared: {reason}" in printed


def test_an_evaluation_and_a_benchmark_have_rows(tmp_path):
    found = Evaluation(
        SequentialAccuracy(0.9), Arbitrary(0.8, 0.05, 0.7, 0.6, 64), kept={}, position_accuracy=None, images=10
    )
    (tmp_path / "e.json").write_bytes(msgspec.json.encode(found))
    times = Times(4.0, 5.0, 3.0)
    timed = Bench(
        stem_ms=times, head_ms=times, blocks_ms=[times], chain_ms=times, repeats=9, slowdown=1.0, power_watts=None,
        energy_mj_per_image=None, bundle_id="x", model="vit", precision="fp16", engine="onnx", provider="cpu",
        threads=2, batch=2, duration=1.0, memory_bytes=0, monolith_ms=None, chain_over_monolith=None,
        monolith_default_ms=None, monolith=None, monolith_reason="not asked for",
    )  # fmt: skip
    (tmp_path / "b.json").write_bytes(msgspec.json.encode(timed))
    rows = side_by_side([tmp_path / "e.json", tmp_path / "b.json"]).rows
    assert [(row.name, row.accuracy, row.throughput) for row in rows] == [
        ("e.json", 0.9, None), ("e.json: any order", 0.8, None), ("b.json", None, 500.0),
    ]  # fmt: skip


def test_accuracies_on_other_images_are_said_to_be(command, tmp_path):
    found = Evaluation(
        SequentialAccuracy(0.9), Arbitrary(0.8, 0.05, 0.7, 0.6, 64), kept={}, position_accuracy=None, images=10
    )
    for name, data in (("a", "photos"), ("b", "photos"), ("c", "digits")):
        document = msgspec.structs.replace(found, settings={"data": data})
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(document))
    answers = []
    for names in ("ab", "abc"):
        code, printed, errors = command("report", *(tmp_path / f"{name}.json" for name in names))
        assert code == 0, errors
        assert "trained order, 10 images of photos" in printed
        answers.append(printed.partition(":")[0])
    assert answers == ["Highest accuracy", "Highest accuracy, on different images"]


def test_other_files_are_refused(command, tmp_path):
    for name, text, message in (
        ("none.json", None, "no such file"),
        ("text.json", "hello", "is not JSON"),
        ("list.json", "[]", "not a document that can be compared"),
        ("other.json", "{}", "not a document that can be compared"),
        ("half.json", '{"chain_ms": 1, "monolith_ms": 2}', "has the keys of a known document, not its values"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
        code, _, errors = command("report", tmp_path / name)
        assert (code, message in errors) == (1, True), errors
    code, _, errors = command("report", tmp_path / "text.json", "--out", tmp_path)
    assert (code, "is a folder" in errors) == (2, True), errors
