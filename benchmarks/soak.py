"""Hours of load with a restart of a random peer every minute, to check that memory and open descriptors do not grow.

Five local peers, at least three holders per block. Images arrive at a bounded rate. Each minute one of three peers is
killed or asked to leave, at random, and started again; the other two are never restarted. Resident memory and
descriptors of the source and of those two are sampled after the first minute, before any restart, and at the end; those
of the others some time after their last start and at the end. Bar: growth of at most 5 %.

The source runs in this process. So do the samples and a table with one number per request, which is allocated before
the first sample. Without ``--bundle``, other processes export an untrained model of the digits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import RequestError
from ls_edge.data.datasets import open_data
from ls_edge.device import hardware
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.results import Answer
from ls_edge.runtime.source.source import Source

BAR = 0.05
"""Allowed growth, as a fraction."""
STEADY, RESTARTED = ("anna", "ben"), ("cleo", "dan", "eve")
SETTLED_S = 20.0
"""Longest time from the start of a restarted peer to its first sample, in seconds."""
WINDOW = 9
"""Number of samples, one per second, whose median is a result."""
INFLIGHT = 64
"""Largest number of requests in flight; at this limit the load waits."""

Sample = tuple[int, int]
"""Resident memory in bytes, and open descriptors."""


def sample(pid: int | str = "self") -> Sample:
    """Return the resources of a process; raise OSError if it has ended."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


class Load:
    """Load that submits images at a rate, on its own thread, and counts the outcomes."""

    def __init__(self, source: Source, arrays: list[np.ndarray], rate: float, seconds: float) -> None:
        self.submitted = self.answered = self.degraded = 0
        self.failed: Counter[str] = Counter()
        self.held_back_s = 0.0
        """Seconds that the load waited because :data:`INFLIGHT` requests were in flight."""
        self._source = source
        self._arrays = arrays
        self._rate = rate
        self._latency = np.full(int(rate * seconds * 1.1) + 1000, -1.0, np.float32)
        self._gate = threading.Semaphore(INFLIGHT)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def outcomes(self) -> int:
        """Number of requests that have ended."""
        return self.answered + self.failed.total()

    def latency_ms(self) -> dict[str, float]:
        """Return percentiles over all answers."""
        found = self._latency[self._latency >= 0]
        return {f"p{q}": round(float(np.percentile(found, q)), 2) for q in (50, 95, 99, 100)} if len(found) else {}

    def _run(self) -> None:
        started = time.monotonic()
        while not self._over.wait(max(0.0, started + self.submitted / self._rate - time.monotonic())):
            before = time.monotonic()
            while not self._gate.acquire(timeout=0.1):
                if self._over.is_set():
                    return
            waited = time.monotonic() - before
            if waited > 0.01:
                self.held_back_s += waited
                started += waited
            future = self._source.submit(self._arrays[self.submitted % len(self._arrays)])
            self.submitted += 1
            future.add_done_callback(self._done)

    def _done(self, future: Future[Answer]) -> None:
        error = future.exception()
        with self._lock:
            if error is None:
                answer = future.result()
                self.answered += 1
                self.degraded += answer.degraded
                self._latency[self.answered % len(self._latency)] = answer.latency_ms
            else:
                self.failed[type(error).__name__ if isinstance(error, RequestError) else f"untyped {error!r}"] += 1
        self._gate.release()


class Watch:
    """Latest samples of each process, and medians that were kept."""

    def __init__(self, peers: LocalCluster) -> None:
        self.kept: dict[str, dict[str, Sample]] = {}
        """Medians by process and moment (``first``, ``end``)."""
        self.series: list[int] = []
        """Resident memory of the source, one median per minute."""
        self._peers = peers
        self._last: dict[str, deque[Sample]] = {name: deque(maxlen=WINDOW) for name in ("source", *peers.bundles)}

    def take(self) -> None:
        """Take one sample of each running process."""
        for name, last in self._last.items():
            with contextlib.suppress(OSError):  # it has just ended
                last.append(sample(self._peers.processes[name].pid if name != "source" else "self"))

    def median(self, name: str) -> Sample:
        """Return the median of the last samples."""
        last = self._last[name]
        return int(statistics.median(one[0] for one in last)), int(statistics.median(one[1] for one in last))

    def keep(self, moment: str, *names: str) -> None:
        """Keep the medians of some processes."""
        for name in names:
            self.kept.setdefault(name, {})[moment] = self.median(name)

    def forget(self, name: str) -> None:
        """Forget the samples of a process that was replaced."""
        self._last[name].clear()
        self.kept.pop(name, None)


