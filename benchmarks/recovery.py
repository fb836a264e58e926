"""Time that a failing peer adds to the request that it is working on.

Four peers, each half of the blocks on two of them, one request at a time. At a random moment of a request, the peer
that holds it is killed (SIGKILL), stopped (SIGSTOP), or its engine hangs. The source learns that peer, and since when
it holds the request, from ACCEPT and MOVED. A request is *affected* if its answer does not name that peer, so all of
the peer's work was lost; other requests had just moved on and count as missed. The *added* time is the latency, less
the median without faults, less the time from the arrival of the tokens at that peer to the fault, which is the work to
repeat. The median without faults is that of the requests between the faults, with the same peers.

*last holder*: one of four peers alone holds the last block. It is killed while requests are sent one after the other;
answers wait until the block is skipped. The longest degraded answer of each kill is reported.

``compare`` measures the same for ipyparallel and Dask (``frameworks``), installed from the package index into an
environment below the system's temporary folder: a chain of three stages on three workers, arrays of the same size, and
the worker of the second stage is killed.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import (
    ROOT,
    BenchmarkError,
    bundle_of,
    cache_folder,
    images_for,
    local_cluster,
    median,
    ms,
    new_table,
    ready_source,
    report_progress,
    wait_for,
)
from ls_edge.core.bundle import Bundle
from ls_edge.runtime.protocol.messages import Accept, Moved
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.source.source_rules import SourceMachine
from ls_edge.runtime.routing.state.events import Arrived, Event, Instruction, Received, Submit
from ls_edge.runtime.source.results import Answer
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

MODEL = "vit_tiny_patch16_224"
KINDS = ("kill", "stop", "hang")
BARS_MS = {"kill": 50.0, "stop": 400.0, "hang": 50.0}
"""Bars of the median; for a hang, beyond the deadline of a hop."""
BUDGET_S = 60.0
AFTER_S = 2.0
"""Seconds of requests after the only holder of a block is killed."""
FRAMEWORKS = ("ipyparallel", "dask")


def run(quick: bool, compare: bool = False) -> dict[str, Any]:
    """Measure the milliseconds that faults of each kind add."""
    wanted = 3 if quick else 30
    # Requests of the tiny model are too short to be hit, so its engines wait in addition to computing.
    path = bundle_of("vit_digits", {"depth": 6}) if quick else bundle_of(MODEL)
    always = Faults(slow=30.0) if quick else Faults()
    bundle = Bundle.open(path)
    half, blocks = bundle.num_blocks // 2, range(bundle.num_blocks)
    placement = {"ann": blocks[:half], "ben": blocks[:half], "cleo": blocks[half:], "dan": blocks[half:]}
    with local_cluster(path, placement, kind=FaultyCluster) as peers:
        for name in placement:
            peers.set_faults(name, always)
        holders = _Holders(BUDGET_S)
        with holders.watching(), ready_source(peers.path, path, budget_ms=BUDGET_S * 1e3) as source:
            trials = _Trials(peers, source, holders, always)
            found = {kind: trials.of(kind, wanted) for kind in KINDS}
    result: dict[str, Any] = {
        "model": bundle.manifest.model, "token_bytes": bundle.manifest.tokens.bytes_per_image,
        "without_faults_ms": ms(trials.usual), "hop_deadline_ms": median(trials.deadlines) * 1e3, "kinds": {},
    }  # fmt: skip
    for kind, (added, missed) in found.items():
        bar = BARS_MS[kind] + (result["hop_deadline_ms"] if kind == "hang" else 0.0)
        results = ms([value - median(trials.usual) for value in added])
        result["kinds"][kind] = {"added_ms": results, "missed": missed, "bar_ms": bar, "holds": results["p50"] <= bar}
    result["last_holder"] = ms(_last_holder(path, bundle, 1 if quick else 10))
    tokens = bundle.manifest.tokens
    stage_ms = median(trials.usual) * 1e3 / 3
    result["frameworks"] = dict.fromkeys(FRAMEWORKS)
    if compare:
        result["frameworks"] = {
            name: _framework(name, wanted, (1, tokens.count, tokens.dim), stage_ms) for name in FRAMEWORKS
        }
    return result


class _Holders:
    """Holder of the newest request and the time of its arrival there, as ACCEPT and MOVED report them to the source.

    One request is in flight at a time, so the first id that was not there before belongs to it.
    """

    def __init__(self, budget_s: float) -> None:
        self.now: tuple[str, float, float] | None = None
        """Name, time of arrival, and seconds without progress until the hop fails; None at the source."""
        self._budget_s = budget_s
        self._request = b""
        self._before: set[bytes] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe each event of the source's routing machine, on its thread, until the context ends."""
        handle_all = Machine.handle_all

        def look(machine: SourceMachine, events: Sequence[Event], now: float) -> list[Instruction]:
            for event in events:
                self._look(machine, event)
            return handle_all(machine, events, now)

        Machine.handle_all = look  # type: ignore[method-assign]
        try:
            yield
        finally:
            Machine.handle_all = handle_all  # type: ignore[method-assign]

    def _look(self, machine: SourceMachine, event: Event) -> None:
        if isinstance(event, Submit):
            self._before.add(self._request)
            self._request, self.now = b"", None
        elif isinstance(event, Arrived) and event.run.transfer.request == self._request:
            self.now = None
        elif isinstance(event, Received) and isinstance(event.message, Accept | Moved):
            request = event.message.transfer.request
            if not self._request and request not in self._before:
                self._request = request
            n = machine.neighbors.get(event.sender)
            moved = isinstance(event.message, Moved)
            if request == self._request and n is not None and (moved or self.now is None):
                self.now = event.sender, time.monotonic(), machine.neighbors.hop_deadline(event.sender)


