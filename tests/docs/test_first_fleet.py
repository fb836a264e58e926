"""``docs/fleet.md`` from the first command to the report, as it is written: each machine in a folder of its own.

A machine has what its commands wrote and what was copied to it, so a command on the wrong machine fails.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
import zmq

from ls_edge.cli.main import COMMANDS
from ls_edge.runtime.fleet.local_cluster import free_ports

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BOARDS = ("orin-0", "orin-1")

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def blocks(language):
    """Machines and lines of each block of code, in order."""
    for content in re.findall(rf"```{language}\n(.*?)```", TEXT, re.S):
        first, *lines = content.splitlines()
        yield re.findall(r"laptop|orin-\d", first), lines


class Machines:
    """Folders that stand for machines, and the programs that run there."""

    def __init__(self, folder, ls_edge, make_bundle, wait_until):
        self.ls_edge, self.make_bundle, self.wait_until = ls_edge, make_bundle, wait_until
        self.folders = {name: folder / name for name in ("laptop", *BOARDS)}
        for path in self.folders.values():
            path.mkdir()
        (self.folders["laptop"] / "examples").symlink_to(ROOT / "examples")
        self.ran = set()

    def type(self, machine, line):
        """Run a line on a machine; return what it printed."""
        line, _, printed = line.partition(" > ")
        program, *words = shlex.split(line)
        here = self.folders[machine]
        if program == "scp":
            *files, target = words
            for file in files:
                shutil.copy(here / file, self.folders[target.rstrip(":")])
            return ""
        if program == "cp":
            shutil.copy(*(here / word for word in words))
            return ""
        assert program == "ls-edge", line
        self.ran.add(words[0])
        environment = {**os.environ, "HOME": str(here)}
        if words[:2] == ["export", "examples/cifar10"]:  # whose export has tests of its own
            self.make_bundle(here / words[words.index("--out") + 1], blocks=8, classes=CLASSES)
            return ""
        if words[0] == "peer":
            log = here / "peer.log"
            with log.open("wb") as stderr:
                self.ls_edge.start(*words, stderr=stderr, cwd=here, env=environment)
            # doctor reports a peer that does not listen yet; a reader types it when the peers have said that they do
            self.wait_until(lambda: b" listening " in log.read_bytes(), 100, line)
            return ""
        done = self.ls_edge.run(*words, timeout=200, cwd=here, env=environment)
        # doctor speaks of this machine, which may also throttle
        allowed = {"doctor": (0, 1), "bench": (0, 3)}.get(words[0], (0,))
        assert done.returncode in allowed, (line, done.stdout, done.stderr)
        if words[0] == "peers":
            self.bring_home(here / "peers.yaml")
        if printed:
            (here / printed).write_text(done.stdout, encoding="utf-8")
        return done.stdout

    @staticmethod
    def bring_home(path):
        """Put the boards of a file on this machine."""
        text = path.read_text(encoding="utf-8")
        for name, port in zip(BOARDS, free_ports(len(BOARDS)), strict=True):
            text = text.replace(
                f'"tcp://{name}:5555", bind: "tcp://0.0.0.0:5555"',
                f'"tcp://127.0.0.1:{port}", bind: "tcp://127.0.0.1:{port}"',
            )
        path.write_text(text, encoding="utf-8")


@pytest.mark.release
@pytest.mark.timeout(900)  # 363 s at a load of 9 on two cores
def test_from_the_first_command_to_the_report(tmp_path, make_bundle, ls_edge, wait_until):
    machines = Machines(tmp_path, ls_edge, make_bundle, wait_until)
    laptop = machines.folders["laptop"]
    printed = ""
    for where, lines in blocks("bash"):
        (machine,) = where
        for line in lines:
            printed = machines.type(machine, line)
            if " doctor " in line:
                assert re.search(r"orin-0 +ok +\d+ checks", printed), printed
                assert re.search(r"orin-1 +ok +\d+ checks", printed), printed
    assert machines.ran == {
        "export", "peers", "peer", "doctor", "status", "run", "bench", "plan", "apply", "report",
    }  # fmt: skip
    assert json.loads((laptop / "orin-0.json").read_text(encoding="utf-8"))["device"]["name"] == "orin-0"
    planned = yaml.safe_load((laptop / "planned.yaml").read_text(encoding="utf-8"))
    assert {entry["name"] for entry in planned["peers"]} <= {*BOARDS}
    assert "<html" in (laptop / "report.html").read_text(encoding="utf-8")[:1000]
    for board in BOARDS:
        files = {path.name for path in machines.folders[board].iterdir()}
        assert files >= {"peers.yaml", f"{board}.key_secret", "store"}
        assert not (machines.folders[board] / "laptop.key_secret").exists()


def test_the_example_has_a_picture_of_each_class():
    pictures = sorted((ROOT / "examples" / "cifar10" / "images").glob("*/*.jpg"))
    assert tuple(path.parent.name for path in pictures) == CLASSES
    assert sum(path.stat().st_size for path in pictures) < 20_000


def test_lines_that_are_not_run_only_install():
    pip = r'pip download|pip install (--no-index|"\$\(ls ls_edge-\*\.whl\)\[)'
    allowed = rf"sudo |python -m build|for board in .*scp|(/usr/bin/)?python3 -m venv|{pip}|ls-edge doctor"
    for where, lines in blocks("sh"):
        assert where
        for line in lines:
            assert re.match(allowed, line), line
            assert not line.startswith("ls-edge") or line.split()[1] in COMMANDS
