"""Latency of requests while ``ls-edge apply`` changes the fleet that answers them.

Four peers with keys and stores, each as slow as a board; stem, head and each block have at least two holders. Two
sources and two ``ls-edge serve``, one of each without a bundle, send images at a constant rate. A latency counts from
the moment at which its image was due, so that a stalled client does not hide it. Each task is one command:

- *new plan*: two peers get other blocks;
- *add*: a peer that was started with the new file joins;
- *replace*: a peer was lost, and another machine takes its name with a new key and an empty store;
- *new model*: all peers switch to another model; only clients without a bundle follow it, so only they are measured.

*Before* and *after* are stretches of the same load without a change. The ratio is the p95 during the commands over the
p95 before them, of all clients and repetitions together; each repetition has a new fleet.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from rich.console import Console

from benchmarks.common import (
    Address,
    BenchmarkError,
    bundle_of,
    http_server,
    images_for,
    median,
    new_table,
    ready_source,
    report_progress,
)
from ls_edge.core.bundle import Bundle
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import new_keys
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

BAR = 1.5
BLOCK_MS = 8.0
EVERY_S = 0.8
"""Interval between the images of a client: the peer with all parts could answer three times as many."""
PLACEMENT = {"ann": "all", "ben": "stem, 0-5", "cleo": "2-5, head", "dan": "stem, 0-3, head"}
CLIENTS = ("source", "thin source", "serve", "thin serve")
TASKS = ("new plan", "add", "replace", "new model")
NEW_MACHINES = {"add": "eve", "replace": "dan"}
STRETCHES = ("before", "during", "after")


def run(quick: bool) -> dict[str, Any]:
    """Carry out the tasks, and measure the latency of each client before, during and after them."""
    repeats, stretch = (1, 2.0) if quick else (4, 6.0)
    old, new = (bundle_of("vit_digits", {"depth": 6, "num_classes": classes}) for classes in (10, 12))
    rounds = []
    for index in range(repeats):
        report_progress(f"  fleet {index + 1} of {repeats}")
        with _Fleet.started(old) as fleet:
            rounds.append({task: fleet.change(task, old if task != "new model" else new, stretch) for task in TASKS})
    return {
        "bar": BAR, "block_ms": BLOCK_MS, "every_s": EVERY_S, "stretch_s": stretch, "repeats": repeats,
        "tasks": {task: _summary([one[task] for one in rounds]) for task in TASKS},
    }  # fmt: skip


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def pooled(stretch: str, q: int) -> float:
        return _percentile([ms for one in rounds for ms in one["ms"][stretch]], q)

    ratios = [_percentile(one["ms"]["during"], 95) / _percentile(one["ms"]["before"], 95) for one in rounds]
    ratio = pooled("during", 95) / pooled("before", 95)
    return {
        "seconds": round(median([one["seconds"] for one in rounds]), 2),
        "images": {stretch: sum(len(one["ms"][stretch]) for one in rounds) for stretch in STRETCHES},
        "failed": sum(one["failed"] for one in rounds),
        "degraded": sum(one["degraded"] for one in rounds),
        "ms": {stretch: {f"p{q}": round(pooled(stretch, q), 1) for q in (50, 95, 100)} for stretch in STRETCHES},
        "ratios": [round(one, 3) for one in ratios], "ratio": round(ratio, 3), "holds": ratio <= BAR,
    }  # fmt: skip


def _percentile(values: list[float], q: int) -> float:
    if not values:
        raise BenchmarkError("no image was due during a change; is the stretch too short?")
    return float(np.percentile(values, q))


class _Client(threading.Thread):
    """Client that asks for an answer every :data:`EVERY_S` seconds, until :meth:`end`."""

    def __init__(self, ask: Callable[[], bool], phase: float) -> None:
        super().__init__(daemon=True)
        self.took: list[tuple[float, float]] = []
        """Time at which each image was due, and latency in ms."""
        self.failed = self.degraded = 0
        self._ask, self._phase, self._over = ask, phase, threading.Event()
        self.start()

    def run(self) -> None:
        """Ask, whatever the answers."""
        due = time.monotonic() + self._phase * EVERY_S
        while not self._over.wait(max(0.0, due - time.monotonic())):
            try:
                self.degraded += self._ask()
            except Exception as error:  # noqa: BLE001  counted
                report_progress(f"    failed: {error!r}")
                self.failed += 1
            self.took.append((due, (time.monotonic() - due) * 1e3))
            due += EVERY_S

    def end(self) -> None:
        """Wait for the last answer."""
        self._over.set()
        self.join()


class _Fleet:
    """Peers, and clients that ask them."""

    def __init__(self, cluster: FaultyCluster, clients: dict[str, _Client]) -> None:
        self._cluster, self._clients, self._path = cluster, clients, cluster.path
        self._document = yaml.safe_load(cluster.path.read_text(encoding="utf-8"))
        self._entries = {entry["name"]: entry for entry in self._document["peers"]}

    @classmethod
    @contextlib.contextmanager
    def started(cls, bundle: Path) -> Iterator[_Fleet]:
        """Start the peers, push a bundle to them, and begin the load."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            cluster = FaultyCluster(folder, bundle, PLACEMENT, sources=["desk", "hall"], keys=True, stores=True)
            for name in (*PLACEMENT, "eve"):
                cluster.set_faults(name, Faults(least_ms=BLOCK_MS))
            stack.enter_context(cluster)
            cluster.wait_settled(timeout=120.0)
            _command("apply", cluster.path, "--bundle", bundle, "--secret-key", cluster.secret_key("desk"), "--yes")
            asks = {}
            for name, (given, key) in zip(CLIENTS, ((bundle, "desk"), (None, "hall")) * 2, strict=True):
                secret = cluster.secret_key(key)
                if "serve" in name:
                    _, address = stack.enter_context(http_server(cluster.path, given, "--secret-key", secret))
                    asks[name] = _http(address)
                else:
                    asks[name] = _direct(
                        stack.enter_context(ready_source(cluster.path, given, secret_key=secret)), given
                    )
            for ask in asks.values():
                ask()  # the first answer of a client opens links
            clients = {name: _Client(ask, index / len(asks)) for index, (name, ask) in enumerate(asks.items())}
            try:
                yield cls(cluster, clients)
            finally:
                for client in clients.values():
                    client.end()

    def change(self, task: str, bundle: Path, stretch: float) -> dict[str, Any]:
        """Carry out a task; return the latencies before, during and after its command."""
        report_progress(f"    {task}")
        self._prepare(task)
        measured = [one for name, one in self._clients.items() if task != "new model" or name.startswith("thin")]
        counts = [(one.failed, one.degraded) for one in measured]
        began = time.monotonic()
        time.sleep(stretch)
        told = time.monotonic()
        _command("apply", self._path, "--yes", "--bundle", bundle, "--secret-key", self._cluster.secret_key("desk"))
        done = time.monotonic()
        time.sleep(stretch)
        ends = dict(zip(STRETCHES, ((began, told), (told, done), (done, time.monotonic())), strict=True))
        took = [one for client in measured for one in [*client.took]]
        return {
            "seconds": done - told,
            "ms": {name: [ms for due, ms in took if first <= due < last] for name, (first, last) in ends.items()},
            "failed": sum(one.failed - failed for one, (failed, _) in zip(measured, counts, strict=True)),
            "degraded": sum(one.degraded - degraded for one, (_, degraded) in zip(measured, counts, strict=True)),
        }

    def _prepare(self, task: str) -> None:
        """Write the file of a task, and start the new machine that it needs, which waits for the file."""
        cluster, folder = self._cluster, self._cluster.folder
        if task == "new plan":
            self._entries["ben"]["blocks"], self._entries["cleo"]["blocks"] = "stem, 0-3", "0-5, head"
        elif task == "add":
            address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
            self._document["peers"].append({"name": "eve", "address": address, "blocks": "1-5", "threads": 1})
            self._document["peers"][-1]["public_key"] = new_keys("eve", folder)[0].public.decode()
        elif task == "replace":
            cluster.kill("dan")
            shutil.rmtree(cluster.store("dan"))
            for key in folder.glob("dan.key*"):
                key.unlink()
            self._entries["dan"]["public_key"] = new_keys("dan", folder)[0].public.decode()
        else:
            for name, client in self._clients.items():
                if not name.startswith("thin"):
                    client.end()
        self._path = cluster.path = folder / f"{task.replace(' ', '-')}.yaml"
        self._path.write_text(yaml.safe_dump(self._document, sort_keys=False), encoding="utf-8")
        if task in NEW_MACHINES:
            cluster.start(NEW_MACHINES[task])
            cluster.wait_settled(NEW_MACHINES[task], timeout=120.0)


