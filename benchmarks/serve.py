"""Overhead of HTTP, and goodput of ``ls-edge serve`` under overload.

- *overhead*: the server and a source in this process send the same JPEG to the same peers, in turn. The time of the
  source includes decoding, with the same code as the server, so the difference within a round is the cost of HTTP: the
  loopback, the server, the application, and thread switches. The client is a socket that sends prepared bytes.
- *goodput*: more and more connections, each of which sends the JPEG again as soon as it has an answer; after 503 it
  waits as long as ``Retry-After`` says. An answer is good if it has status 200 and comes within the budget. The engines
  of the two peers wait for 160 ms an image, so that the result depends on the queue, and little on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks.common import (
    Address,
    bundle_of,
    http_server,
    local_cluster,
    median,
    ms,
    new_table,
    ready_source,
    report_progress,
)
from tests.data import bombs
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

SIDE = 480, 640
"""Height and width of the JPEG."""
BAR_MS = 1.5
"""Largest median overhead."""
CONNECTIONS = (4, 16, 64, 256)
BUDGET_S = 2.0
SLOW = Faults(least_ms=20)
"""Peer whose engines take 20 ms for each of eight blocks, without using the processor."""
BAR_GOODPUT = 0.95
"""Least goodput at any number of connections, as a share of the best."""


def run(quick: bool) -> dict[str, Any]:
    """Measure the overhead of each path, and the goodput with each number of connections."""
    rounds = 20 if quick else 1000
    bundle = bundle_of("vit_digits")
    image = bombs.save(bombs.Image.effect_noise((SIDE[1], SIDE[0]), 64).convert("RGB"), "JPEG")
    rows = []
    with (
        local_cluster(bundle, {"a": range(4), "b": range(4, 8)}) as peers,
        http_server(peers.path, bundle) as (_, address),
        ready_source(peers.path, bundle) as source,
    ):

        def of_source() -> None:
            source.submit(source.preprocess(image)).result()

        for path, body, headers in _requests(image):
            ask = _asker(address, path, body, headers)
            times = [(_seconds(of_source), _seconds(ask)) for _ in range(rounds // 10 + rounds)][rounds // 10 :]
            rows.append(
                {
                    "path": path,
                    "source_ms": ms([one for one, _ in times]),
                    "http_ms": ms([two for _, two in times]),
                    "overhead_ms": ms([two - one for one, two in times]),
                }
            )
    return {"bar_ms": BAR_MS, "image_bytes": len(image), "rows": rows, "goodput": _goodput(image, quick)}


def _requests(image: bytes) -> list[tuple[str, bytes, dict[str, str]]]:
    """Return path, body and headers of each request."""
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 4 + len(image)}}
    document = json.dumps({"inputs": [tensor], "outputs": [{"name": "label"}]}).encode()
    return [
        ("/predict", image, {"Content-Type": "image/jpeg"}),
        (
            "/v2/models/vit_digits/infer",
            document + len(image).to_bytes(4, "little") + image,
            {"Inference-Header-Content-Length": str(len(document))},
        ),
    ]


def _asker(address: Address, path: str, body: bytes, headers: dict[str, str]) -> Callable[[], None]:
    """Return a function that sends a request on a connection that stays open."""
    connection = socket.create_connection(address, timeout=60.0)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = {"Host": address[0], "Content-Length": str(len(body)), **headers}
    request = f"POST {path} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in lines.items())
    request_bytes = request.encode() + b"\r\n" + body

    def ask() -> None:
        connection.sendall(request_bytes)
        reply = b""
        while (end := reply.find(b"\r\n\r\n")) < 0 or len(reply) < end + 4 + _length(reply[:end]):
            part = connection.recv(1 << 16)
            assert part, reply
            reply += part
        assert reply.split(b" ", 2)[1] == b"200", reply

    return ask


def _length(header: bytes) -> int:
    """Return the length of the body that a header announces."""
    return int(header.lower().partition(b"content-length:")[2].split(None, 1)[0])


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _goodput(image: bytes, quick: bool) -> list[dict[str, Any]]:
    """Return good answers per second by number of connections, medians over rounds."""
    rounds, seconds, levels = (1, 1.0, CONNECTIONS[:2]) if quick else (5, 3.5, CONNECTIONS)
    bundle = bundle_of("vit_digits")
    with local_cluster(bundle, {"a": "all", "b": "all"}, kind=FaultyCluster) as peers:
        for name in ("a", "b"):
            peers.set_faults(name, SLOW)
        with http_server(peers.path, bundle) as (_, address):
            rows = []
            for count in levels:
                report_progress(f"  {count} connections")
                runs = [asyncio.run(_load(address, image, count, seconds)) for _ in range(rounds)]
                answers = [answer for run in runs for answer in run]
                good = [sum(status == 200 and taken <= BUDGET_S for status, taken in run) / seconds for run in runs]
                rows.append(
                    {
                        "connections": count,
                        "good_per_s": median(good),
                        "refused": sum(status in (503, 504) for status, _ in answers),
                        "late": sum(status == 200 and taken > BUDGET_S for status, taken in answers),
                        "failed": sum(status not in (200, 503, 504) for status, _ in answers),
                    }
                )
    return rows


async def _load(address: Address, image: bytes, count: int, seconds: float) -> list[tuple[int, float]]:
    """Return status and seconds of each answer, after an eighth of the time to begin."""
    start = time.monotonic() + seconds / 8
    answers: list[tuple[int, float]] = []
    lines = f"Host: {address[0]}\r\nContent-Length: {len(image)}\r\n\r\n"
    request = f"POST /predict?budget_ms={BUDGET_S * 1e3:g} HTTP/1.1\r\n{lines}".encode() + image

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer):
            while True:
                began = time.monotonic()
                writer.write(request)
                header = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(_length(header))
                if time.monotonic() >= start:
                    answers.append((int(header[9:12]), time.monotonic() - began))
                _, _, retry_s = header.partition(b"retry-after:")
                await asyncio.sleep(int(retry_s.split(None, 1)[0]) if retry_s else 0)

    tasks = [asyncio.create_task(connection()) for _ in range(count)]
    await asyncio.sleep(start + seconds - time.monotonic())
    broken = [(0, 0.0) for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answers + broken


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    table = new_table(
        f"serve, a JPEG of {document['image_bytes'] >> 10} KB, decoding included; milliseconds, p50 and p90",
        ("path", "source", "over HTTP", "difference", "verdict"),
        left=("path", "verdict"),
    )
    for row in document["rows"]:
        times = [f"{row[key]['p50']:.2f}, {row[key]['p90']:.2f}" for key in ("source_ms", "http_ms", "overhead_ms")]
        holds = row["overhead_ms"]["p50"] <= document["bar_ms"]
        table.add_row(row["path"], *times, f"bar {document['bar_ms']}: {'holds' if holds else 'missed'}")
    console.print(table)
    best = max(row["good_per_s"] for row in document["goodput"]) or 1.0
    table = new_table(
        f"goodput, answers within {BUDGET_S * 1e3:g} ms",
        ("connections", "good/s", "of the best", "refused", "late", "failed", "verdict"),
        left=("verdict",),
    )
    for row in document["goodput"]:
        share = row["good_per_s"] / best
        table.add_row(
            *(str(row["connections"]), f"{row['good_per_s']:.1f}", f"{share:.2f}"),
            *(str(row[key]) for key in ("refused", "late", "failed")),
            f"bar {BAR_GOODPUT}: {'holds' if share >= BAR_GOODPUT else 'missed'}",
        )
    console.print(table)
