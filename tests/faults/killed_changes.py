"""Changes of a fleet whose pusher is killed at random moments; some kills or cuts off a peer, too."""

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.parts import shown_parts
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret
from tests.data import bombs
from tests.faults.applying import give

PLACEMENT = {"a": "all", "b": "stem, 0-5", "c": "2-5, head", "d": "stem, 0-3, head"}
MOVED = {"b": "stem, 0-3", "c": "0-5, head"}
"""Blocks that the second file gives to two of the peers."""
BUDGET_MS = 60_000


class Asking:
    """Requests of a source without a bundle, one after the other, during a ``with`` block."""

    def __init__(self, peers):
        self.source = Source(peers.file, keys=load_secret(peers.secret_key("desk")))
        self.failed, self.seconds, self._halt = [], [], threading.Event()
        self._thread = threading.Thread(target=self._ask, name="asking")

    def __enter__(self):
        assert self.source.wait_ready(60.0) == ()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._halt.set()
        self._thread.join(2 * BUDGET_MS / 1e3)
        self.source.close()

    def _ask(self):
        while not self._halt.wait(0.03):
            began = time.monotonic()
            future = self.source.submit(bombs.flat(40, "JPEG"), budget_ms=BUDGET_MS)
            if why := future.exception(2 * BUDGET_MS / 1e3) or (future.result().degraded and "degraded"):
                self.failed.append(why)
            self.seconds.append(time.monotonic() - began)


def kill_changes(folder, bundles, kills, seed=0):
    """Kill ``kills`` changes to random files and bundles; complete the last one, and check fleet and answers."""
    draw = random.Random(seed)
    with LocalCluster(folder, bundles[0], PLACEMENT, sources=["laptop", "desk"], keys=True, stores=True) as peers:
        key = peers.secret_key("laptop")
        give(peers.file, bundles[0], key)
        document = yaml.safe_load(peers.path.read_text())
        for entry in document["peers"]:
            entry["blocks"] = MOVED.get(entry["name"], entry["blocks"])
        moved = Path(folder) / "moved.yaml"
        moved.write_text(yaml.safe_dump(document, sort_keys=False))
        with Asking(peers) as asking:
            file, bundle, usual_s, restarted = peers.path, bundles[0], 6.0, []
            for _ in range(kills):
                file, bundle = draw.choice(
                    [one for one in ((f, b) for f in (peers.path, moved) for b in bundles) if one != (file, bundle)]
                )
                began, words = time.monotonic(), ["apply", file, "--yes", "--bundle", bundle, "--secret-key", key]
                process = subprocess.Popen(
                    [sys.executable, "-m", "ls_edge", *map(str, words)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0.3 * usual_s, usual_s))
                    usual_s = time.monotonic() - began  # so that kills meet each step
                victim = draw.choice("abcd") if draw.random() < 0.4 else None
                if victim is not None:
                    peers.wait_warm(*restarted or [victim], timeout=120.0)  # two would be all holders of a block
                    if draw.random() < 0.4:
                        peers.signal(victim, signal.SIGSTOP)  # cut off: longer than the heartbeat
                        time.sleep(2.0)
                        peers.signal(victim, signal.SIGCONT)
                    else:
                        peers.kill(victim)
                        peers.start(victim)
                        restarted = [victim]
                process.kill()
                process.wait()
                process.stderr.close()
            done = subprocess.run(
                [sys.executable, "-m", "ls_edge", *map(str, words)], capture_output=True, text=True, check=False
            )
            count = len(asking.seconds)
            while len(asking.seconds) < count + 3 and not asking.failed:
                time.sleep(0.1)
            model_id = asking.source.bundle.manifest.model_id
        assert (done.returncode, asking.failed) == (0, []), done.stderr
        assert model_id == Bundle.open(bundle).manifest.model_id
        wanted = load_peers(file).of_model(Bundle.open(bundle).num_blocks)
        with Observer(wanted, keys=load_secret(key)) as observer:
            found = observer.look(10.0)
        assert {name: {*one.blocks} for name, one in found.items()} == {
            one.name: {*shown_parts(one.blocks)} for one in wanted.peers
        }
        assert {one.reason for one in found.values()} == {None}
