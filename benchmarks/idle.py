"""Cost of a fleet without requests, and of idle peers to busy ones.

Each fleet is one site: all peers are processes on the loopback and linked to each other. *Idle* is the CPU time of all
processes of the fleet, as a share of one core. *Busy* is the throughput of a source with 16 requests in flight. Each of
the first eight peers holds a part of the blocks; the others hold the first block only, and the source cannot reach
them, so that the same holders work in every fleet of eight or more. *Links lost* counts the lost links between peers
that their logs report during both measurements.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.common import BenchmarkError, bundle_of, cpu_s, images_for, ready_source, report_progress, wait_for
from ls_edge.core.bundle import Bundle
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from ls_edge.runtime.source.source import Source

SIZES = (2, 8, 16, 32, 64)
HOLDERS = 8
IN_FLIGHT = 16
SETTLE_S = 3.0
BARS = {16: 0.15, 32: 0.40}
"""Largest CPU share of an idle fleet, in cores, by number of peers."""
BAR_BUSY = 0.8
"""Least throughput of 32 peers, as a share of that of 8."""
IMAGES_OF_MOST = 100
"""Number of answers of the largest fleet."""


def run(quick: bool) -> dict[str, Any]:
    """Measure fleets of each size."""
    sizes, seconds = ((3,), 0.5) if quick else (SIZES, 15.0)
    path = bundle_of("vit_digits", {"depth": HOLDERS})
    return {"bars": {"idle_cores": BARS, "busy": BAR_BUSY}, "fleets": [_fleet(path, size, seconds) for size in sizes]}


def _fleet(path: Path, size: int, seconds: float) -> dict[str, Any]:
    report_progress(f"  {size} peers")
    bundle = Bundle.open(path)
    holders = min(size, HOLDERS)
    split = [[b for b in range(bundle.num_blocks) if b * holders // bundle.num_blocks == i] for i in range(holders)]
    placement = {f"p{i:02d}": split[i] if i < holders else [0] for i in range(size)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        started = time.monotonic()
        peers = stack.enter_context(LocalCluster(folder, path, placement))
        peers.wait_warm(timeout=300.0)
        with _source(peers, holders, path) as source:
            wait_for(lambda: _all_linked(source, holders, size), "all peers to be linked", timeout=120.0)
            linked_s = time.monotonic() - started
        time.sleep(min(SETTLE_S, 5 * seconds))  # the source has left, and load is announced within a second
        lost = _links_lost(peers)
        idle = _cpu_share(peers, seconds)
        with _source(peers, holders, path) as source:
            answered, failed, took = _answer(source, bundle, seconds, IMAGES_OF_MOST)
        return {
            "peers": size,
            "linked_s": round(linked_s, 1),
            "idle_cores": round(idle, 4),
            "answers": answered,
            "failed": failed,
            "answers_per_s": round(answered / took, 1),
            "links_lost": _links_lost(peers) - lost,
        }


@contextlib.contextmanager
def _source(peers: LocalCluster, holders: int, path: Path) -> Iterator[Source]:
    """Open a source that knows all peers, and dials addresses without a listener for all but the holders."""
    content = yaml.safe_load(peers.path.read_text(encoding="utf-8"))
    others = content["peers"][holders:]
    for peer, port in zip(others, free_ports(len(others)), strict=True):
        peer["address"] = peer["bind"] = f"tcp://127.0.0.1:{port}"
    file = peers.folder / "source.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    with ready_source(file, path, policy="sequential") as source:
        yield source


def _all_linked(source: Source, holders: int, size: int) -> bool:
    views = [view for view in source.snapshot.peers.values() if view.reaches]
    return len(views) == holders and all(len(view.reaches) >= size for view in views)  # the source is one of them


def _cpu_share(peers: LocalCluster, seconds: float) -> float:
    """Return the CPU time of all peers over ``seconds``, in cores."""
    started, before = time.monotonic(), _cpu_s(peers)
    time.sleep(seconds)
    return (_cpu_s(peers) - before) / (time.monotonic() - started)


def _cpu_s(peers: LocalCluster) -> float:
    for name in peers.processes:
        if not peers.alive(name):
            raise BenchmarkError(f"{name} has ended: {peers.last_log_line(name)}")
    return cpu_s(peers.processes.values())


def _answer(source: Source, bundle: Bundle, seconds: float, least: int) -> tuple[int, int, float]:
    """Return the answers and failures of at least ``seconds`` and ``least`` images, and the seconds that they took."""
    images, waiting = images_for(bundle, 64), deque[Any]()
    answered = failed = submitted = 0
    started = time.monotonic()
    while time.monotonic() - started < seconds or answered + failed < least:
        while len(waiting) < IN_FLIGHT:
            waiting.append(source.submit(images[submitted % len(images)]))
            submitted += 1
        if waiting.popleft().exception() is None:
            answered += 1
        else:
            failed += 1
    return answered, failed, time.monotonic() - started


def _links_lost(peers: LocalCluster) -> int:
    """Return the number of lost links between peers in their logs; sources come and go."""
    logs = (peers.log_path(name).read_text(encoding="utf-8") for name in peers.processes)
    return sum(" lost " in line and "peer=p" in line for log in logs for line in log.splitlines())


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table(title="idle fleets on one site")
    for column in ("peers", "linked after, s", "CPU idle, % of a core", "answers/s, 8 holders", "failed", "links lost"):
        table.add_column(column, justify="right")
    for fleet in document["fleets"]:
        bar = BARS.get(fleet["peers"])
        idle = f"{fleet['idle_cores']:.1%}"
        table.add_row(
            str(fleet["peers"]),
            str(fleet["linked_s"]),
            idle if bar is None else f"{idle} {'holds' if fleet['idle_cores'] <= bar else 'missed'}",
            str(fleet["answers_per_s"]),
            str(fleet["failed"]),
            str(fleet["links_lost"]),
        )
    console.print(table)
