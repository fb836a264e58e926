"""``ls-edge reproduce``: plans, their cost, a kill and a restart, table and figure, bad input."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from PIL import Image

from ls_edge.cli.commands.reproduce import Options, _evaluate
from ls_edge.data.datasets import open_data
from ls_edge.training.config import find_recipe, read_config
from ls_edge.training.models.small_models import build
from ls_edge.training.reproduction import PLANS, find_plan, read_plan
from ls_edge.training.runs.checkpoint import load_run
from tests.training.commands import call

MODEL = {"name": "vit_digits", "args": {"embed_dim": 16, "depth": 4, "num_heads": 2}}
COMMON = {"batch_size": 4, "precision": "fp32", "epochs": 1}
PLAN = {
    "title": "tiny",
    "data": {"marks": {}},
    "start": {"marks": {"config": {"model": MODEL, "method": "sequential", **COMMON}}},
    "rows": {
        "shuffle": {"data": "marks", "config": {"method": "shuffle", **COMMON}},
        "depth2": {"data": "marks", "config": {"method": "sequential", **COMMON, "model": {"depth": 2}}},
    },
    "keep": [2, 3],
}


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """Return a folder with a plan and small images in a train and a val part."""
    folder = tmp_path_factory.mktemp("reproduce")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("dark", "light")):
            (folder / "marks" / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 240, (16, 16, 3), dtype=np.uint8) + 3 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / "marks" / part / name / f"{part}{index}.png")
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN, sort_keys=False))
    return folder


def words(marks, out, *more):
    return ["reproduce", marks / "plan.yaml", "--data", marks / "marks", "--out", out, "--seeds", 2, "--orders", 4,
            "--threads", 1, *more]  # fmt: skip


def weights(out):
    return {path.relative_to(out): path for path in sorted(out.glob("*/seed-*/model.safetensors"))}


@pytest.fixture(scope="module")
def whole(marks, tmp_path_factory):
    """Return the folder of a reproduction."""
    out = tmp_path_factory.mktemp("whole") / "whole"
    assert call(*words(marks, out)) == 0
    return out


@pytest.mark.leaks_ok("vl-convert keeps its runtime")
@pytest.mark.parametrize("name", ["shuffle", "depth2", "start-marks"])
def test_the_file_of_each_job_alone_repeats_its_training_bit_for_bit(whole, name, tmp_path):
    file = whole / "configs" / name / "seed-1.yaml"
    assert call("train", "--config", file, "--out", tmp_path / "again") == 0
    again, first = (folder / "model.safetensors" for folder in (tmp_path / "again", whole / name / "seed-1"))
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.leaks_ok("vl-convert keeps its runtime")
def test_other_numbers_of_blocks_to_keep_are_evaluated_again(marks, whole, tmp_path):
    run = shutil.copytree(whole / "shuffle" / "seed-0", tmp_path / "run")
    images, plan = open_data(str(marks / "marks"), "eval"), read_plan(marks / "plan.yaml")
    options = Options(seeds=2, epochs=None, orders=4, limit=None, device="cpu", threads=1, set=())
    before = (run / "eval.json").stat().st_mtime_ns
    assert set(_evaluate(run, images, plan, options).kept) == {"2", "3"}
    assert (run / "eval.json").stat().st_mtime_ns == before
    assert set(_evaluate(run, images, msgspec.structs.replace(plan, keep=[1]), options).kept) == {"1"}


@pytest.mark.slow
@pytest.mark.leaks_ok("vl-convert keeps its runtime")
def test_a_killed_reproduction_continues_to_the_same_results(marks, whole, tmp_path, capsys):
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "ls_edge", *map(str, words(marks, killed))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "shuffle" in line:
                break
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    finished = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in killed.glob("start-marks/seed-0/*")}
    assert killed / "start-marks" / "seed-0" / "model.safetensors" in finished
    assert not (killed / "results.json").exists()
    assert call(*words(marks, killed, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    results = [found, *(json.loads((out / "results.json").read_text()) for out in (killed, whole))]
    assert results[0] == results[1]
    for result in results:
        for cost in result["cost"].values():
            assert cost.pop("hours_per_seed") > 0
            assert cost["tflop_per_seed"] > 0
    assert results[1] == results[2]
    assert finished == {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in finished}
    assert weights(killed).keys() == weights(whole).keys()
    assert len(weights(whole)) == 6
    for name, path in weights(whole).items():
        assert path.read_bytes() == weights(killed)[name].read_bytes(), name

    # One table and one figure, from the evaluations of the runs.
    assert [row["row"] for row in found["rows"]] == ["shuffle", "depth2"]
    evaluations = {row["row"]: row["evaluation"] for row in found["rows"]}
    ones = [json.loads((whole / "shuffle" / f"seed-{seed}" / "eval.json").read_text()) for seed in (0, 1)]
    mean = np.mean([one["arbitrary"]["top1_mean"] for one in ones])
    assert evaluations["shuffle"]["arbitrary"]["top1_mean"] == pytest.approx(mean)
    assert evaluations["shuffle"]["models"]["count"] == 2
    assert evaluations["depth2"]["settings"]["blocks"] == 2
    assert set(evaluations["depth2"]["kept"]) == {"2"}
    table = (whole / "table.md").read_text().split("Paired")[0].splitlines()
    assert len([line for line in table if line.startswith("|")]) == 4
    headings, cells = (
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table if line[:5] in ("| row", "| shu")
    )
    in_order = evaluations["shuffle"]["kept"]["3"]["sequential"]
    assert cells[headings.index("3 kept, trained order")].startswith(f"{in_order:.3f} ± ")
    assert found["quantities"]["depth2"]["2 kept"] == found["quantities"]["depth2"]["random order"]
    assert [(one["one"], one["other"]) for one in found["comparisons"]] == [("shuffle", "depth2")] * 2
    assert found["overridden"]["orders"] == 4
    assert set(found["made_with"]) == {"ls-edge", "torch", "timm", "machine"}
    assert f"{mean:.3f} ± " in next(line for line in table if line.startswith("| shuffle"))
    texts = "".join(ElementTree.parse(whole / "figure.svg").getroot().itertext())
    assert "sequential" in texts  # the method of depth2
    assert "shuffle" in texts

    # Every run begins from the start of its seed, and its file repeats it.
    for seed in (0, 1):
        run = load_run(whole / "shuffle" / f"seed-{seed}")
        assert (run.config.seed, run.config.model.init) == (seed, str(whole / "start-marks" / f"seed-{seed}"))
    settings, _ = read_config(whole / "configs" / "depth2" / "seed-0.yaml", {})
    assert (settings.method, settings.model.depth) == ("sequential", 2)

    # What is finished with other settings is not mixed with new ones.
    before = {path: path.stat().st_mtime_ns for path in weights(whole).values()}
    assert call(*words(marks, whole, "--epochs", 2)) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "seed-0 was trained with other settings: epochs is 1, not 2; give another --out" in line
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.leaks_ok("vl-convert keeps its runtime")
def test_trainings_run_as_separate_jobs(marks, tmp_path, capsys):
    out = tmp_path / "jobs"
    again = [*words(marks, out, "--epochs", 2, "--set", "optim.clip=0.5"), "--seeds", 1]
    assert call(*again, "--list-jobs") == 0
    first, second = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    assert (len(first), len(second)) == (1, 2)
    for line in (*first, *second):
        assert call(*shlex.split(line)[1:]) == 0
    trained = {path: path.stat().st_mtime_ns for path in weights(out).values()}
    assert len(trained) == 3
    assert load_run(out / "shuffle" / "seed-0").config.optim.clip == 0.5
    assert call(*again) == 0
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    assert (out / "table.md").exists()


def test_the_cost_is_counted_from_the_model(capsys):
    assert call("reproduce", "digits", "--dry-run", "--only", "sequential", "--seeds", 3, "--tflops", 2, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    start, row = found["rows"]
    forward = build("vit_digits", {"num_classes": 10}).work.forward
    train, held = 1438, 144
    seen = (train - held) // 64 * 64 * 4
    assert (start["name"], row["name"], row["trained_images"]) == ("start-digits", "sequential", seen)
    assert row["training_flops"] == pytest.approx(3 * forward * seen + 4 * held * forward)
    assert row["evaluation_flops"] > 64 * 359 * 0.5 * forward
    assert start["evaluation_flops"] == 0
    total = 3 * sum(item["training_flops"] + item["evaluation_flops"] for item in found["rows"])
    assert found["total_flops"] == pytest.approx(total)
    assert found["hours"] == pytest.approx(total / 2e12 / 3600)


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
def test_the_plans_of_the_package_are_valid(name):
    plan = read_plan(find_plan(name))
    for row in plan.rows.values():
        if row.recipe is not None:
            assert find_recipe(Path(row.recipe)).is_file()
    for data in plan.data:
        assert sum(row.figure for row in plan.rows.values() if row.data == data) <= 8


def test_the_paper_plan_has_every_recipe_of_the_paper():
    used = {row.recipe for row in read_plan(find_plan("paper")).rows.values()}
    recipes = {path.stem for path in (PLANS.parent / "recipes").glob("*.yaml")}
    assert used == recipes - {"vit_b_imagenet_anyorder"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["papers"], "no such file and no plan 'papers'; the plans are cifar10, digits, paper"),
        (["digits"], "there is no folder to write to; give --out DIR"),
        (["digits", "--only", "dropout"], "--only dropout: the plan has no such row or data set; rows are sequential"),
        (["digits", "--data", "mnist=x"], "--data mnist=...: the plan's data sets are digits"),
        (["paper", "--data", "x", "--dry-run"], "write --data NAME=DATA"),
        (["paper", "--out", "out"], "the plan needs the data set imagenet: give --data imagenet=DATA"),
        (["cifar10", "--data", "nowhere", "--out", "out"], "nowhere: no such folder or tar"),
        (["digits", "--tflops", "1", "--out", "out"], "--tflops is for --dry-run"),
        (["digits", "--out", "file"], "Invalid value for '--out': Directory 'file' is a file"),
        (["wrong.yaml", "--out", "out"], "wrong.yaml:3:"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "wrong.yaml").write_text("title: t\ndata: {a: {}}\nrows: {one: {data: b}}\n")
    assert call("reproduce", *arguments) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (tmp_path / "out").exists()
