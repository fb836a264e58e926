"""Cost of a hop without the engine, compared with raw echoes of as many bytes over TCP and ZeroMQ.

Two processes on the loopback. In a round trip of the runtime, tokens enter the caller's routing machine and travel as
RUN to a peer, through its checks, routing machine and engine thread (the engine returns its input), and back as RUN,
until the caller's machine accepts them as the answer; ACCEPT, RELEASE and CANCEL are sent as well. A *hop* is half of a
round trip. A raw round trip sends as many bytes to a process that echoes them: over a blocking TCP socket, over ZeroMQ
DEALER and ROUTER without copies, and over the same with CURVE. Half of that is compared. Contenders take turns in
bursts, whose first calls are not counted.

A *hop in a chain* is measured with twelve blocks that two peers hold alternately, a hop before each block and one back:
the same path between three processes, with MOVED to the source.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import Child, in_turn, ms, new_table, report_progress
from benchmarks.echo import Raw
from benchmarks.pass_through import Caller, manifest_of, write_peers
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.transport.keys import load_secret

SIZES = ((197, 768), (197, 384), (197, 192))
"""Tokens and width of ViT-B, ViT-S and ViT-Ti at 224 pixels; 605, 303 and 151 KB of float32."""
CHAIN_BLOCKS = 12
BAR_PLAIN_MS, BAR_CURVE = 0.3, 2.0
"""Bars: cost of a plain hop beyond raw ZeroMQ, and of a CURVE hop relative to raw ZeroMQ with CURVE."""

PAUSE_S = 0.002

Call = Callable[[], float]


def run(quick: bool) -> dict[str, Any]:
    """Return milliseconds per hop for each size, and whether the bars hold."""
    sizes = ((17, 64), *SIZES[2:]) if quick else SIZES
    rounds, burst, leave_out = (4, 5, 1) if quick else (60, 12, 2)
    found = []
    for count, dim in sizes:
        report_progress(f"  {count} x {dim} float32, {count * dim * 4} bytes")
        found.append(_size(count, dim, rounds, burst, leave_out))
    return {"sizes": found, "bars": {"plain_over_zmq_ms": BAR_PLAIN_MS, "curve_over_zmq_curve": BAR_CURVE}}


def _size(count: int, dim: int, rounds: int, burst: int, leave_out: int) -> dict[str, Any]:
    size = count * dim * 4
    calls: dict[str, tuple[Call, int]] = {}
    with contextlib.ExitStack() as stack:
        for kind in ("tcp", "zmq", "curve"):
            child = stack.enter_context(Child("benchmarks.echo", kind, str(size)))
            raw = Raw(kind, size, child.read())
            stack.callback(raw.close)
            calls[f"raw {kind}"] = (_after_pause(raw), 2)
        for curve in (False, True):
            name = "curve" if curve else "plain"
            calls[f"hop {name}"] = (_runtime(stack, count, dim, {"ann": [0]}, curve=curve), 2)
        placement = {"ann": list(range(0, CHAIN_BLOCKS, 2)), "ben": list(range(1, CHAIN_BLOCKS, 2))}
        calls["chain plain"] = (_runtime(stack, count, dim, placement, curve=False), CHAIN_BLOCKS + 1)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _, name in in_turn(tuple(calls), rounds):
            call, hops = calls[name]
            bursts = [call() / hops for _ in range(burst)]
            seconds[name] += bursts[leave_out:]
    hop_ms = {name: ms(values) for name, values in seconds.items()}
    over = hop_ms["hop plain"]["p50"] - hop_ms["raw zmq"]["p50"]
    ratio = hop_ms["hop curve"]["p50"] / hop_ms["raw curve"]["p50"]
    return {
        "count": count, "dim": dim, "bytes": size, "one_way_ms": hop_ms,
        "plain_over_zmq_ms": round(over, 4), "curve_over_zmq_curve": round(ratio, 4),
        "holds": {"plain": over <= BAR_PLAIN_MS, "curve": ratio <= BAR_CURVE},
    }  # fmt: skip


def _runtime(
    stack: contextlib.ExitStack, count: int, dim: int, placement: dict[str, list[int]], *, curve: bool
) -> Call:
    """Start a caller and its peers."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    blocks = sum(map(len, placement.values()))
    write_peers(folder, placement, curve=curve)
    for name in placement:
        key = [str(folder / f"{name}.key_secret")] if curve else []
        stack.enter_context(
            Child("benchmarks.pass_through", str(folder), name, str(count), str(dim), str(blocks), *key)
        ).read()  # fmt: skip
    keys = load_secret(folder / "caller.key_secret") if curve else None
    caller = Caller(load_peers(folder / "peers.yaml"), manifest_of(count, dim, blocks), keys)
    stack.callback(caller.close)
    caller.wait_ready()
    tokens = np.random.default_rng(0).standard_normal((1, count, dim), dtype=np.float32)

    def call() -> float:
        caller.idle(PAUSE_S)
        return caller.call(tokens)

    return call


def _after_pause(raw: Raw) -> Call:
    def call() -> float:
        time.sleep(PAUSE_S)
        return raw.call()

    return call


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    sizes = document["sizes"]
    table = new_table("one way, ms: p50 (p10 to p90)", ("", *(f"{size['bytes']} bytes" for size in sizes)))
    for name in sizes[0]["one_way_ms"]:
        times = [size["one_way_ms"][name] for size in sizes]
        table.add_row(name, *(f"{t['p50']:.3f} ({t['p10']:.3f} to {t['p90']:.3f})" for t in times))
    table.add_section()
    for title, key, bar in (
        (f"hop plain - raw zmq, at most {BAR_PLAIN_MS}", "plain_over_zmq_ms", "plain"),
        (f"hop curve / raw curve, at most {BAR_CURVE}", "curve_over_zmq_curve", "curve"),
    ):
        table.add_row(title, *(f"{s[key]:.3f} {'holds' if s['holds'][bar] else 'missed'}" for s in sizes))
    console.print(table)
