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


def test_each_part_is_compared(tiny_bundle):
    done = numbers(tiny_bundle)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"block \d' status='building an engine for TensorRT ", done.stderr)) == 6
    assert done.stdout.count("layers of block 0:\neverything: kgen, Float\n") == 1
    assert done.stdout.startswith("power mode, which engines are tuned for: ")
    for part in ("stem", "block 0", "block 5", "head", "chain"):
        (error,) = re.findall(rf"^{part}: relative error: (.*)$", done.stdout, re.M)
        assert 0 <= float(error) < 1e-5


def test_without_tensorrt_errors_are_those_against_the_export(tiny_bundle, tmp_path):
    bundle = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    outputs = bundle.manifest.verified["outputs"]
    names = ["stem", *(f"block {index}" for index in range(6)), "head", "chain"]
    assert list(outputs) == names
    assert len(json.dumps(outputs)) < 4096
    outputs["block 3"][7] += 0.5 * max(map(abs, outputs["block 3"]))
    del outputs["head"]
    write_manifest(bundle.folder, bundle.manifest)
    done = numbers(bundle.folder, doubles=False)
    assert done.returncode == 0
    assert "\nonnx CPUExecutionProvider (not tensorrt: " in done.stdout
    found = re.findall(r"^(.*): relative error: (\S+)$", done.stdout, re.M)
    assert {name: float(error) > 1e-6 for name, error in found} == {name: name == "block 3" for name in names}
