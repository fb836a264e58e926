"""Latency and throughput of a chain of peers, compared with a minimal chain and with one process.

One image at a time, one thread per engine, contenders in turn:

- ``process``: stem, all blocks and head one after the other in this process;
- ``process, pauses``: like ``process``, with a pause before the blocks of each peer, as long as a peer of the chain
  waits for the others. The pauses are not counted; engines are slower after one, even without messages;
- ``minimal``: the blocks in plain processes over ZeroMQ PAIR sockets (``stage``), stem and head here;
- ``real``: the same placement with ``ls-edge peer`` processes and :class:`ls_edge.runtime.source.source.Source`;
- ``real, cpus``: like ``real``, with the key ``cpus``: engines on the last core, all other threads on the others;
- ``minimal one``, ``real one``: ``minimal`` and ``real`` with all blocks in a single remote process.

Then several requests in flight, from one or more sources. CPU time and context switches come from ``/proc``, by process
and thread. Messages and bytes are counted as they are handed to the sockets, with peers on threads of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

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
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSettings
from ls_edge.runtime.protocol.framing import decode
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.links import Links

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vit_digits", {"depth": 12}),
    ("vit_tiny_patch16_224", {}),
    ("vit_small_patch16_224", {}),
    ("vit_base_patch16_224", {}),
)
STAGES = 3
IN_FLIGHT = (1, 8, 64)
SOURCES = (1, 2, 4)
BAR_MINIMAL_MS, BAR_PROCESS_MS, BAR_ONE_MS, BAR_CPU_MS = 0.7, 1.0, 1.5, 0.8
"""Bars: cost of a hop beyond the minimal chain and beyond one process, cost of one remote peer, and CPU time of a visit
beyond the engines."""
PAUSE_S = 0.002
MICROBATCH = 8
"""Largest number of requests in one engine call, in the results with microbatches."""
_MOST_WAIT_MS = 60_000
"""Timeout for an answer."""
_SENT = "messages of ZeroMQ"
"""Name of the count of ZeroMQ messages, one of which may carry several messages of the protocol."""
_NS = 1e6
_TITLES = {
    "in_flight": "in flight", "sources": "sources", "microbatches": f"in flight, microbatches of {MICROBATCH}"
}  # fmt: skip

Call = Callable[[np.ndarray], float]


def run(quick: bool) -> dict[str, Any]:
    """Measure latency, CPU time by process, messages and throughput of each model."""
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
        spent: dict[str, Counter[tuple[str, str]]] = {contender: Counter() for contender in calls}
        for _, contender in in_turn(tuple(calls), rounds):
            before = _usage(processes[contender])
            times = []
            for index in range(burst):
                time.sleep(PAUSE_S)
                times.append(calls[contender](images[index % len(images)]))
            spent[contender].update(_usage(processes[contender]) - before)
            seconds[contender] += times[leave_out:]
        answers = rounds * burst
        found = {
            contender: {
                "ms": ms(values),
                "processes": _by_process(spent[contender], answers),
            }
            for contender, values in seconds.items()
        }
    p50 = {contender: results["ms"]["p50"] for contender, results in found.items()}
    hops = STAGES + 1
    over = {
        "hop_over_minimal_ms": round((p50["real"] - p50["minimal"]) / hops, 4),
        "hop_over_process_ms": round((p50["real"] - p50["process"]) / hops, 4),
        "one_over_process_ms": round(p50["real one"] - p50["process"], 4),
        "hop_over_pausing_process_ms": round((p50["real"] - p50["process, pauses"]) / hops, 4),
        "one_over_minimal_ms": round(p50["real one"] - p50["minimal one"], 4),
    }
    if "real, cpus" in p50:
        over["cpus_hop_over_minimal_ms"] = round((p50["real, cpus"] - p50["minimal"]) / hops, 4)
    return {
        "model": name, "tokens_bytes": bundle.manifest.tokens.bytes_per_image, "contenders": found, **over,
        "traffic": _traffic(path, bundle, images, 8 if quick else 32),
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
    calls["process, pauses"] = _pausing(pipeline, _placement(bundle.num_blocks, STAGES))
    processes: dict[str, dict[str, int]] = {"process": us, "process, pauses": us}
    for label, count in (("", STAGES), (" one", 1)):
        placement = _placement(bundle.num_blocks, count)
        minimal = stack.enter_context(minimal_chain(path, pipeline, placement))
        calls[f"minimal{label}"] = minimal.call
        processes[f"minimal{label}"] = us | minimal.pids
        keys: dict[str, dict[str, Any]] = {f"real{label}": {}}
        if count == STAGES and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
            keys["real, cpus"] = {"cpus": [max(os.sched_getaffinity(0))]}
        for contender, each in keys.items():
            cluster = stack.enter_context(local_cluster(path, placement, **each))
            source = stack.enter_context(ready_source(cluster.file, bundle, policy="sequential"))
            calls[contender] = _real(source)
            processes[contender] = us | {name: p.pid for name, p in cluster.processes.items()}
    return calls, processes


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _pausing(pipeline: Pipeline, placement: Mapping[str, Sequence[int]]) -> Call:
    """Return a call of stem, blocks and head in this process, with pauses before the blocks of each peer."""
    executor = pipeline.executor
    whole = 0.0
    """Seconds of the last image, which determine the next pauses."""

    def call(image: np.ndarray) -> float:
        nonlocal whole
        counted, started = 0.0, time.perf_counter()
        tokens = pipeline.stem(image[None])
        for blocks in placement.values():
            counted += time.perf_counter() - started
            time.sleep(whole * (1.0 - len(blocks) / pipeline.num_blocks))
            started = time.perf_counter()
            slots = np.full(1, blocks[0], np.int64) if executor.needs_slot else None
            tokens = executor.run(blocks, tokens, slots)
        pipeline.head(tokens)
        whole = counted + time.perf_counter() - started
        return whole

    return call


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
            name: stack.enter_context(Child("benchmarks.stage", str(path), str(blocks[0]), str(len(blocks))))
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


# CPU time and context switches.


def _usage(pids: Mapping[str, int]) -> Counter[tuple[str, str]]:
    """Count CPU time in ns and context switches so far: by (process, ``cpu thread``), (process, ``switches``)."""
    found: Counter[tuple[str, str]] = Counter()
    for name, pid in pids.items():
        for index, task in enumerate(sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                thread = "main" if not index else (task / "comm").read_text().strip() + f" {index}"
                found[name, f"cpu {thread}"] += int((task / "schedstat").read_text().split()[0])
                for line in (task / "status").read_text().splitlines():
                    if line.startswith(("voluntary_ctxt", "nonvoluntary_ctxt")):
                        found[name, line.split("_")[0]] += int(line.split()[1])
    return found


def _by_process(spent: Counter[tuple[str, str]], answers: int) -> dict[str, Any]:
    """Return CPU milliseconds and context switches per answer."""
    result: dict[str, Any] = {}
    for (name, what), count in spent.items():
        process = result.setdefault(name, {"cpu_ms": 0.0, "threads_ms": {}, "switches": {}})
        if what.startswith("cpu "):
            value = round(count / _NS / answers, 4)
            process["cpu_ms"] = round(process["cpu_ms"] + value, 4)
            if value >= 0.01:
                process["threads_ms"][what.removeprefix("cpu ")] = value
        else:
            process["switches"][what] = round(count / answers, 1)
    return result


# Messages.


def _traffic(path: Path, bundle: Bundle, images: np.ndarray, answers: int) -> dict[str, Any]:
    """Count messages and bytes per answer, by kind, with peers on threads of this process."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    send = Links.send

    def counting(self: Links, link: Any, frames: Sequence[bytes | memoryview]) -> bool:
        counts[_SENT] += 1
        counts.update(type(message).__name__.lower() for message in decode(frames[0]))
        sizes[_SENT] += sum(len(frame) for frame in frames)
        return send(self, link, frames)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = LocalCluster(folder, path, _placement(bundle.num_blocks, STAGES))  # its processes are not started
        stack.enter_context(mock.patch.object(Links, "send", counting))
        for entry in cluster.file.peers:
            peer = Peer(cluster.file, entry.name, bundle, PeerSettings(threads=1))
            thread = threading.Thread(target=peer.serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 10.0)
            stack.callback(peer.stop)
        source = stack.enter_context(ready_source(cluster.file, bundle, policy="sequential"))
        source.submit(images[0]).result()
        idle_from = time.monotonic()
        counts.clear()
        time.sleep(1.0)
        idle = {kind: round(count / (time.monotonic() - idle_from), 1) for kind, count in counts.items()}
        counts.clear()
        sizes.clear()
        started = time.monotonic()
        for index in range(answers):
            source.submit(images[index % len(images)]).result()
        seconds = time.monotonic() - started
        messages = {kind: round(count / answers, 2) for kind, count in sorted(counts.items())}
        sent = sum(sizes.values())
    return {
        "messages": messages,
        "header_bytes": round(sent / answers - (STAGES + 1) * bundle.manifest.tokens.bytes_per_image),
        "seconds": round(seconds, 3),
        "idle_a_second": idle,
    }