class _Trials:
    """Faults one after the other, each undone before the next one."""

    def __init__(self, peers: FaultyCluster, source: Source, holders: _Holders, always: Faults) -> None:
        self.usual: list[float] = []
        """Seconds of the requests without faults."""
        self.deadlines: list[float] = []
        """Seconds without progress until a hop fails."""
        self._peers, self._source, self._always = peers, source, always
        self._image = images_for(source.bundle, 1)[0]
        self._holders = holders
        self._random = random.Random(0)
        self._asked = -1
        """Number of the newest request; a source counts from 0."""
        self._do: Mapping[str, tuple[Callable[[str], None], Callable[[str], None]]] = {
            "kill": (lambda name: peers.signal(name, signal.SIGKILL), self._start_again),
            "stop": (
                lambda name: peers.signal(name, signal.SIGSTOP),
                lambda name: peers.signal(name, signal.SIGCONT),
            ),
            "hang": (
                lambda name: peers.set_faults(name, Faults(hang=True)),
                lambda name: peers.set_faults(name, always),
            ),
        }

    def of(self, kind: str, wanted: int) -> tuple[list[float], int]:
        """Return the seconds of ``wanted`` affected requests without lost work, and the faults that missed."""
        added: list[float] = []
        missed = 0
        while len(added) < wanted:
            self._settle()
            value = self._one(kind)
            if value is None:
                missed += 1
                if missed > 10 * wanted + 20:
                    raise BenchmarkError(
                        f"{missed} faults of kind {kind} missed the request; only {len(added)} met one"
                    )
            else:
                added.append(value)
                report_progress(f"  {kind} {len(added)} of {wanted}: {(value - median(self.usual)) * 1e3:.0f} ms added")
        return added, missed

    def _settle(self) -> None:
        """Wait until all peers are reachable and three requests were answered."""
        wait_for(
            lambda: all(view.state == "alive" for view in self._source.snapshot.peers.values()),
            "all peers to be alive again",
        )
        for index in range(4):
            answer = self._ask().result(60)
            if index:
                self.usual.append(answer.latency_ms / 1e3)

    def _one(self, kind: str) -> float | None:
        do, undo = self._do[kind]
        moment = self._random.uniform(0.05, 0.95) * median(self.usual)
        started = time.monotonic()
        future, request = self._ask(), self._asked
        time.sleep(max(0.0, started + moment - time.monotonic()))
        held = self._holders.now
        if held is None or future.done():
            future.result(60)
            return None
        holder, since, deadline = held
        do(holder)
        at = time.monotonic()
        try:
            answer = future.result(60)
        finally:
            undo(holder)
        if answer.request != request:
            raise BenchmarkError("requests are not numbered from 0 in order of submission")
        if holder in answer.record.holders:
            return None
        self.deadlines.append(deadline)
        return answer.latency_ms / 1e3 - (at - since)

    def _ask(self) -> Future[Answer]:
        self._asked += 1
        return self._source.submit(self._image)

    def _start_again(self, name: str) -> None:
        self._peers.processes[name].wait()
        self._peers.start(name)
        self._peers.wait_warm(name, timeout=120.0)


