"""Goodput of ``ls-edge serve`` under more and more connections, next to a FastAPI service with the same engines.

Both have two processes with an engine thread each: two peers that hold all blocks, and two workers of uvicorn. Each
connection sends the same JPEG again as soon as it has an answer; after 503 it waits as long as ``Retry-After`` says.
An answer is good if it has status 200 and comes within the budget. Rounds alternate, and begin with an idle server.
The engines of ``slow`` servers wait for 160 ms an image: their rows depend on the queue, and little on the load of the
machine; ``--computing`` leaves them out. Without FastAPI (``pip install fastapi uvicorn``), ``ls-edge serve`` is
measured alone. ``cpu ms`` is the CPU time of all processes of a server for one good answer: it depends less on the load
of the machine than the rate does.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import (
    Address,
    bundle_of,
    cpu_s,
    http_server,
    in_turn,
    local_cluster,
    median,
    ms,
    new_table,
    report_progress,
    wait_for,
)
from ls_edge.runtime.fleet.local_cluster import free_ports
from tests.data import bombs
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

MODEL = "vit_tiny_patch16_224"
CONNECTIONS = (4, 16, 64, 256)
BUDGET_S = 2.0
SLOW_MS = 20
"""Time of each of eight blocks on a slow board."""
BAR = 0.95
"""Least goodput at any number of connections, as a share of the best."""


def run(quick: bool, computing: bool = False) -> dict[str, Any]:
    """Measure each server with each number of connections; with ``computing``, leave out those that wait."""
    bundle = bundle_of("vit_digits") if quick else bundle_of(MODEL)
    rounds, seconds, levels = (1, 1.0, CONNECTIONS[:2]) if quick else (5, 3.5, CONNECTIONS)
    image = bombs.save(bombs.Image.effect_noise((640, 480), 64).convert("RGB"), "JPEG")
    found: dict[tuple[str, int], list[list[tuple[int, float]]]] = {}
    used: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(local_cluster(bundle, {"a": "all", "b": "all"}))
        server, address = stack.enter_context(http_server(peers.path, bundle))
        servers = {"ls-edge serve": (address, [server, *peers.processes.values()])}
        has_fastapi = importlib.util.find_spec("fastapi") is not None
        if has_fastapi:
            servers["FastAPI"] = stack.enter_context(_fastapi(bundle))
        if not computing:
            tiny = bundle_of("vit_digits")
            boards = stack.enter_context(local_cluster(tiny, {"a": "all", "b": "all"}, kind=_SlowBoards))
            server, address = stack.enter_context(http_server(boards.path, tiny))
            servers["ls-edge serve, slow"] = address, [server, *boards.processes.values()]
            if has_fastapi:
                servers["FastAPI, slow"] = stack.enter_context(_fastapi(tiny, SLOW_MS * 8 / 1e3))
        for _, name in in_turn(list(servers), rounds):
            path = "/predict" if name.startswith("FastAPI") else f"/predict?budget_ms={BUDGET_S * 1e3:g}"
            address, processes = servers[name]
            for count in levels:
                report_progress(f"{name}: {count} connections")
                wait_for(lambda: _is_idle(address, path, image), f"idle {name}")  # noqa: B023 - called here
                answers, cpu = asyncio.run(_load(address, path, image, count, seconds, processes))
                found.setdefault((name, count), []).append(answers)
                used.setdefault((name, count), []).append(cpu / max(1, sum(_is_good(*one) for one in answers)))
    rows = [
        {
            "server": name,
            "connections": count,
            "good_per_s": median(rates),
            "deviation": float(np.std(rates)),
            "rounds": len(rates),
            "refused": sum(status in (503, 504) for answers in runs for status, _ in answers),
            "late": sum(status == 200 and taken > BUDGET_S for answers in runs for status, taken in answers),
            "failed": sum(status not in (200, 503, 504) for answers in runs for status, _ in answers),
            "cpu_ms": median(used[name, count]) * 1e3,
            "good_ms": ms([taken for answers in runs for status, taken in answers if _is_good(status, taken)] or [0.0]),
        }
        for (name, count), runs in found.items()
        for rates in [[sum(_is_good(*one) for one in answers) / seconds for answers in runs]]
    ]
    return {"model": bundle.name, "budget_ms": BUDGET_S * 1e3, "bar": BAR, "image_bytes": len(image), "rows": rows}


class _SlowBoards(FaultyCluster):
    """Peers whose engines wait instead of computing, so that the processor is free."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("a", "b"):
            self.set_faults(name, Faults(least_ms=SLOW_MS))


