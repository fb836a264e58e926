"""``ls-edge predict``: classify images through the reachable peers, or in this process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from ls_edge.cli import options
from ls_edge.cli.command import Command, exit_code
from ls_edge.cli.holder_check import wait_for_holders
from ls_edge.cli.inputs import open_peers, reload_source
from ls_edge.cli.interrupts import ReloadRequest
from ls_edge.cli.output import note_model, print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, LsEdgeError, UsageError, printable
from ls_edge.core.logs import set_up
from ls_edge.data.camera import is_live
from ls_edge.data.image_inputs import expand_argument, read_images
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.source.results import Answer, likeliest
from ls_edge.runtime.source.source import Source

Frame = bytes | np.ndarray | DataError
"""Content of an image, or the reason why it cannot be read."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge predict --bundle bundle photo.jpg",
        "ls-edge predict --peers peers.yaml --bundle bundle cat.jpg dog.png",
        "ls-edge predict --peers peers.yaml cat.jpg",
        "ls-edge predict --peers peers.yaml --bundle bundle photos --top 1 --json",
        "ls-edge predict --peers peers.yaml --bundle bundle - < cat.jpg",
        "ls-edge predict --peers peers.yaml --bundle bundle camera:0 --limit 100",
        "ls-edge predict --bundle bundle rtsp://10.0.0.20/stream",
    ),
)
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@options.peers("peers.yaml of the peers that answer.  [default: answer in this process]")
@options.SOURCE_BUNDLE
@options.count("--top", "Number of classes to print, most likely first.", default=3)
@options.count("--limit", "Number of images.  [default: all; no limit for a camera]")
@options.concurrency(1_000_000)
@options.wait("Time for each block to get a warm holder before the first image.")
@click.option("--json", "as_json", is_flag=True, help="Output as JSON, one line per image.")
@options.SOURCE
def command(
    images: tuple[str, ...],
    peers: Path | None,
    bundle: Path | None,
    top: int,
    limit: int | None,
    concurrency: int,
    wait: float,
    as_json: bool,
    **settings: Any,
) -> int:
    """Classify images through the reachable peers, or in this process.

    Without --peers, one process runs the whole model, with --engine, --provider, and --threads; the other options of
    requests apply to peers.

    Prints class names and probabilities for each IMAGE: a file, a folder (all images below it), '-' for an encoded
    image on standard input, each frame of a video such as clip.mp4, or the newest frames of a camera ('camera',
    'camera:1') or a stream (rtsp://..., http://...) until it ends or Ctrl-C. Videos, cameras, and streams need the
    extra camera.

    On SIGHUP the peers file and the key are read again, between two images.

    An image that cannot be read gets a line with an error. Exit code 3 if that happened or an answer skipped blocks, 1
    if nothing was answered.
    """
    set_up(as_json=False, level=logging.ERROR)
    file = None if peers is None else open_peers(peers)
    opened = None if bundle is None else Bundle.open(bundle)
    inputs = [item for given in images for item in expand_argument(given)]
    printer = PredictionPrinter(() if opened is None else opened.manifest.classes, top, as_json=as_json)
    if all(item.error is not None for item in inputs):  # no reason to look for peers
        for item in inputs:
            printer.failed(item.name, str(item.error))
        return printer.exit_code()

    with contextlib.ExitStack() as stack:
        frames = stack.enter_context(contextlib.closing(read_images(inputs)))
        if file is None:
            if opened is None:
                raise UsageError("give --bundle DIR to answer in this process, or --peers FILE")
            asked = {name: settings[name] for name in ("provider", "threads")}
            pipeline = stack.enter_context(Pipeline.open(opened, kind=settings["engine"] or "auto", **asked))
            answers = answers_here(pipeline, itertools.islice(frames, limit))
        else:
            source = stack.enter_context(Source.open(file, opened, max_inflight=concurrency, **settings))
            note_model(source.witnesses)
            printer.classes = source.bundle.manifest.classes
            reload = stack.enter_context(ReloadRequest())
            wait_for_holders(source, wait)
            at_once = 1 if any(is_live(given) for given in images) else concurrency  # each answer while it is new
            answers = answers_in_order(source, itertools.islice(frames, limit), at_once, reload.take)
        for name, answer in answers:
            if isinstance(answer, LsEdgeError):
                printer.failed(name, str(answer))
            else:
                printer.answered(name, answer)
    return printer.exit_code()


