"""``docs/first-fleet.md`` from the first command to the report, as it is written, on peers of this machine."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
import zmq
from PIL import Image

from ls_edge.cli.main import COMMANDS
from ls_edge.runtime.fleet.local_cluster import free_ports

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "first-fleet.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def blocks():
    """Language and content of each block of code, in order."""
    return re.findall(r"```(\w+)\n(.*?)```", TEXT, re.S)


def peers_yaml(text):
    """The document's, with the keys that were made and addresses of this machine."""
    ports = dict(zip(("orin-0", "orin-1"), free_ports(2), strict=True))
    lines = []
    for line in text.splitlines():
        for name in re.findall(r"what keys new (\S+) printed", line):
            key = re.search(r'public-key = "(.{40})"', Path(f"{name}.key").read_text())[1]
            line = line.replace(f"what keys new {name} printed", key)
        for name, port in ports.items():
            if f"name: {name}," in line:
                line = re.sub(r"tcp://[\d.]+:\d+", f"tcp://127.0.0.1:{port}", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(500)
def test_from_the_first_command_to_the_report(tmp_path, make_bundle, monkeypatch, ls_edge):
    monkeypatch.chdir(tmp_path)
    make_bundle(tmp_path / "bundle", blocks=8)  # for examples/cifar10, whose export has tests of its own
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (3, 40, 60, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{index}.jpg")
    ran = []
    for language, content in blocks():
        if language == "yaml":
            Path("peers.yaml").write_text(peers_yaml(content), encoding="utf-8")
        for line in content.splitlines() if language == "bash" else ():
            line, _, printed = line.partition(" > ")
            program, *words = shlex.split(line)
            assert program == "ls-edge"
            if words[0] == "peer":
                ls_edge.start(*words, stderr=None)
            elif words[0] == "doctor":  # its exit code speaks of this machine
                done = ls_edge.run(*words, timeout=200)
                assert done.returncode in (0, 1), done.stderr
                assert re.search(r"orin-0 +ok +\d+ checks", done.stdout), done.stdout
                assert re.search(r"orin-1 +ok +\d+ checks", done.stdout), done.stdout
            else:
                done = ls_edge.run(*words, timeout=120)
                throttles = words[0] == "profile" and "--links" not in words  # this machine may
                assert done.returncode in ((0, 3) if throttles else (0,)), (line, done.stdout, done.stderr)
                if printed:
                    Path(printed).write_text(done.stdout, encoding="utf-8")
            ran.append(words[0])
    assert set(ran) == {"keys", "status", "peer", "doctor", "push", "run", "profile", "plan", "report"}
    links = json.loads(Path("links.json").read_text(encoding="utf-8"))
    assert ("orin-0", "orin-1") in {(one["origin"], one["to"]) for one in links["transfers"]}  # which hold the same
    assert {entry["name"] for entry in yaml.safe_load(Path("planned.yaml").read_text())["peers"]} <= {
        "orin-0", "orin-1",
    }  # fmt: skip
    compared = done.stdout.splitlines()
    assert [line.split()[0] for line in compared if line.startswith("run.json  orin.json")] == ["run.json"]
    assert "<html" in Path("report.html").read_text(encoding="utf-8")[:1000]


def test_what_is_not_run_needs_other_machines_or_installs():
    for language, content in blocks():
        for line in content.splitlines() if language == "sh" else ():
            assert re.match(r"python -m build|ssh |for board in .*scp|ls-edge export examples/cifar10 ", line), line
            assert "ls-edge export" not in line or "export" in COMMANDS