def _direct(source: Source, bundle: Path | None) -> Callable[[], bool]:
    image = _jpeg() if bundle is None else images_for(Bundle.open(bundle), 1)[0]
    return lambda: source.submit(image).result(60.0).degraded


def _http(address: Address) -> Callable[[], bool]:
    body = _jpeg()

    def ask() -> bool:
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=60.0)) as connection:
            connection.request("POST", "/predict", body, {"Content-Type": "image/jpeg"})
            reply = connection.getresponse()
            text = reply.read().decode()
        if reply.status != http.client.OK:
            raise BenchmarkError(f"{reply.status} {text[:200]}")
        return bool(yaml.safe_load(text)["degraded"])

    return ask


def _jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (40, 40)).save(stream, "JPEG")
    return stream.getvalue()


def _command(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ls_edge", *map(str, words)], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise BenchmarkError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()}")


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    title = (
        f"requests during changes, {document['block_ms']:g} ms a block, {document['repeats']} repetitions; images and "
        "p95 ms before, during, after"
    )
    columns = "task", "command s", "images", "failed", "degraded", "p95 ms", "longest ms", "ratio", "verdict"
    table = new_table(title, columns, left=("task", "verdict"))
    for task, row in document["tasks"].items():
        images, p95 = (
            ", ".join(str(round(value)) for value in values)
            for values in (row["images"].values(), (row["ms"][stretch]["p95"] for stretch in STRETCHES))
        )
        ratio = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        verdict = f"bar {document['bar']}: {'holds' if row['holds'] else 'missed'}"
        counts = images, str(row["failed"]), str(row["degraded"])
        table.add_row(task, str(row["seconds"]), *counts, p95, f"{row['ms']['during']['p100']:.0f}", ratio, verdict)
    console.print(table)
