"""``examples/paper``: the table and the figure of a small plan, a kill and a restart, and the plans of the folder."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from ls_edge.training.config import find_recipe

FOLDER = Path(__file__).parents[2] / "examples" / "paper"
SMALL = {"name": "vit_digits", "args": {"embed_dim": 16, "depth": 4, "num_heads": 2}}
COMMON = {"batch_size": 256, "precision": "fp32", "epochs": 1}
PLAN = {
    "title": "tiny",
    "data": {"numbers": "digits"},
    "start": {"numbers": {"config": {"model": SMALL, "method": "sequential", **COMMON}}},
    "rows": {
        "shuffle": {"data": "numbers", "config": {"method": "shuffle", **COMMON}},
        "depth2": {"data": "numbers", "config": {"method": "sequential", **COMMON, "model": {"depth": 2}}},
    },
    "keep": [2, 3],
}


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_killed_comparison_continues_to_the_table_of_its_evaluations(tmp_path):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN, sort_keys=False))
    out = tmp_path / "out"
    command = [sys.executable, FOLDER / "reproduce.py", tmp_path / "plan.yaml", "--out", out, "--seeds", "2",
               "--orders", "4", "--limit", "64", "--set", "threads=1"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        next(line for line in process.stdout if "depth2, seed 0" in line)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/seed-0/model.safetensors")}
    assert {path.parts[-3] for path in before} >= {"start-numbers", "shuffle"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kept = [path for path in before if path.parts[-3] != "depth2"]
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)

    seeds = {
        row: [json.loads((out / row / f"seed-{seed}" / "eval.json").read_text()) for seed in (0, 1)]
        for row in PLAN["rows"]
    }
    means = {row: np.array([one["arbitrary"]["top1_mean"] for one in found]) for row, found in seeds.items()}
    text = (out / "table-numbers.md").read_text()
    assert text in done.stdout
    main, pairs = ([line[2:-2].split(" | ") for line in part.splitlines() if "|" in line]
                   for part in text.split("\n\n")[1:])  # fmt: skip
    cells = dict(zip(main[0], main[2], strict=True))
    assert (cells["row"], cells["blocks"]) == ("shuffle", "4")
    assert cells["random order"] == f"{means['shuffle'].mean():.3f} ± {means['shuffle'].std(ddof=1):.3f}"
    assert dict(zip(main[0], main[3], strict=True))["3 kept"].strip() == ""
    test = stats.ttest_rel(means["shuffle"], means["depth2"])
    difference = (means["shuffle"] - means["depth2"]).mean()
    assert pairs[-1][:4] == ["random order", "shuffle", "depth2", f"{difference:+.3f}"]
    assert pairs[-1][-2:] == [f"{test.pvalue:.3f}"] * 2  # one comparison
    rows = [line for line in (out / "table-numbers.tex").read_text().splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {len(main[0]) - 1}
    assert "shuffle" in "".join(ElementTree.parse(out / "figure-numbers.svg").getroot().itertext())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_plans_are_valid(path):
    plan = yaml.safe_load(path.read_text())
    for row in (*plan["rows"].values(), *plan.get("start", {}).values()):
        assert row.keys() <= {"data", "recipe", "config", "figure"}
        assert "recipe" not in row or find_recipe(Path(row["recipe"])).is_file()
    for data in plan["data"]:
        drawn = [row for row in plan["rows"].values() if row["data"] == data and row.get("figure", True)]
        assert 1 <= len(drawn) <= 8  # of a figure