@dataclass(frozen=True)
class Prediction:
    """Answer for an image."""

    logits: np.ndarray
    latency_ms: float
    skipped: int = 0
    """Number of blocks that it skipped."""
    why_skipped: str = ""


def answers_here(
    pipeline: Pipeline, frames: Iterable[tuple[str, Frame]]
) -> Iterator[tuple[str, Prediction | LsEdgeError]]:
    """Yield the answer or the error of each image, computed by this process."""
    preprocess = Preprocessor(pipeline.bundle.manifest.image)
    for name, content in frames:
        try:
            if isinstance(content, DataError):
                raise content
            array = preprocess(content, name)
            started = time.perf_counter()
            (logits,) = pipeline.forward(array[None])
            yield name, Prediction(logits, (time.perf_counter() - started) * 1e3)
        except LsEdgeError as error:
            yield name, error


def answers_in_order(
    source: Source,
    frames: Iterable[tuple[str, Frame]],
    concurrency: int,
    wants_reload: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[str, Prediction | LsEdgeError]]:
    """Yield the answer or the error of each image, in order, with ``concurrency`` requests at the same time.

    Between images, peers.yaml is read again when ``wants_reload`` returns true.
    """
    waiting: deque[tuple[str, Future[Answer] | DataError]] = deque()
    for name, content in frames:
        if wants_reload():
            reload_source(source, lambda text: click.echo(f"ls-edge: {printable(text)}", err=True))
        try:
            waiting.append((name, content if isinstance(content, DataError) else source.submit(content, name=name)))
        except DataError as error:
            waiting.append((name, error))
        while len(waiting) >= concurrency:
            yield _result(*waiting.popleft())
    while waiting:
        yield _result(*waiting.popleft())


def _result(name: str, future: Future[Answer] | DataError) -> tuple[str, Prediction | LsEdgeError]:
    if isinstance(future, DataError):
        return name, future
    try:
        answer = future.result()
    except LsEdgeError as error:
        return name, error
    return name, Prediction(answer.logits, answer.latency_ms, len(answer.record.skipped), answer.record.why_skipped)


class PredictionPrinter:
    """Printer of one line per image, which counts the outcomes."""

    def __init__(self, classes: tuple[str, ...], top: int, *, as_json: bool) -> None:
        self.classes = classes
        self._top = top
        self._as_json = as_json
        self._answered = self._degraded = self._failed = 0

    def answered(self, name: str, answer: Prediction) -> None:
        """Print the most likely classes."""
        self._answered += 1
        self._degraded += answer.skipped > 0
        why, found = answer.why_skipped, likeliest(answer.logits, self._top)
        if self._as_json:
            top = [{"label": self.classes[index], "probability": p} for index, p in found]
            degraded = answer.skipped > 0
            _print_line(name, top=top, degraded=degraded, latency_ms=answer.latency_ms, why_skipped=why)
            return
        named = ", ".join(f"{printable(self.classes[index])} {p:.1%}" for index, p in found)
        remark = f", without {answer.skipped} of the blocks{why and f': {why}'}" if answer.skipped else ""
        click.echo(f"{printable(name)}: {named}  ({answer.latency_ms:.1f} ms{remark})")

    def failed(self, name: str, why: str) -> None:
        """Print the reason for a missing answer."""
        self._failed += 1
        if self._as_json:
            _print_line(name, error=why)
        else:
            line = why if name in why else f"{name}: {why}"
            click.echo(f"ls-edge: {printable(line)}", err=True)

    def exit_code(self) -> int:
        """Return 1 if nothing was answered, 3 if something failed or blocks were skipped, else 0."""
        return exit_code(self._answered, self._failed + self._degraded)


def _print_line(name: str, **fields: Any) -> None:
    empty = {"top": [], "degraded": False, "latency_ms": None, "error": None, "why_skipped": ""}
    print_json({"image": name.encode("utf-8", "replace").decode(), **empty, **fields}, one_line=True)
