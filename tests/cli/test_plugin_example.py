"""The package of examples/plugin, installed: its method, model family, policy and codec from training to a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "source")
    words = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words), tmp_path / "source"], check=True, timeout=120)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


@pytest.mark.release
@pytest.mark.timeout(600)
def test_the_example_trains_exports_and_runs_with_its_own_method_family_and_policy(ls_edge, installed, tmp_path):
    def run(*words):
        done = ls_edge.run(*words, env=installed, timeout=120)
        assert done.returncode in (0, 3), done.stderr
        return done.stdout

    run("train", "--data", "digits", "--model", "token_mlp", "--method", "both-ways", "--epochs", 1, "--threads", 1,
        "--set", "method_args.every=3", "--out", tmp_path / "run")  # fmt: skip
    run("export", tmp_path / "run", "--out", tmp_path / "bundle", "--per-block")
    found = json.loads(
        run("run", "--local", 2, "--bundle", tmp_path / "bundle", "--data", "digits", "--limit", 20, "--policy",
            "last-first", "--trace", tmp_path / "trace", "--json")
    )  # fmt: skip
    assert (found["answered"], found["policy"]) == (20, "last-first")
    orders = [json.loads(line)["order"] for line in (tmp_path / "trace").read_text().splitlines()]
    assert all([block for block, _ in order] == [5, 4, 3, 2, 1, 0] for order in orders)
    peers = tmp_path / "peers.yaml"
    entries = [f"- {{name: p{port}, address: 'tcp://127.0.0.1:{port}', blocks: all, codec: top-half}}\n"
               for port in free_ports(2)]  # fmt: skip
    peers.write_text("peers:\n" + "".join(entries))
    for peer in load_peers(peers).peers:
        ls_edge.start("peer", "--peers", peers, "--name", peer.name, "--bundle", tmp_path / "bundle", env=installed,
                      stderr=None)  # fmt: skip
    found = json.loads(
        run("run", "--peers", peers, "--bundle", tmp_path / "bundle", "--data", "digits", "--limit", 20, "--wait", 60,
            "--policy", "last-first", "--audit", 1, "--json")
    )  # fmt: skip
    assert (found["answered"], found["audit"]["mismatched"]) == (20, 0)
    done = ls_edge.run("run", "--local", 1, "--bundle", tmp_path / "bundle", "--data", "digits", "--policy",
                       "last-frist", env=installed)  # fmt: skip
    assert (done.returncode, "did you mean 'last-first'?" in done.stderr) == (2, True), done.stderr
    done = ls_edge.run("train", "--data", "digits", "--out", tmp_path / "x", "--method", "both-ways", "--set",
                       "method_args.every=1", env=installed, timeout=120)  # fmt: skip
    assert (done.returncode, "every is 1" in done.stderr) == (2, True), done.stderr
