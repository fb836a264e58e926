"""Numbers for the report of a board, on doubles of CUDA and TensorRT and without them."""

import json
import os
import re
import shutil
import subprocess
import sys

from ls_edge.core.bundle import Bundle, write_manifest
from tests.engines.conftest import DOUBLES


def numbers(*words, doubles=True):
    path = os.pathsep.join(filter(None, (str(DOUBLES) if doubles else "", os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "ls_edge.engines.board_numbers", *map(str, words)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert "left at exit" not in done.stderr
    return done


def test_each_part_is_compared_in_two_builds_with_and_without_graphs(tiny_bundle):
    done = numbers("errors", tiny_bundle)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"block \d' status='building an engine: this file has none yet", done.stderr)) == 12
    assert done.stdout.count("layers of block 0:\nLayers:") == 2
    assert "verbosity 2" in done.stdout
    assert done.stdout.startswith("power mode, which engines are tuned for: ")
    for part in ("stem", "block 0", "block 5", "head", "chain"):
        (line,) = re.findall(rf"^{part}: relative error: (.*)$", done.stdout, re.M)
        found = dict(re.findall(r"((?:first|second) build(?:, no graphs)?) (\S+?)(?:, |$)", line))
        assert list(found) == ["first build", "first build, no graphs", "second build", "second build, no graphs"]
        assert all(0 <= float(error) < 1e-5 for error in found.values())


def test_blocks_run_at_their_slots_in_every_split_and_tensorrts_warnings_are_shown(slot_bundle):
    done = numbers("errors", slot_bundle)
    assert done.returncode == 0, done.stderr
    assert "text='Make sure input slot has Int64 binding.'" in done.stderr
    differences = re.findall(r"build, a visit for each block (\S+),", done.stdout)
    assert [float(difference) < 1e-6 for difference in differences] == [True, True]


def test_visits_are_timed_with_and_without_graphs(tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path))
    done = numbers("visits", tiny_bundle, "spin")
    assert done.returncode == 0, done.stderr
    for graphs in ("graphs", "no graphs"):
        assert re.search(rf"^device buffers, {graphs}, spin waits: 1 block .* ms .*, 6 blocks ", done.stdout, re.M)


def test_without_tensorrt_the_numbers_say_so_and_errors_are_those_against_the_export(tiny_bundle, tmp_path):
    done = numbers("visits", tiny_bundle, "usual", doubles=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search("tensorrt is not installed|CUDA runtime cannot be used", done.stderr)
    bundle = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    outputs = bundle.manifest.verified["outputs"]
    names = ["stem", *(f"block {index}" for index in range(6)), "head", "chain"]
    assert list(outputs) == names
    assert len(json.dumps(outputs)) < 4096
    outputs["block 3"][7] += 0.5 * max(map(abs, outputs["block 3"]))
    del outputs["head"]
    write_manifest(bundle.folder, bundle.manifest)
    done = numbers("errors", bundle.folder, doubles=False)
    assert done.returncode == 0
    assert "first build: onnx CPUExecutionProvider (not tensorrt: " in done.stdout
    found = re.findall(r"^(.*): relative error: first build (\S+), second build (\S+)$", done.stdout, re.M)
    assert {name: float(first) > 1e-6 for name, first, _ in found} == {name: name == "block 3" for name in names}
    assert all(first == second for _, first, second in found)
    (line,) = re.findall(r"^logits of honest boards differ, which audits have to tolerate: (.*)$", done.stdout, re.M)
    differences = {what: float(value) for what, value in re.findall(r"(first.*?|second.*?) (\d\S*?)(?:, |$)", line)}
    assert [what for what, value in differences.items() if value > 1e-6] == [
        "first build, float16 between blocks", "second build, float16 between blocks",
    ]  # fmt: skip