def run(
    quick: bool = False, *, minutes: float = 60.0, rate: float = 20.0, seed: int = 0, bundle: Path | None = None
) -> dict[str, Any]:
    """Run the load and return the document; ``quick`` is twenty seconds with a restart every five."""
    seconds, every = (20.0, 5.0) if quick else (minutes * 60.0, 60.0)
    with tempfile.TemporaryDirectory(prefix="ls-edge-soak-") as folder:
        opened = Bundle.open(bundle or _export(Path(folder)))
        with LocalCluster(Path(folder) / "peers", opened.folder, _placement(opened.num_blocks)) as peers:
            peers.wait_warm()
            with Source.open(peers.path, opened, max_skips=0) as source:
                missing = source.wait_ready(10.0)
                assert not missing, f"no peer serves blocks {missing}"
                return _soak(peers, source, seconds, every, rate, random.Random(seed)) | {"quick": quick, "seed": seed}


def _soak(
    peers: LocalCluster, source: Source, seconds: float, every: float, rate: float, rng: random.Random
) -> dict[str, Any]:
    arrays = [source.preprocess(image.read(), image.name) for image in open_data("digits", "eval").images[:64]]
    watch, restarts, started_at = Watch(peers), [], {}
    began, next_restart, next_series = time.monotonic(), every, 60.0
    with Load(source, arrays, rate, seconds) as load:
        while (at := time.monotonic() - began) < seconds:
            watch.take()
            if at >= next_restart and not restarts:
                watch.keep("first", "source", *STEADY)
            # No restart in the last part: all links are up at the end, as when the first samples are taken.
            if at >= next_restart and at < seconds - every / 2:
                next_restart += every
                name, kind = rng.choice(RESTARTED), rng.choice(("kill", "terminate"))
                kill = peers.kill if kind == "kill" else peers.terminate
                kill(name)
                peers.start(name)
                peers.wait_warm(name)
                watch.forget(name)
                started_at[name] = at = time.monotonic() - began
                restarts.append({"at_s": round(at, 1), "peer": name, "how": kind})
                print(_line(at, load, watch), file=sys.stderr, flush=True)
            for name, start in list(started_at.items()):
                if at - start >= min(SETTLED_S, every / 2):
                    watch.keep("first", name)
                    del started_at[name]
            if at >= next_series:
                next_series += 60.0
                watch.series.append(watch.median("source")[0])
            time.sleep(1.0 - (time.monotonic() - began) % 1.0)
        watch.take()
        watch.keep("end", "source", *STEADY, *RESTARTED)
    deadline = time.monotonic() + source.settings.budget_ms / 1e3 + 5
    while load.outcomes < load.submitted and time.monotonic() < deadline:
        time.sleep(0.05)
    usage = {name: _usage(watch.kept.get(name, {})) for name in ("source", *STEADY, *RESTARTED)}
    compared = [usage[name] for name in ("source", *STEADY)]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "rate": rate,
        "restart_every_s": every,
        "submitted": load.submitted,
        "answered": load.answered,
        "failed": dict(load.failed),
        "lost": load.submitted - load.outcomes,
        "degraded": load.degraded,
        "duplicates_dropped": source.snapshot.late_answers,
        "reroutes": source.snapshot.reroutes,
        "held_back_s": round(load.held_back_s, 1),
        "latency_ms": load.latency_ms(),
        "restarts": restarts,
        "usage": usage,
        "source_rss_by_minute": watch.series,
        "bar": BAR,
        "within_bar": all(u["rss_growth"] <= BAR and u["descriptors_growth"] <= BAR for u in compared),
        "machine": {"cpu": hardware.cpu_name(), "cores": hardware.cores(), "load": os.getloadavg()[0]},
    }


