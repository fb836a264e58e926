"""Latency of ``ls-edge serve`` while clients send images that are expensive to decode.

``ls-edge serve`` and two peers are processes on this machine. For each kind of image, clients in another process send
it as fast as they get answers, one less than ``--concurrency`` allows, so that an honest client has a place left.
Meanwhile this process measures the health paths, the metrics, and the answers to a small image.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import Address, bundle_of, http_server, local_cluster, new_table, report_progress
from tests.data import bombs

CLIENTS = 3
"""Clients that send bombs; the default of ``--concurrency`` is 4."""
PAUSE_S = 0.01
"""Pause between two requests to a path, in seconds."""
PATHS = ("/health/live", "/health/ready", "/metrics", "/predict")
BAR_S = 0.25
"""Longest answer of ``/health/live``."""
KINDS: dict[str, Callable[[], bytes]] = {
    "PNG of 1 x 2^26 pixels": bombs.BOMBS["png 1 x 2^26"][0],
    "TIFF, overlapping tags": bombs.BOMBS["tiff tags"][0],
    "TIFF, 1,048,576 strips": bombs.BOMBS["tiff strips"][0],
    "TIFF, tile of 8192 x 8192": bombs.BOMBS["tiff tile"][0],
    "PNG, 67 megapixels": lambda: bombs.png(8192, 8192, 8, 2),
    "PNG, 25 megapixels of 16 bits": lambda: bombs.png(5000, 5000, 16, 0),
    "PNG, a million chunks": lambda: bombs.png_of_chunks(1_000_000),
    "PGM, 16 megapixels": lambda: b"P5 4000 4000 255\n" + bytes(16_000_000),
    "PPM, maximum 254": lambda: b"P6 1024 1024 254\n" + bytes(3 << 20),
    "PPM, comment of 16 MB": lambda: b"P6\n#" + b"x" * 16_000_000 + b"\n8 8 255\n" + bytes(192),
    "GIF, 16 megapixels, 20 frames": lambda: bombs.animation("GIF", 4000),
    "GIF, comment in 8 million blocks": lambda: bombs.gif_of_blocks(8_000_000),
    "WebP, 23 megapixels": lambda: bombs.flat(4800, "WEBP", quality=1, method=0),
    "JPEG, 16 megapixels, 99 scans": lambda: bombs.jpeg_of_scans(4096, 89),
    "JPEG, 4 million markers": lambda: bombs.jpeg_of_markers(4_000_000),
    "JPEG, 16 megapixels, honest": lambda: _photo(4000),
}


def run(quick: bool) -> dict[str, Any]:
    """Measure each path without bombs, and with each kind of them."""
    kinds = dict(list(KINDS.items())[:2]) if quick else KINDS
    seconds = 0.5 if quick else 5.0
    path = bundle_of("vit_digits")
    rows = []
    with (
        local_cluster(path, {"a": range(4), "b": range(4, 8)}) as peers,
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1) as attackers,
        http_server(peers.path, path) as (process, address),
    ):
        for name, make in {"none": None, **kinds}.items():
            report_progress(f"  {name}")
            file = Path(folder) / "bomb"
            file.write_bytes(b"" if make is None else make())
            _forget_peak(process.pid)
            attack = attackers.apply_async(_attack, (address, file, CLIENTS if make else 0, seconds))
            times = _measure(address, seconds)
            rows.append(
                {
                    "kind": name,
                    "bytes": file.stat().st_size,
                    "bombs": attack.get(120.0),
                    "paths": times,
                    "peak_mb": _peak_mb(process.pid),
                }
            )
    return {"bar_s": BAR_S, "clients": CLIENTS, "rows": rows}


def _photo(side: int) -> bytes:
    return bombs.save(bombs.Image.effect_noise((side, side), 64).convert("RGB"), "JPEG")


def _attack(address: Address, file: Path, clients: int, seconds: float) -> dict[int, int]:
    """Send a file in a loop from several clients; return the number of answers by status."""
    body, end, statuses = file.read_bytes(), time.monotonic() + seconds, Counter[int]()

    def send() -> None:
        while time.monotonic() < end:
            statuses[_ask(address, "/predict", body)[0]] += 1

    _together([send] * clients)
    return dict(statuses)


def _measure(address: Address, seconds: float) -> dict[str, Any]:
    small = bombs.save(bombs.Image.new("RGB", (640, 480), (9, 99, 199)), "JPEG")
    end = time.monotonic() + seconds
    found: dict[str, Any] = {}

    def poll(path: str) -> None:
        took, statuses = [], Counter[int]()
        while time.monotonic() < end:
            status, waited = _ask(address, path, small if path == "/predict" else None)
            statuses[status] += 1
            took.append(waited)
            time.sleep(PAUSE_S)
        p50, p99 = np.percentile(np.asarray(took) * 1e3, (50, 99))
        found[path] = {
            "p50_ms": round(p50, 1),
            "p99_ms": round(p99, 1),
            "max_ms": round(max(took) * 1e3, 1),
            "statuses": dict(statuses),
        }

    _together([lambda path=path: poll(path) for path in PATHS])
    return {path: found[path] for path in PATHS}


def _together(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(address: Address, path: str, body: bytes | None) -> tuple[int, float]:
    """Return the status and the seconds of one request on a new connection."""
    started = time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=90.0)) as connection:
        headers = {"Content-Type": "application/octet-stream"}
        connection.request("GET" if body is None else "POST", path, body, {} if body is None else headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status, time.perf_counter() - started


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _peak_mb(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(found[1]) >> 10 if found else 0


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = new_table(
        f"serve while {document['clients']} clients send expensive images; milliseconds",
        ("images", "KB", "answers", *PATHS, "/predict: answers", "peak, MB"),
        left=("images",),
    )
    for row in document["rows"]:
        paths = [f"{one['p50_ms']} / {one['p99_ms']} / {one['max_ms']}" for one in row["paths"].values()]
        table.add_row(
            row["kind"],
            str(row["bytes"] >> 10),
            _statuses(row["bombs"]),
            *paths,
            _statuses(row["paths"]["/predict"]["statuses"]),
            str(row["peak_mb"]),
        )
    longest = max(row["paths"]["/health/live"]["max_ms"] for row in document["rows"])
    verdict = "holds" if longest <= document["bar_s"] * 1e3 else "missed"
    console.print(table, f"longest /health/live: {longest} ms, bar {document['bar_s'] * 1e3:.0f}: {verdict}")


def _statuses(counts: dict[int, int]) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
