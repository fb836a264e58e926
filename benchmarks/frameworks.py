"""Cost of a killed worker in ipyparallel and Dask; ``recovery`` runs it in a separate environment.

``python frameworks.py ipyparallel|dask TRIALS SHAPE STAGE_MS``. A request is a chain of three stages. Each computes for
``STAGE_MS`` and returns a float32 array of the same shape. There are three worker processes of one thread. The worker
of the second stage is killed (SIGKILL) at a random moment. The tool notices this and submits the lost stages again:
Dask's scheduler does so by default, ipyparallel with ``retries``. All other settings are defaults; killed workers are
replaced before the next trial.

The *added* time is the latency, less the median without faults, less the time of stages that ran in addition to the
three required ones (each stage records when it began and ended, and whether it ended). Imports nothing of ls-edge.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

GIVE_UP_S = 120.0
"""Seconds after which a request counts as unanswered."""
RESTORE_S = 20.0
"""Time limit for the replacement of a worker, in seconds; after that the tool is restarted."""
Ask = Callable[[Any, str, float], Any]


def stage(array: Any, log: str, index: int, seconds: float) -> Any:
    """Compute for some time; write one line to ``log`` at the beginning and one at the end."""
    import os
    import time

    def note(what: str) -> None:
        with open(log, "a") as stream:
            stream.write(f"{what} {index} {os.getpid()} {time.monotonic()}\n")

    note("began")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        array = array * 1.0
    note("ended")
    return array


@contextlib.contextmanager
def dask() -> Iterator[tuple[Ask, Callable[[], bool], str]]:
    """Three single-threaded Dask workers, each restarted by its nanny."""
    import distributed

    with (
        distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):

        def ask(array: Any, log: str, seconds: float) -> Any:
            future = array
            for index in range(3):
                future = client.submit(stage, future, log, index, seconds, pure=False)
            return future.result(GIVE_UP_S)

        def restore() -> bool:
            try:
                client.wait_for_workers(3, timeout=RESTORE_S)
            except TimeoutError:  # sometimes a nanny does not restart its worker
                return False
            return True

        yield ask, restore, distributed.__version__


@contextlib.contextmanager
def ipyparallel() -> Iterator[tuple[Ask, Callable[[], bool], str]]:
    """Three ipyparallel engines behind a controller."""
    import ipyparallel as ipp

    with ipp.Cluster(n=3, log_level=40) as client:
        view = client.load_balanced_view()
        view.retries = 3

        def ask(array: Any, log: str, seconds: float) -> Any:
            for index in range(3):
                array = view.apply_async(stage, array, log, index, seconds).get(GIVE_UP_S)
            return array

        def restore() -> bool:
            end = time.monotonic() + RESTORE_S
            while len(client.ids) == 3 and time.monotonic() < end:
                time.sleep(0.05)
            missing = 3 - len(client.ids)
            try:
                client.cluster.start_engines_sync(n=missing)
                client.wait_for_engines(3, timeout=RESTORE_S)
            except TimeoutError:
                return False
            return True

        yield ask, restore, ipp.__version__


def lines(log: Path) -> list[tuple[str, int, int, float]]:
    """Return the records of the stages."""
    if not log.exists():
        return []
    split = [line.split() for line in log.read_text().splitlines()]
    return [(what, int(index), int(pid), float(at)) for what, index, pid, at in split]


def killed(ask: Ask, array: Any, log: Path, seconds: float, wait: float) -> float | None:
    """Return the seconds of a request less those of lost stages; None if it was not answered."""
    at: list[float] = []
    over = threading.Event()

    def kill() -> None:
        while not (begun := [entry for entry in lines(log) if entry[:2] == ("began", 1)]):
            if over.wait(0.001):
                return
        time.sleep(max(0.0, begun[0][3] + wait - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(begun[0][2], signal.SIGKILL)
        at.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.monotonic()
    try:
        ask(array, str(log), seconds)
    except Exception as error:  # noqa: BLE001  whatever the tool raises: there is no answer
        print(f"    not answered after {time.monotonic() - started:.1f} s: {error!r:.200}", file=sys.stderr)
        return None
    finally:
        spent = time.monotonic() - started
        over.set()
        killer.join()
    return spent - in_vain(lines(log), at[0])


def in_vain(entries: list[tuple[str, int, int, float]], at: float) -> float:
    """Return the seconds of stages beyond one run of each; a run that was killed counts until the kill."""
    runs: dict[int, list[float]] = {}
    for what, index, pid, began in entries:
        if what == "began":
            ends = [e[3] for e in entries if e[0] == "ended" and e[1:3] == (index, pid) and e[3] > began]
            runs.setdefault(index, []).append(min(ends, default=at) - began)
    return sum(sum(times) - times[-1] for times in runs.values())


def main() -> None:
    """Print the results as a line of JSON."""
    name, trials, shape, stage_ms = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4])
    array = np.zeros(shape, np.float32)
    rng = random.Random(0)
    added: list[float] = []
    usual: list[float] = []
    unanswered = trial = 0
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        while trial < trials:
            with {"dask": dask, "ipyparallel": ipyparallel}[name]() as (ask, restore, version):
                whole = True
                while whole and trial < trials:
                    for again in range(4):
                        started = time.monotonic()
                        ask(array, str(Path(folder) / f"usual-{trial}-{again}"), stage_ms / 1e3)
                        if again:
                            usual.append(time.monotonic() - started)
                    log = Path(folder) / f"killed-{trial}"
                    value = killed(ask, array, log, stage_ms / 1e3, rng.uniform(0.1, 0.9) * stage_ms / 1e3)
                    trial += 1
                    if value is None:
                        unanswered += 1
                    else:
                        added.append(value - statistics.median(usual))
                        print(f"    {trial} of {trials}: {added[-1] * 1e3:.0f} ms added", file=sys.stderr)
                    whole = restore()
    print(json.dumps({"version": version, "added_s": added, "usual_s": usual, "unanswered": unanswered}), flush=True)


if __name__ == "__main__":
    main()