# Several requests in flight.


def _throughput(path: Path, bundle: Bundle, images: np.ndarray, quick: bool) -> dict[str, Any]:
    """Measure answers per second and CPU time per answer, by requests in flight and by sources."""
    seconds = 1.0 if quick else 4.0
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(local_cluster(path, _placement(bundle.num_blocks, STAGES)))
        source = stack.enter_context(ready_source(cluster.file, bundle))
        by_flight: dict[str, Any] = {}
        for count in IN_FLIGHT:
            _answers([source], images, count, 0.3)
            by_flight[str(count)] = _measured([source], images, count, seconds, cluster)
        by_sources: dict[str, Any] = {}
        sources = [source]
        for number in SOURCES[: 2 if quick else None]:
            while len(sources) < number:
                sources.append(stack.enter_context(ready_source(cluster.file, bundle)))
            by_sources[str(number)] = _measured(sources, images, 8, seconds, cluster)
    by_microbatch: dict[str, Any] = {}
    placement = _placement(bundle.num_blocks, STAGES)
    with (
        local_cluster(path, placement, max_batch=MICROBATCH) as cluster,
        ready_source(cluster.file, bundle) as source,
    ):
        for count in IN_FLIGHT[1:]:
            _answers([source], images, count, 0.3)
            by_microbatch[str(count)] = _measured([source], images, count, seconds, cluster)
    return {"in_flight": by_flight, "sources": by_sources, "microbatches": by_microbatch}