def _is_idle(address: Address, path: str, image: bytes) -> bool:
    """Return whether a server answers immediately: it has noticed that earlier clients are gone."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, image)
        return connection.getresponse().status == 200 and time.monotonic() - began < BUDGET_S / 4


def _is_good(status: int, taken: float) -> bool:
    return status == 200 and taken <= BUDGET_S


async def _load(
    address: Address, path: str, image: bytes, count: int, seconds: float, processes: list[subprocess.Popen[Any]]
) -> tuple[list[tuple[int, float]], float]:
    """Return status and seconds of each answer, and the CPU time of the server, after an eighth of it to begin."""
    start = time.monotonic() + seconds / 8
    found: list[tuple[int, float]] = []
    request = f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Length: {len(image)}\r\n\r\n".encode() + image

    async def connection() -> None:
        while True:
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    began = time.monotonic()
                    writer.write(request)
                    header = (await reader.readuntil(b"\r\n\r\n")).lower()
                    await reader.readexactly(int(header.partition(b"content-length:")[2].split(None, 1)[0]))
                    if time.monotonic() >= start:
                        found.append((int(header[9:12]), time.monotonic() - began))
                    _, is_told, told = header.partition(b"retry-after:")
                    await asyncio.sleep(int(told.split(None, 1)[0]) if is_told else 0)
            found.append((0, 0.0))

    tasks = [asyncio.create_task(connection()) for _ in range(count)]
    await asyncio.sleep(start - time.monotonic())
    before = cpu_s(processes)
    await asyncio.sleep(start + seconds - time.monotonic())
    used = cpu_s(processes) - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found, used


@contextlib.contextmanager
def _fastapi(bundle: Path, least_s: float = 0.0) -> Iterator[tuple[Address, list[subprocess.Popen[bytes]]]]:
    """Start the service, whose engines take at least ``least_s`` seconds; yield its address and process."""
    address = "127.0.0.1", free_ports(1)[0]
    words = [sys.executable, "-m", "uvicorn", "benchmarks.fastapi_service:app", "--workers", "2", "--port"]
    with subprocess.Popen(
        [*words, str(address[1]), "--log-level", "critical", "--timeout-graceful-shutdown", "1"],
        env={**os.environ, "BUNDLE": str(bundle), "LEAST_S": str(least_s)},
    ) as process:
        try:

            def is_up() -> bool:
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen("http://{}:{}/docs".format(*address)) as reply,
                ):
                    return bool(reply.status == 200)
                return False

            wait_for(is_up, "the FastAPI service")
            yield address, [process]
        finally:
            process.terminate()


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = new_table(
        f"goodput, {document['model']}, a JPEG of {document['image_bytes'] >> 10} KB, answers within "
        f"{document['budget_ms']:g} ms, {document['rows'][0]['rounds']} rounds",
        (
            "server", "connections", "good/s", "deviation", "of the best", "refused", "late", "failed",
            "cpu ms", "good ms, p50, p90", "verdict",
        ),
        left=("server", "verdict"),
    )  # fmt: skip
    for row in document["rows"]:
        best = max(one["good_per_s"] for one in document["rows"] if one["server"] == row["server"]) or 1.0
        share = row["good_per_s"] / best
        table.add_row(
            *(row["server"], str(row["connections"]), f"{row['good_per_s']:.1f}", f"{row['deviation']:.1f}"),
            *(f"{share:.2f}", str(row["refused"]), str(row["late"]), str(row["failed"])),
            f"{row['cpu_ms']:.1f}",
            f"{row['good_ms']['p50']:.0f}, {row['good_ms']['p90']:.0f}",
            f"bar {document['bar']}: {'holds' if share >= document['bar'] else 'missed'}",
        )
    console.print(table)
