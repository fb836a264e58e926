"""The bundles of the runtime's tests, and peers that run JavaScript."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ls_edge.runtime.fleet.local_cluster import LocalCluster

HERE = Path(__file__).parent
LEAST_NODE = 18


@pytest.fixture(scope="session")
def node():
    """The program that runs JavaScript; where there is none that is new enough, the test is skipped."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("node is not installed, so there is nothing to run the second implementation with")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < LEAST_NODE:
        pytest.skip(f"node {version} is too old for the second implementation; {LEAST_NODE} is the least")
    return path


class MixedPeers(LocalCluster):
    """Local peers, of which those in ``javascript`` run ``minimal_peer.mjs``."""

    def __init__(self, folder, bundle, placement, *, node, javascript, **named):
        self._node, self._javascript = node, javascript
        super().__init__(folder, bundle, placement, **named)
        self.json = self.folder / "peers.json"
        self.json.write_text(json.dumps(yaml.safe_load(self.path.read_text())), encoding="utf-8")

    def start(self, *names):
        for name in names:
            if name not in self._javascript:
                super().start(name)
                continue
            self._close_input(name)
            self._log_from[name] = self.log_path(name).stat().st_size if self.log_path(name).exists() else 0
            command = [self._node, HERE / "minimal_peer.mjs", self.json, name, self.bundles[name]]
            command += filter(None, [self.secret_key(name)])
            with self.log_path(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def left(self, name):
        """What a peer in JavaScript said when it left."""
        lines = self.log_path(name).read_text(encoding="utf-8").splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        return next(line for line in reversed(said) if line["event"] == "left")

    def address(self, name):
        """Host and port where a peer listens."""
        host, port = self.file.peer(name).bind.removeprefix("tcp://").rsplit(":", 1)
        return host, int(port)


@pytest.fixture
def mixed(node, tiny_bundle, tmp_path):
    """Make peers of a placement, some of them in JavaScript; a context manager."""

    def make(placement, *javascript, bundle=tiny_bundle, **named):
        return MixedPeers(tmp_path, bundle, placement, node=node, javascript=javascript, **named)

    return make