def _measured(
    sources: Sequence[Source], images: np.ndarray, in_flight: int, seconds: float, cluster: LocalCluster
) -> dict[str, float]:
    us = {"source": os.getpid()}
    peers = {name: process.pid for name, process in cluster.processes.items()}
    before = _usage(us | peers)
    rates = [_answers(sources, images, in_flight, seconds / 3) for _ in range(3)]
    used = _usage(us | peers) - before
    spent = sum(count for (name, what), count in used.items() if what.startswith("cpu ") and name in us)
    in_peers = sum(count for (name, what), count in used.items() if what.startswith("cpu ") and name in peers)
    answers = sum(count for count, _ in rates)
    return {
        "answers_a_second": round(median([count / took for count, took in rates]), 1),
        "source_cpu_ms": round(spent / _NS / max(1, answers), 4),
        "peers_cpu_ms": round(in_peers / _NS / max(1, answers), 4),
    }


def _answers(sources: Sequence[Source], images: np.ndarray, in_flight: int, seconds: float) -> tuple[int, float]:
    """Keep ``in_flight`` requests of each source in flight; return the answers and the seconds until the last one.

    All requests are awaited: with few of them, those that end within ``seconds`` are fewer than the peers can answer.
    """
    ended: queue.SimpleQueue[tuple[Source, Future[Any]]] = queue.SimpleQueue()
    numbers = itertools.count()

    def submit(source: Source) -> None:
        future = source.submit(images[next(numbers) % len(images)])
        future.add_done_callback(lambda future: ended.put((source, future)))

    started, answers = time.perf_counter(), 0
    for source in sources:
        for _ in range(in_flight):
            submit(source)
    left = len(sources) * in_flight
    while left:
        source, future = ended.get(timeout=_MOST_WAIT_MS / 1e3)
        future.result()
        answers, left = answers + 1, left - 1
        if time.perf_counter() - started < seconds:
            submit(source)
            left += 1
    return answers, time.perf_counter() - started


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for model in document["models"]:
        table = new_table(
            f"{model['model']}, {model['tokens_bytes']} bytes of tokens: one image at a time",
            columns := ("", "ms: p50 (p10 to p90)", "CPU ms per answer, by process", "context switches"),
            left=columns,
        )
        for name, results in model["contenders"].items():
            times = results["ms"]
            cpu = ", ".join(f"{p} {f['cpu_ms']:.2f}" for p, f in results["processes"].items())
            switches = ", ".join(f"{sum(f['switches'].values()):.0f}" for f in results["processes"].values())
            table.add_row(name, f"{times['p50']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})", cpu, switches)
        table.add_section()
        for title, key, bar, holds in (
            ("a hop beyond the minimal chain", "hop_over_minimal_ms", BAR_MINIMAL_MS, "minimal"),
            ("a hop beyond one process", "hop_over_process_ms", BAR_PROCESS_MS, "process"),
            ("one peer beyond one process", "one_over_process_ms", BAR_ONE_MS, "one"),
        ):
            verdict = "holds" if model["holds"][holds] else "missed"
            table.add_row(title, f"{model[key]:.2f}, at most {bar}: {verdict}")
        table.add_row("a hop beyond one process with pauses", f"{model['hop_over_pausing_process_ms']:.2f}")
        if "cpus_hop_over_minimal_ms" in model:
            table.add_row("with cpus, beyond the minimal chain", f"{model['cpus_hop_over_minimal_ms']:.2f}")
        traffic = model["traffic"]
        messages = ", ".join(f"{kind} {count}" for kind, count in traffic["messages"].items())
        table.add_row("messages per answer", messages)
        for what in ("in_flight", "sources", "microbatches"):
            for number, results in model["throughput"][what].items():
                table.add_row(
                    f"{number} {_TITLES[what]}",
                    f"{results['answers_a_second']:.1f} answers/s, {results['source_cpu_ms']:.2f} ms CPU in the source "
                    f"and {results['peers_cpu_ms']:.2f} in the peers",
                )
        console.print(table)