def _last_holder(path: Path, bundle: Bundle, wanted: int) -> list[float]:
    """Return the seconds of the longest answer without the last block, for each kill of its only holder."""
    last = bundle.num_blocks - 1
    placement = {"ann": range(last), "ben": range(last), "cleo": range(last), "dan": [last]}
    longest: list[float] = []
    with (
        local_cluster(path, placement) as peers,
        ready_source(peers.path, path, budget_ms=BUDGET_S * 1e3, max_skips=1) as source,
    ):
        image = images_for(bundle, 1)[0]
        for number in range(wanted):
            wait_for(lambda: not source.snapshot.missing_blocks, "a holder of each block")
            peers.signal("dan", signal.SIGKILL)
            until, degraded = time.monotonic() + AFTER_S, []
            while time.monotonic() < until:
                answer = source.submit(image).result(60)
                if answer.degraded:
                    degraded.append(answer.latency_ms / 1e3)
            longest.append(max(degraded))
            report_progress(f"  last holder {number + 1} of {wanted}: {longest[-1] * 1e3:.0f} ms")
            peers.processes["dan"].wait()
            peers.start("dan")
            peers.wait_warm("dan", timeout=120.0)
    return longest


def _framework(name: str, wanted: int, shape: tuple[int, ...], stage_ms: float) -> dict[str, Any]:
    """Run ``frameworks`` in an environment that has ``name``; return its results, or the error."""
    folder = cache_folder() / "frameworks"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        report_progress(f"  installing ipyparallel and Dask into {folder}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "ipyparallel", "distributed", "numpy"]
        if subprocess.run(install, check=False).returncode:
            raise BenchmarkError(f"ipyparallel and Dask could not be installed into {folder}; leave --compare out")
        (folder / ".complete").touch()
    report_progress(f"  {name}")
    command = [
        str(python),
        str(ROOT / "benchmarks" / "frameworks.py"),
        name,
        str(wanted),
        json.dumps(shape),
        str(stage_ms),
    ]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60 * wanted)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {wanted} minutes"}
    if done.returncode:
        return {"error": f"ended with {done.returncode}"}
    raw = json.loads(done.stdout.splitlines()[-1])
    return {**raw, "added_ms": ms(raw["added_s"]), "without_faults_ms": ms(raw["usual_s"])}


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    usual = document["without_faults_ms"]
    table = new_table(
        f"{document['model']}: ms added by a fault; {usual['p50']:.1f} ms without faults",
        ("fault", "p50", "p10", "p90", "faults", "missed", "bar", ""),
    )
    for kind, row in document["kinds"].items():
        results = row["added_ms"]
        table.add_row(
            kind, *(f"{results[q]:.1f}" for q in ("p50", "p10", "p90")), str(results["runs"]), str(row["missed"]),
            f"{row['bar_ms']:.0f}", "holds" if row["holds"] else "missed",
        )  # fmt: skip
    console.print(table)
    lost = document["last_holder"]
    console.print(
        f"only holder of a block killed: longest answer without the block {lost['p50']:.0f} ms "
        f"(p10 {lost['p10']:.0f}, p90 {lost['p90']:.0f}, {lost['runs']} kills)"
    )
    table = new_table(
        "worker killed in the second of three stages: ms added",
        ("", "p50", "p10", "p90", "faults", "unanswered", "without faults"),
    )
    for name, row in document["frameworks"].items():
        if row is None or "error" in row:
            table.add_row(name, "not run" if row is None else row["error"])
            continue
        results = row["added_ms"]
        cells = [f"{results[q]:.0f}" for q in ("p50", "p10", "p90")]
        table.add_row(
            f"{name} {row['version']}", *cells, str(results["runs"]), str(row["unanswered"]),
            f"{row['without_faults_ms']['p50']:.1f}",
        )  # fmt: skip
    console.print(table)
