"""``docs/peers.md``, "Without a store" and "Change keys", as it is written, while a run sends images."""

import functools
import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
import zmq
from PIL import Image

from ls_edge.runtime.fleet.local_cluster import free_ports

TEXT = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
ENTRY = re.search(r"```yaml\n(.*?)```", TEXT[TEXT.index("### Add, replace or remove a board") :], re.S)[1]
SECTION = TEXT[TEXT.index("### Without a store") : TEXT.index("## At the top")]

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


class Fleet:
    """Two boards, as ``docs/first-fleet.md`` leaves them, a run that lasts until it is stopped, and a shell."""

    def __init__(self, ls_edge, wait_until):
        self._ls_edge, self._wait_until = ls_edge, functools.partial(wait_until, timeout=60)
        self.processes = []
        ports = free_ports(2)
        lines = [f'  - {{name: orin-{n}, address: "tcp://127.0.0.1:{ports[n]}", blocks: "0-7"}}' for n in (0, 1)]
        Path("peers.yaml").write_text("\n".join(["sources:", "  - {name: laptop}", "peers:", *lines]) + "\n")
        for name in ("laptop", "orin-0", "orin-1"):
            self.shell(f"ls-edge keys new {name} --into peers.yaml")
        for name in ("orin-0", "orin-1"):
            self.shell(f"ls-edge peer --peers peers.yaml --name {name} --bundle bundle --secret-key {name}.key_secret")
        words = ["--peers", "peers.yaml", "--bundle", "bundle", "--data", "images", "--secret-key", "laptop.key_secret"]
        more = ["--limit", 200_000, "--rate", 40, "--concurrency", 8, "--policy", "fastest", "--trace", "trace.jsonl"]
        with Path("run.log").open("wb") as log:
            self.run = ls_edge.start("run", *words, *more, "--json", "--wait", 30, stderr=log)
        self.processes.append(self.run)
        self._wait_until(lambda: self.answered() > 20)

    def shell(self, line):
        """Do what a line of the document does; signals only reach processes of this fleet."""
        words = shlex.split(line)
        if words[:2] == ["ls-edge", "peer"]:
            with Path(f"{words[words.index('--name') + 1]}.log").open("ab") as log:
                self.processes.append(self._ls_edge.start(*words[1:], stderr=log))
        elif words[0] == "ls-edge":
            done = self._ls_edge.run(*words[1:])
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            return done.stdout
        elif words[0] == "pkill":
            number = signal.Signals[f"SIG{words[1].removeprefix('-')}"]
            chosen = [one for one in self.processes if one.poll() is None and re.search(words[3], _command_of(one))]
            assert chosen, line
            for process in chosen:
                process.send_signal(number)
            if number == signal.SIGTERM:
                assert [process.wait(10) for process in chosen] == [0]
        else:
            subprocess.run(line, shell=True, check=True)
        return ""

    def answered(self):
        return len(self.records())

    def records(self):
        path = Path("trace.jsonl")
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for(self, *names):
        """Wait until further requests were at these boards."""
        before = self.answered() + 8  # some are in flight

        def served():
            return {holder for record in self.records()[before:] for _, holder in record["order"]}

        self._wait_until(lambda: set(names) <= served())


def _command_of(process):
    return " ".join(process.args).replace("-m ls_edge", "ls-edge")


def edit(change):
    document = yaml.safe_load(Path("peers.yaml").read_text())
    change(document["peers"])
    Path("peers.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


@pytest.mark.release
@pytest.mark.timeout(300)
def test_boards_and_keys_change_without_a_failed_request(tmp_path, make_bundle, monkeypatch, ls_edge, wait_until):
    monkeypatch.chdir(tmp_path)
    make_bundle(tmp_path / "bundle", blocks=8)
    Path("images").mkdir()
    for index, pixels in enumerate(np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(f"images/{index}.png")
    fleet = Fleet(ls_edge, wait_until)
    ran = []
    entry = re.sub(r"tcp://[\d.]+:\d+", f"tcp://127.0.0.1:{free_ports(1)[0]}", ENTRY)
    Path("peers.yaml").write_text(Path("peers.yaml").read_text() + entry)
    for content in re.findall(r"```bash\n(.*?)```", SECTION, re.S):
        for line in content.splitlines():
            printed = fleet.shell(line)
            ran.append(line.split()[:2])
            if line.startswith("ls-edge peer"):
                fleet.wait_for(re.search(r"--name (\S+)", line)[1])
            if line.startswith("ls-edge status"):
                assert re.search(r"orin-2 +alive", printed), printed
            if "orin-1" in line:  # "then remove its entry"
                edit(lambda peers: peers.remove(next(one for one in peers if one["name"] == "orin-1")))
    fleet.wait_for("orin-0", "orin-2")
    assert [words for words in ran if words[0] == "ls-edge"] == [
        ["ls-edge", "keys"], ["ls-edge", "peer"], ["ls-edge", "status"], ["ls-edge", "keys"], ["ls-edge", "peer"],
        ["ls-edge", "keys"],
    ]  # fmt: skip
    fleet.run.send_signal(signal.SIGTERM)
    summary = json.loads(fleet.run.communicate(timeout=30)[0])
    assert fleet.run.returncode == 128 + signal.SIGTERM
    assert (summary["failed"], summary["degraded"]) == (0, 0)
    assert {name for name, one in summary["peers"].items() if one["requests"]} == {"orin-0", "orin-1", "orin-2"}
    assert Path("run.log").read_text().count("peers.yaml again") == 4
