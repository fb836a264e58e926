"""Latency and throughput of a chain of peers, compared with a minimal chain and with one process.

One image at a time, one thread per engine, contenders in turn:

- ``process``: stem, all blocks and head one after the other in this process;
- ``minimal``: the blocks in plain processes over ZeroMQ PAIR sockets, stem and head here;
- ``real``: the same placement with ``ls-edge peer`` processes and :class:`ls_edge.runtime.source.source.Source`;
- ``minimal one``, ``real one``: ``minimal`` and ``real`` with all blocks in a single remote process.

Then several requests in flight. CPU time comes from ``/proc``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from rich.console import Console

from benchmarks.common import (
    Child,
    bundle_of,
    images_for,
    in_turn,
    local_cluster,
    median,
    ms,
    new_table,
    ready_source,
    report_progress,
)
from ls_edge.core.bundle import Bundle
from ls_edge.engines.engine import warm_up
from ls_edge.engines.opening import open_block_engines
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vit_digits", {"depth": 12}),
    ("vit_tiny_patch16_224", {}),
    ("vit_small_patch16_224", {}),
    ("vit_base_patch16_224", {}),
)
STAGES = 3
IN_FLIGHT = (1, 8, 64)
BAR_MINIMAL_MS, BAR_PROCESS_MS, BAR_ONE_MS, BAR_CPU_MS = 0.7, 1.0, 1.5, 0.8
"""Bars: cost of a hop beyond the minimal chain and beyond one process, cost of one remote peer, and CPU time of a visit
beyond the engines."""
PAUSE_S = 0.002
_MOST_WAIT_MS = 60_000
"""Timeout for an answer."""
_NS = 1e6

Call = Callable[[np.ndarray], float]


def run(quick: bool) -> dict[str, Any]:
    """Measure latency, CPU time by process and throughput of each model."""
    models = MODELS[:1] if quick else MODELS
    return {"models": [_model(name, args, quick) for name, args in models]}


def _model(name: str, args: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    path = bundle_of(name, dict(args))
    report_progress(f"  {name}")
    bundle = Bundle.open(path)
    images = images_for(bundle, 8)
    rounds, burst, leave_out = (2, 6, 1) if quick else (12, 12, 3)
    with contextlib.ExitStack() as stack:
        calls, processes = _contenders(stack, path, bundle)
        for call in calls.values():
            for image in images[:3]:
                call(image)
        seconds: dict[str, list[float]] = {contender: [] for contender in calls}
        spent: dict[str, Counter[str]] = {contender: Counter() for contender in calls}
        for _, contender in in_turn(tuple(calls), rounds):
            before = _cpu_ns(processes[contender])
            times = []
            for index in range(burst):
                time.sleep(PAUSE_S)
                times.append(calls[contender](images[index % len(images)]))
            spent[contender].update(_cpu_ns(processes[contender]) - before)
            seconds[contender] += times[leave_out:]
        answers = rounds * burst
        found = {
            contender: {
                "ms": ms(values),
                "cpu_ms": {name: round(count / _NS / answers, 4) for name, count in spent[contender].items()},
            }
            for contender, values in seconds.items()
        }
    p50 = {contender: results["ms"]["p50"] for contender, results in found.items()}
    hops = STAGES + 1
    over = {
        "hop_over_minimal_ms": round((p50["real"] - p50["minimal"]) / hops, 4),
        "hop_over_process_ms": round((p50["real"] - p50["process"]) / hops, 4),
        "one_over_process_ms": round(p50["real one"] - p50["process"], 4),
        "one_over_minimal_ms": round(p50["real one"] - p50["minimal one"], 4),
    }
    return {
        "model": name, "tokens_bytes": bundle.manifest.tokens.bytes_per_image, "contenders": found, **over,
        "throughput": _throughput(path, bundle, images, quick),
        "holds": {
            "minimal": over["hop_over_minimal_ms"] <= BAR_MINIMAL_MS,
            "process": over["hop_over_process_ms"] <= BAR_PROCESS_MS,
            "one": over["one_over_process_ms"] <= BAR_ONE_MS,
        },
    }  # fmt: skip


def _placement(blocks: int, peers: int) -> dict[str, list[int]]:
    """Split the blocks into consecutive parts of about equal size."""
    ends = [round(index * blocks / peers) for index in range(peers + 1)]
    return {f"p{index}": list(range(ends[index], ends[index + 1])) for index in range(peers)}


def _contenders(
    stack: contextlib.ExitStack, path: Path, bundle: Bundle
) -> tuple[dict[str, Call], dict[str, dict[str, int]]]:
    """Return the contenders, and the processes of each: name to pid."""
    pipeline = stack.enter_context(Pipeline.open(bundle, threads=1))
    us = {"source": os.getpid()}
    calls: dict[str, Call] = {"process": lambda image: _timed(lambda: pipeline.forward(image[None]))}
    processes: dict[str, dict[str, int]] = {"process": us}
    for label, count in (("", STAGES), (" one", 1)):
        placement = _placement(bundle.num_blocks, count)
        minimal = stack.enter_context(minimal_chain(path, pipeline, placement))
        calls[f"minimal{label}"] = minimal.call
        processes[f"minimal{label}"] = us | minimal.pids
        cluster = stack.enter_context(local_cluster(path, placement))
        source = stack.enter_context(ready_source(cluster.file, bundle, policy="sequential"))
        calls[f"real{label}"] = _real(source)
        processes[f"real{label}"] = us | {name: p.pid for name, p in cluster.processes.items()}
    return calls, processes


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _real(source: Source) -> Call:
    return lambda image: _timed(lambda: source.submit(image).result())


class MinimalChain:
    """Our end of the minimal chain."""

    def __init__(
        self, stack: contextlib.ExitStack, path: Path, pipeline: Pipeline, placement: Mapping[str, Sequence[int]]
    ) -> None:
        """Start the stages and connect them."""
        self._pipeline = pipeline
        self._shape: tuple[int, ...] = ()
        children = {
            name: stack.enter_context(Child("benchmarks.chain", str(path), str(blocks[0]), str(len(blocks))))
            for name, blocks in placement.items()
        }
        self.pids = {name: child.process.pid for name, child in children.items()}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        self._out, self._back = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._back.rcvtimeo = _MOST_WAIT_MS
        ports = [child.read() for child in children.values()]
        for child, port in zip(
            children.values(), [*ports[1:], self._back.bind_to_random_port("tcp://127.0.0.1")], strict=True
        ):
            child.send(port)
            child.read()
        self._out.connect(f"tcp://127.0.0.1:{ports[0]}")

    def call(self, image: np.ndarray) -> float:
        """Return the seconds of one image."""
        return _timed(lambda: self._forward(image))

    def stretch(self, images: np.ndarray, count: int, in_flight: int) -> float:
        """Return the seconds of ``count`` images, without those that fill and empty the chain."""
        answered: list[float] = []
        sent = 0
        while len(answered) < count + 2 * in_flight:
            while sent < count + 2 * in_flight and sent - len(answered) < in_flight:
                self._send(images[sent % len(images)])
                sent += 1
                if self._back.poll(0):
                    break
            self._receive()
            answered.append(time.perf_counter())
        return answered[in_flight + count - 1] - answered[in_flight - 1]

    def _forward(self, image: np.ndarray) -> None:
        self._send(image)
        self._receive()

    def _send(self, image: np.ndarray) -> None:
        tokens = self._pipeline.stem(image[None])
        self._shape = tokens.shape
        self._out.send(memoryview(tokens).cast("B"), copy=False)

    def _receive(self) -> None:
        frame = self._back.recv(copy=False)
        self._pipeline.head(np.frombuffer(frame.buffer, np.float32).reshape(self._shape))


@contextlib.contextmanager
def minimal_chain(path: Path, pipeline: Pipeline, placement: Mapping[str, Sequence[int]]) -> Iterator[MinimalChain]:
    with contextlib.ExitStack() as stack:
        yield MinimalChain(stack, path, pipeline, placement)


def _cpu_ns(pids: Mapping[str, int]) -> Counter[str]:
    """Return the CPU time of each process so far, in nanoseconds."""
    used: Counter[str] = Counter()
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                used[name] += int((task / "schedstat").read_text().split()[0])
    return used


def _throughput(path: Path, bundle: Bundle, images: np.ndarray, quick: bool) -> dict[str, Any]:
    """Measure answers per second and CPU time per answer, by requests in flight."""
    found = {}
    with (
        local_cluster(path, _placement(bundle.num_blocks, STAGES)) as cluster,
        ready_source(cluster.file, bundle) as source,
    ):
        for count in IN_FLIGHT:
            _answers(source, images, count, 0.3)
            found[str(count)] = _measured(source, images, count, 1.0 if quick else 4.0, cluster)
    return found


def _measured(
    source: Source, images: np.ndarray, in_flight: int, seconds: float, cluster: LocalCluster
) -> dict[str, float]:
    us = {"source": os.getpid()}
    peers = {name: process.pid for name, process in cluster.processes.items()}
    before = _cpu_ns(us | peers)
    rates = [_answers(source, images, in_flight, seconds / 3) for _ in range(3)]
    used = _cpu_ns(us | peers) - before
    answers = sum(count for count, _ in rates)
    return {
        "answers_a_second": round(median([count / took for count, took in rates]), 1),
        "source_cpu_ms": round(used["source"] / _NS / max(1, answers), 4),
        "peers_cpu_ms": round((used.total() - used["source"]) / _NS / max(1, answers), 4),
    }


def _answers(source: Source, images: np.ndarray, in_flight: int, seconds: float) -> tuple[int, float]:
    """Keep ``in_flight`` requests in flight; return the answers and the seconds until the last one.

    All requests are awaited: with few of them, those that end within ``seconds`` are fewer than the peers can answer.
    """
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    numbers = itertools.count()

    def submit() -> None:
        source.submit(images[next(numbers) % len(images)]).add_done_callback(ended.put)

    started, answers = time.perf_counter(), 0
    for _ in range(in_flight):
        submit()
    left = in_flight
    while left:
        ended.get(timeout=_MOST_WAIT_MS / 1e3).result()
        answers, left = answers + 1, left - 1
        if time.perf_counter() - started < seconds:
            submit()
            left += 1
    return answers, time.perf_counter() - started


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for model in document["models"]:
        table = new_table(
            f"{model['model']}, {model['tokens_bytes']} bytes of tokens: one image at a time",
            columns := ("", "ms: p50 (p10 to p90)", "CPU ms per answer, by process"),
            left=columns,
        )
        for name, results in model["contenders"].items():
            times = results["ms"]
            cpu = ", ".join(f"{process} {spent:.2f}" for process, spent in results["cpu_ms"].items())
            table.add_row(name, f"{times['p50']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})", cpu)
        table.add_section()
        for title, key, bar, holds in (
            ("a hop beyond the minimal chain", "hop_over_minimal_ms", BAR_MINIMAL_MS, "minimal"),
            ("a hop beyond one process", "hop_over_process_ms", BAR_PROCESS_MS, "process"),
            ("one peer beyond one process", "one_over_process_ms", BAR_ONE_MS, "one"),
        ):
            verdict = "holds" if model["holds"][holds] else "missed"
            table.add_row(title, f"{model[key]:.2f}, at most {bar}: {verdict}")
        for number, results in model["throughput"].items():
            table.add_row(
                f"{number} in flight",
                f"{results['answers_a_second']:.1f} answers/s, {results['source_cpu_ms']:.2f} ms CPU in the source "
                f"and {results['peers_cpu_ms']:.2f} in the peers",
            )
        console.print(table)


def _stage(path: str, start: str, count: str) -> None:
    """Run consecutive blocks between two ZeroMQ PAIR sockets, and nothing else, until standard input ends.

    Print the port as a JSON line, then read the port of the next stage.
    """
    bundle, first = Bundle.open(path), int(start)
    blocks = range(first, first + int(count))
    engines = open_block_engines(bundle, blocks, threads=1)
    for engine in engines.values():
        warm_up(engine)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    upstream, downstream = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    print(json.dumps(upstream.bind_to_random_port("tcp://127.0.0.1")), flush=True)
    downstream.connect(f"tcp://127.0.0.1:{json.loads(sys.stdin.readline())}")
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    print("{}", flush=True)
    shape = (1, bundle.manifest.tokens.count, bundle.manifest.tokens.dim)
    while True:
        tokens = np.frombuffer(upstream.recv(copy=False).buffer, np.float32).reshape(shape)
        for block in blocks:
            inputs = {"tokens": tokens}
            if bundle.manifest.needs_slot:
                inputs["slot"] = np.asarray([block], dtype=np.int64)
            tokens = engines[block].run(inputs)
        downstream.send(memoryview(tokens).cast("B"), copy=False)


if __name__ == "__main__":
    _stage(*sys.argv[1:])
