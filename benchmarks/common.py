"""Shared code: facts about the machine, a cache of bundles, child processes, and tables."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from rich.table import Table

from benchmarks import ONE_THREAD
from ls_edge.core.errors import LsEdgeError
from ls_edge.device.hardware import cores, cpu_name, cpu_quota, memory_gib
from ls_edge.runtime.fleet.local_cluster import LocalCluster

if TYPE_CHECKING:
    from ls_edge.core.bundle import Bundle
    from ls_edge.core.peers_file import PeersFile
    from ls_edge.runtime.source.source import Source

C = TypeVar("C", bound=LocalCluster)
Address = tuple[str, int]
ROOT = Path(__file__).resolve().parents[1]


_STARTED = time.monotonic()


class BenchmarkError(LsEdgeError):
    """Error: a benchmark cannot run."""


def machine() -> dict[str, Any]:
    """Return the machine, its software and its load, for the document."""
    memory = memory_gib()
    quota = cpu_quota()
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "cpu_quota": quota,
        "memory_gib": None if memory is None else round(memory[0], 1),
        "load": load(),
        "system": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "python": sys.version.split()[0],
        "libraries": versions(),
    }


def load() -> list[float]:
    """Return the load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def versions() -> dict[str, str]:
    """Return the versions of the libraries that the results depend on."""
    import onnxruntime
    import zmq

    return {
        "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(), "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
    }  # fmt: skip


def report_progress(text: str) -> None:
    """Print a line of progress on standard error."""
    print(f"{time.monotonic() - _STARTED:6.1f} s {text}", file=sys.stderr, flush=True)


def ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles of repeated runs in milliseconds."""
    values = np.asarray(seconds) * 1e3
    return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (10, 50, 90)} | {"runs": len(values)}


def new_table(title: str, columns: Iterable[str], left: Collection[str] = ("",)) -> Table:
    """Return a table whose columns are aligned to the right, except those called ``left``."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(np.asarray(values, dtype=float)))


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield every name once per round, in an order that is rotated and reversed from round to round."""
    for index in range(rounds):
        shift = index // 2 % len(names)
        order = [*names[shift:], *names[:shift]]
        yield from ((index, name) for name in (order if index % 2 == 0 else reversed(order)))


def cache_folder() -> Path:
    """Return a temporary folder that belongs to this user alone."""
    folder = Path(tempfile.gettempdir()) / f"ls-edge-benchmarks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise BenchmarkError(f"{folder} belongs to somebody else; set TMPDIR to a folder of your own")
    return folder


def bundle_of(
    model: str, args: dict[str, Any] | None = None, precision: Literal["fp32", "fp16", "int8"] = "fp32"
) -> Path:
    """Return a bundle of a model with random weights, exported once.

    Weights vary more than timm's, so that the order of blocks changes the logits; less for int8, which would otherwise
    fail its verification.
    """
    args = {"num_classes": 10, **(args or {})}
    tag = hashlib.sha256(
        json.dumps([2, model, args, *([precision] * (precision != "fp32"))], sort_keys=True).encode()
    ).hexdigest()[:12]
    target = cache_folder() / f"{model}-{tag}"
    from ls_edge.core.bundle import Bundle

    with contextlib.suppress(LsEdgeError):
        return Bundle.open(target).folder
    shutil.rmtree(target, ignore_errors=True)  # of another version
    report_progress(f"exporting {model} with random weights to {target}")
    import torch

    from ls_edge.export.settings import ExportSettings
    from ls_edge.export.writer import export_run
    from ls_edge.training.config import RunRecord, TrainConfig
    from ls_edge.training.models.small_models import build, image_spec_of
    from ls_edge.training.runs.checkpoint import load_run, save_run
    from ls_edge.version import __version__

    torch.set_num_threads(1)
    torch.manual_seed(0)
    view = build(model, args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in view.named_parameters():
            if precision == "int8":
                parameter.mul_(0.25 if ".blocks." in name else 1.0)
            elif parameter.ndim > 1:
                parameter.normal_(0.0, 0.5 * parameter[0].numel() ** -0.5, generator=generator)
    settings = ExportSettings(precision=precision)
    record = RunRecord(
        version=__version__, model=model, model_args=args, kept=tuple(range(view.num_blocks)),
        classes=tuple(map(str, range(int(args["num_classes"])))), image=image_spec_of(view), trained_on="",
        method="shuffle",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        save_run(Path(scratch) / "run", view, TrainConfig(), record)
        made = export_run(load_run(Path(scratch) / "run"), Path(scratch) / "bundle", settings).bundle.folder
        with contextlib.suppress(OSError):  # another benchmark was faster
            made.rename(target)
    return target


def images_for(bundle: Any, count: int) -> np.ndarray:
    """Return noise, float32 ``[count, 3, H, W]``: times do not depend on the content of an image."""
    size = bundle.manifest.image.size
    return np.random.default_rng(0).standard_normal((count, 3, *size), dtype=np.float32)


@contextlib.contextmanager
def local_cluster(
    path: Path, placement: Mapping[str, Sequence[int] | str], *, kind: type[C] = LocalCluster, **each: Any
) -> Iterator[C]:
    """Start peers on the loopback and wait until they are warm; ``each`` are keys of all peers in ``peers.yaml``."""
    with tempfile.TemporaryDirectory() as folder, kind(folder, path, placement, each=each) as peers:
        peers.wait_warm(timeout=120.0)
        yield peers


@contextlib.contextmanager
def ready_source(peers: Path | PeersFile, bundle: Path | Bundle | None, **settings: Any) -> Iterator[Source]:
    """Open a source whose blocks all have a warm holder, with a default budget of one minute."""
    from ls_edge.runtime.source.source import Source

    with Source.open(peers, bundle, **{"budget_ms": 60_000.0, **settings}) as source:
        if missing := source.wait_ready(60.0):
            raise BenchmarkError(f"no peer serves blocks {missing}")
        yield source


@contextlib.contextmanager
def http_server(peers: Path, bundle: Path | None, *more: object) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """Start ``ls-edge serve`` with ``more`` words; yield the process and its address when it can answer images."""
    words = [sys.executable, "-m", "ls_edge", "serve", "--peers", peers, "--http", "127.0.0.1:0", *more]
    words += () if bundle is None else ("--bundle", bundle)
    with subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            found = next((match for line in lines if (match := re.search(r"url=http://(\S+):(\d+) ", line))), None)
            if found is None:
                raise BenchmarkError("ls-edge serve does not start")
            address = (found[1], int(found[2]))
            wait_for(lambda: _is_ready(address), "the peers of ls-edge serve")
            yield process, address
        finally:
            process.terminate()


def _is_ready(address: Address) -> bool:
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=10.0)) as connection:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200


def cpu_s(processes: Iterable[subprocess.Popen[Any]]) -> float:
    """Return the CPU time of processes and of their children, in seconds (Linux)."""
    pids, ticks = [process.pid for process in processes], 0
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
        pids.extend(map(int, (folder / "task" / str(pid) / "children").read_text(encoding="utf-8").split()))
    return ticks / os.sysconf("SC_CLK_TCK")


class Child:
    """Process of a benchmark module that exchanges JSON lines over standard input and output."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Start the process; it writes the first line when it is ready, for :meth:`read`."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, **ONE_THREAD},
        )  # fmt: skip
        self.module = module

    def read(self) -> Any:
        """Return the next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self.module} ended with {self.process.wait()} before it answered; see above")
        return json.loads(line)

    def send(self, value: Any) -> None:
        """Write a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Close its input, which ends the process; kill it if it does not end."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self.process.wait(3.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_for(true: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Poll until ``true()``; raise :class:`BenchmarkError` after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            raise BenchmarkError(f"waited {timeout:.0f} s for {what}; is the machine overloaded?")
        time.sleep(0.005)