def _usage(kept: dict[str, Sample]) -> dict[str, Any]:
    """Return first, end and growth; None for samples that were not taken."""
    first, end = kept.get("first"), kept.get("end")
    return {
        "rss_first": first and first[0],
        "rss_end": end and end[0],
        "rss_growth": round(end[0] / first[0] - 1, 4) if first and end else None,
        "descriptors_first": first and first[1],
        "descriptors_end": end and end[1],
        "descriptors_growth": round(end[1] / first[1] - 1, 4) if first and end else None,
    }


def _placement(blocks: int) -> dict[str, list[int]]:
    """Give each permanent peer half of the blocks, and the other three one half, the other half, and all blocks."""
    every = list(range(blocks))
    half = blocks // 2
    return {"anna": every[:half], "ben": every[half:], "cleo": every[::2], "dan": every[1::2], "eve": every}


def _export(folder: Path) -> Path:
    """Export an untrained model in other processes, so that the memory of this one does not include torch."""
    for arguments in (
        ["train", "--data", "digits", "--model", "vit_digits", "--epochs", "0", "--out", str(folder / "run")],
        ["export", str(folder / "run"), "--out", str(folder / "bundle"), "--per-block"],
    ):
        subprocess.run([sys.executable, "-m", "ls_edge", *arguments], check=True, stdout=sys.stderr)
    return folder / "bundle"


def _line(at: float, load: Load, watch: Watch) -> str:
    memory, descriptors = watch.median("source")
    return (
        f"{at / 60:5.1f} min  {load.submitted} submitted, {load.answered} answered, {load.failed.total()} failed; "
        f"source {memory / 2**20:.1f} MB, {descriptors} descriptors"
    )


def report(document: dict[str, Any]) -> str:
    """Return the document as a table."""
    lines = [
        f"{document['seconds']:.0f} s at {document['rate']:g} images per second, {len(document['restarts'])} restarts",
        f"{document['submitted']} submitted, {document['answered']} answered, {sum(document['failed'].values())} "
        f"failed, {document['lost']} lost, {document['duplicates_dropped']} duplicates dropped",
        f"{'process':<10}{'MB first':>10}{'MB end':>10}{'growth':>9}{'fds first':>11}{'fds end':>9}",
    ]
    for name, u in document["usage"].items():
        first, end = (f"{u[key] / 2**20:.1f}" if u[key] else "-" for key in ("rss_first", "rss_end"))
        growth = "-" if u["rss_growth"] is None else f"{u['rss_growth']:+.1%}"
        fds = [str(u[key] or "-") for key in ("descriptors_first", "descriptors_end")]
        lines.append(f"{name:<10}{first:>10}{end:>10}{growth:>9}{fds[0]:>11}{fds[1]:>9}")
    lines.append(f"within {document['bar']:.0%}: {'yes' if document['within_bar'] else 'NO'}")
    return "\n".join(lines)


def main() -> int:
    """Run the command line; the exit code is 1 if requests were lost or failed, or memory grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration, at least 2 (default 60)")
    parser.add_argument("--rate", type=float, default=20.0, help="images per second (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the restarts (default 0)")
    parser.add_argument("--bundle", type=Path, help="bundle (default: an untrained model of the digits)")
    parser.add_argument(
        "--quick", action="store_true", help="a run of twenty seconds that only checks that everything works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    if options.minutes < 2 or options.rate <= 0:
        parser.error(
            f"--minutes {options.minutes:g} --rate {options.rate:g}: use at least 2 minutes and a rate above 0"
        )
    document = run(
        options.quick, minutes=options.minutes, rate=options.rate, seed=options.seed, bundle=options.bundle
    )  # fmt: skip
    print(report(document))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    bad = document["lost"] or document["failed"] or not (options.quick or document["within_bar"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
