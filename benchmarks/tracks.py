"""Latency of one image on two devices: policy ``parallel`` compared with one device that runs everything.

- *two cores*: two peers of one engine thread, each on its own core and with all blocks. In turn, request by request: a
  source that knows the first peer only, and sources of both peers with 1, 2 and 3 waves. A ratio compares latencies of
  one round; the result is the median over rounds. In the same rounds, two more processes on the same cores run engines
  only: all blocks on one core, then half of them on both cores at the same time. *s* is the time of the half over the
  time of all, 0.5 on two real cores. The bar is s + 0.1.
- *links*: the same in two network namespaces (root only) with limited links, over CURVE. The single device runs once
  more, which shows the noise of the ratio. The policy must not lose. If a holder was assigned no track, the trace has
  the reason and the time that a single block would have taken there (*not used* in the table).
- *trained* (``--trained BUNDLE --data DATA``): top-1 of both modes on the same images in turn. Since small models run
  in one track if a hop costs more than it saves, tracks for two equal devices are also computed in one process.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import track_accuracy
from benchmarks.common import Child, bundle_of, images_for, in_turn, median, ms, new_table, report_progress
from benchmarks.policy_runs import (
    AGAIN,
    PAUSE_S,
    PEERS,
    SINGLE,
    SINGLE_PEER,
    cells,
    open_local_runs,
    open_runs,
    parallel,
    pin,
    ratio,
    results_of,
    two_cores,
)  # fmt: skip
from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.source.source import Source
from tests.faults.namespaces import NamespaceCluster, Net, reason_to_skip

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
WAVES = (1, 2, 3)
BAR = 0.1
"""Bar of the ratio beyond s."""
RATES_MBIT = (1000, 100)
LOSE = 1.05
"""Ratio above which the policy loses, beyond noise."""


def run(quick: bool, trained: Path | None = None, data: str = "digits") -> dict[str, Any]:
    """Measure ratios to one device, times of halves of the blocks, and accuracy of ``trained`` on ``data``."""
    cores = two_cores()
    paths = [bundle_of("vit_digits", {"depth": 6})] if quick else [bundle_of(model) for model in MODELS]
    trained = trained or (paths[0] if quick else None)  # untrained, only to show that it runs
    rounds = 6 if quick else 60
    reason = reason_to_skip()
    rates = RATES_MBIT[1:] if quick else RATES_MBIT
    return {
        "cores": cores,
        "two_cores": [_two_cores(path, cores, rounds) for path in paths],
        "links": {"skipped": reason} if reason else _links(paths, rates, cores, rounds // (1 if quick else 2)),
        "trained": None if trained is None else track_accuracy.run(trained, data, cores, WAVES, quick=quick),
    }


def _two_cores(path: Path, cores: Sequence[int], rounds: int) -> dict[str, Any]:
    report_progress(f"  two cores, {path.name}")
    bundle = Bundle.open(path)
    images = images_for(bundle, 8)
    engines: dict[str, list[float]] = {"all": [], "half": []}
    with contextlib.ExitStack() as stack:
        runs = open_local_runs(stack, path, cores, parallel(WAVES))
        children = [stack.enter_context(Child("benchmarks.workers", "blocks", str(path))) for _ in PEERS]
        for child in children:
            child.read()
        pin((child.process.pid for child in children), cores)
        for index, name in in_turn((*runs, "engines"), rounds):
            if name != "engines":
                runs[name].ask(images[index % 8])
                continue
            time.sleep(PAUSE_S)
            chosen = children[index // 2 % 2]
            engines["all"] += _engines([chosen], bundle.num_blocks)
            engines["half"].append(_engines(children, bundle.num_blocks // 2)[children.index(chosen)])
    leave_out = rounds // 6
    s = ratio(engines["half"], engines["all"], leave_out)
    results = results_of(runs, leave_out)
    return {
        "model": bundle.manifest.model, "blocks": bundle.num_blocks, "rounds": rounds - leave_out,
        "engines_ms": {name: ms(values[leave_out:]) for name, values in engines.items()},
        "s": s, "bar": round(s + BAR, 4), "policy_runs": results,
        "holds": {name: each["ratio"] <= s + BAR for name, each in results.items() if name != SINGLE},
    }  # fmt: skip


def _engines(children: Sequence[Child], blocks: int) -> list[float]:
    """Return the seconds of a number of blocks on each core, all at the same time."""
    for child in children:
        child.send(blocks)
    return [child.read() for child in children]


def _links(paths: Sequence[Path], rates: Sequence[int], cores: Sequence[int], rounds: int) -> dict[str, Any]:
    rows = []
    with Net(*PEERS, "src") as net:
        for path in paths:
            bundle = Bundle.open(path)
            images = images_for(bundle, 8)
            placement = dict.fromkeys(PEERS, range(bundle.num_blocks))
            with tempfile.TemporaryDirectory() as folder, NamespaceCluster(net, folder, path, placement) as cluster:
                pin((process.pid for process in cluster.processes.values()), cores)
                for mbit in rates:
                    report_progress(f"  {mbit} Mbit/s, {path.name}")
                    with contextlib.ExitStack() as stack:
                        net.rate(mbit)
                        stack.callback(net.rate, None)
                        rows.append({"mbit": mbit, **_limited(stack, net, cluster, bundle, images, rounds)})
    return {"rows": rows, "bar": LOSE}


def _limited(
    stack: contextlib.ExitStack, net: Net, cluster: NamespaceCluster, bundle: Bundle, images: np.ndarray, rounds: int
) -> dict[str, Any]:
    """Open runs of all policies over limited links."""
    tokens = bundle.manifest.tokens
    size = tokens.count * tokens.dim * 4
    seconds = _transfer(net, size)

    def opened(file: PeersFile, policy: str, settings: Mapping[str, Any]) -> Source:
        with net.inside("src"):
            return Source.open(file, bundle, policy=policy, secret_key=cluster.source_key, **settings)

    wanted = {AGAIN: ("nearest", {}), **parallel(WAVES)}
    runs = open_runs(stack, cluster.file, opened, {**SINGLE_PEER, **wanted})
    for index, name in in_turn(tuple(runs), rounds):
        runs[name].ask(images[index % 8])
    results = results_of(runs, rounds // 6)
    return {
        "model": bundle.manifest.model, "bytes": size, "transfer_ms": round(seconds * 1e3, 3),
        "carries_mbit": round(size * 8e-6 / seconds, 1), "rounds": rounds - rounds // 6, "policy_runs": results,
        "holds": {name: each["ratio"] <= LOSE for name, each in results.items() if name in parallel(WAVES)},
    }  # fmt: skip


def _transfer(net: Net, size: int) -> float:
    """Return the seconds of a transfer of bytes between the peers and an answer of one byte, over plain TCP."""
    with net.inside(PEERS[0]):
        server = socket.create_server(("0.0.0.0", 7000))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            left = 0
            while got := connection.recv(1 << 20):
                left = (left or size) - len(got)
                if not left:
                    connection.sendall(b"x")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    seconds = []
    with net.inside(PEERS[1]):
        client = socket.create_connection((net.address(PEERS[0]), 7000), timeout=30.0)
    with server, client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(9):
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            client.sendall(bytes(size))
            client.recv(1)
            seconds.append(time.perf_counter() - started)
    thread.join(5.0)
    return median(seconds)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    if not document["cores"]:
        console.print("processes are not pinned to cores: there are fewer than two, or the system does not allow it")
    for row in document["two_cores"]:
        table = _table(f"{row['model']}, two peers on a core each, one image at a time")
        for name, policy_run in row["policy_runs"].items():
            bar = "" if name == SINGLE else "holds" if row["holds"][name] else "missed"
            table.add_row(name, *cells(policy_run), bar)
        engines = row["engines_ms"]
        console.print(
            table,
            f"engines only: all {engines['all']['p50']:.2f} ms, half on both cores {engines['half']['p50']:.2f} ms, "
            f"s {row['s']:.3f}; bar s + {BAR} = {row['bar']:.3f}",
            highlight=False,
        )
    links = document["links"]
    if "skipped" in links:
        console.print(f"links not measured: {links['skipped']}", highlight=False)
    for row in links.get("rows", ()):
        table = _table(
            f"{row['model']}, {row['mbit']} Mbit/s: {row['bytes']} bytes take {row['transfer_ms']:.2f} ms "
            f"({row['carries_mbit']:.0f} Mbit/s)"
        )
        for name, policy_run in row["policy_runs"].items():
            table.add_row(name, *cells(policy_run), {True: "holds", False: "missed"}.get(row["holds"].get(name), ""))
        console.print(table, f"bar {links['bar']}", highlight=False)
    if document["trained"] is not None:
        track_accuracy.show(document["trained"], console)


def _table(title: str) -> Table:
    return new_table(
        title,
        ("", "p50, ms (p10 to p90)", "ratio", "tracks of blocks", "not used", "bar"),
        left=("", "tracks of blocks", "not used"),
    )
