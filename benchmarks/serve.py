"""Overhead of HTTP: ``ls-edge serve`` and a source in this process send the same JPEG to the same peers.

Rounds alternate. The time of the source includes decoding, with the same code as the server, so the difference within a
round is the cost of HTTP: the loopback, the server, the application, and thread switches. The client is a socket that
sends prepared bytes, since clients differ.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks.common import Address, bundle_of, http_server, local_cluster, ms, new_table, ready_source
from tests.data import bombs

SIDE = 480, 640
"""Height and width of the JPEG."""
BAR_MS = 1.5
"""Largest median overhead."""


def run(quick: bool) -> dict[str, Any]:
    """Measure each path."""
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
    return {"bar_ms": BAR_MS, "image_bytes": len(image), "rows": rows}


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


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
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
