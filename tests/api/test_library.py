"""The package as a library: functions, results, and what is left behind after several rounds in one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ls_edge
from ls_edge.core.errors import RunError, UsageError

DOCUMENT = Path(__file__).parents[2] / "docs" / "train.md"
COURSE_S = float(os.environ.get("LIBRARY_COURSE_S", "0"))
"""Least duration of the rounds in one process; two take about half a minute (1800 needs ``--timeout 2400``)."""

ROUNDS = """
import asyncio, gc, itertools, json, logging, os, signal, sys, threading, time, warnings
import torch

def state():
    gc.collect()
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    root, own = logging.getLogger(), logging.getLogger("ls_edge")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(what for what in found.values() if not what.startswith(("/proc/", "/dev/", "/sys/"))),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "logging": [root.level, len(root.handlers), own.level, own.propagate]
        + [str(handler) for handler in own.handlers if not isinstance(handler, logging.NullHandler)],
        "torch": [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()],
        "random": torch.random.initial_seed(),
        "environment": sorted({*os.environ} - {"ORT_DISABLE_TELEMETRY", "TORCHINDUCTOR_CACHE_DIR"}),  # torch's, private
        "descriptors": len(found),
    }

code = compile(sys.stdin.read(), "docs/train.md", "exec")
import ls_edge
from ls_edge.data.datasets import open_data
before, until = state(), time.monotonic() + float(sys.argv[1])
for number in itertools.count():
    if number >= 2 and time.monotonic() > until:
        break
    os.mkdir(str(number))
    os.chdir(str(number))
    exec(code, {})
    open("random.py", "w").write("raise SystemExit")  # which no process may import
    with ls_edge.Cluster("exported", peers=1) as cluster, cluster.source() as source:
        images = open_data("digits", "eval").images[:3]
        async def answer_all():
            return await asyncio.gather(*(source.classify(image.read()) for image in images))
        assert len(asyncio.run(answer_all())) == 3
    os.chdir("..")
    del cluster, source
    print("STATE", json.dumps([before, state()]))
"""


def program(heading):
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", text, re.S)[1]


@pytest.mark.release
def test_rounds_in_one_process_leave_nothing_behind(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:ls_edge", "-c", ROUNDS, str(COURSE_S)],
        input=program("In Python"), capture_output=True, text=True, timeout=150 + COURSE_S, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    states = [json.loads(line.removeprefix("STATE ")) for line in lines if line.startswith("STATE ")]
    assert len(states) >= 2
    for before, after in states:
        assert after == before
    said = [line for line in lines if not line.startswith("STATE ")]
    assert [line for line in said if line.startswith("1 of 1: ")] == [said[0]] * len(states)  # the same seed
    assert said[1].startswith("run: vit_digits")
    assert any("trained order: accuracy" in line for line in said[: len(said) // len(states)])


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_results_print_like_the_commands_and_draw_themselves(tiny_bundle, command):
    options = {"orders": 2, "limit": 20, "threads": 1}
    steps = []
    result = ls_edge.evaluate(tiny_bundle, "digits", keep=[2], on_progress=lambda *step: steps.append(step), **options)
    code, out, errors = command(
        "eval", tiny_bundle, "--data", "digits", "--orders", 2, "--limit", 20, "--threads", 1, "--keep", 2
    )
    assert code == 0
    said = str(result).splitlines()
    table = [line.rstrip() for line in out.splitlines()]
    assert said[: len(table)] == table
    assert set(said[len(table) :]) <= set(errors.splitlines())  # remarks
    assert steps[-1][:2] == (20, 20)
    drawn = result._repr_html_()
    assert drawn.startswith("<pre>")
    assert "<svg" in drawn
    steps.clear()
    analysis = ls_edge.analyze(
        tiny_bundle, "digits", what=["importance", "slots"], on_progress=lambda *step: steps.append(step), **options
    )
    assert steps[-3:] == [(20, 20, "images"), (0, 2, "importance"), (1, 2, "slots")]
    assert str(analysis).splitlines()[0].startswith(str(tiny_bundle))
    assert "<svg" in analysis._repr_html_()


def test_wrong_arguments_are_usage_errors(tmp_path, tiny_bundle):
    with pytest.raises(UsageError, match="'epoch' is not a setting of training"):
        ls_edge.train("digits", tmp_path / "run", epoch=1)
    with pytest.raises(UsageError, match="no data"):
        ls_edge.train(out=tmp_path / "run")
    with pytest.raises(RunError, match="neither a run"):
        ls_edge.evaluate(tmp_path, "digits")
    with pytest.raises(UsageError, match="not a kind of analysis"):
        ls_edge.analyze(tiny_bundle, "digits", what=["color"])
    with pytest.raises(UsageError, match="60 peers: this bundle needs 1 to 6"):
        ls_edge.Cluster(tiny_bundle, peers=60)
    with pytest.raises(UsageError, match="use it in a with statement"):
        ls_edge.Cluster(tiny_bundle, peers=2).source()
