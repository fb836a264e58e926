"""``ls-edge predict``: classify images through the reachable peers, or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from ls_edge.cli import options, source_options
from ls_edge.cli.command import Command, exit_code
from ls_edge.cli.holder_check import wait_for_holders
from ls_edge.cli.inputs import open_peers, reload_source
from ls_edge.cli.interrupts import ReloadRequest
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, EngineError, LsEdgeError, SourceClosed, UsageError, printable
from ls_edge.core.logs import set_up
from ls_edge.core.text import show_percent
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
@options.peers("peers.yaml of the peers to use.  [default: none, this process does it]")
@options.SOURCE_BUNDLE
@options.count("--top", "Number of classes to print, most likely first.", default=3)
@options.count("--limit", "Number of images.  [default: all; no limit for a camera]")
@options.concurrency(1_000_000)
@options.wait("Time to wait for a warm holder of every block before the first image.")
@options.as_json("Output as JSON, one line per image.")
@source_options.SOURCE
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

    Without --peers, this process runs the whole model, with --engine, --provider, and --threads; the other request
    options have no effect.

    Prints class names and probabilities for each IMAGE: a file, a folder (all images below it), '-' for an encoded
    image on standard input, each frame of a video such as clip.mp4, or the newest frames of a camera ('camera',
    'camera:1') or a stream (rtsp://..., http://...) until it ends or Ctrl-C. Videos, cameras, and streams need the
    extra camera.

    On SIGHUP, peers.yaml and the key are read again between two images.

    An image that cannot be read gets a line with an error. Exit code 3 if that happened or an answer skipped blocks, 1
    if nothing was answered.
    """
    set_up(as_json=False, level=logging.ERROR)
    file = None if peers is None else open_peers(peers)
    opened = None if bundle is None else Bundle.open(bundle)
    inputs = [item for given in images for item in expand_argument(given)]
    names = [item.name for item in inputs]
    inputs = [  # addresses without their secrets may be equal
        dataclasses.replace(item, name=f"{item.name} ({place})")
        if item.is_live and names.count(item.name) > 1
        else item
        for place, item in enumerate(inputs, 1)
    ]
    for item in inputs:
        if item.note:
            click.echo(f"ls-edge: {printable(item.note)}", err=True)
    if all(item.error is not None for item in inputs):  # no need for peers
        for item in inputs:
            Prediction(item.name, error=str(item.error)).show(as_json=as_json)
        return exit_code(0, len(inputs))

    answered = imperfect = 0
    with contextlib.ExitStack() as stack:
        frames = stack.enter_context(contextlib.closing(read_images(inputs)))
        if file is None:
            if opened is None:
                raise UsageError("give --bundle DIR to classify in this process, or --peers FILE")
            asked = {name: settings[name] for name in ("provider", "threads")}
            pipeline = stack.enter_context(Pipeline.open(opened, kind=settings["engine"] or "auto", **asked))
            answers = answers_here(pipeline, itertools.islice(frames, limit), top)
        else:
            reload = stack.enter_context(ReloadRequest())
            source = stack.enter_context(
                Source.open(file, opened, max_inflight=concurrency, model_wait_s=wait, **settings)
            )
            wait_for_holders(source, wait)
            at_once = 1 if any(is_live(given) for given in images) else concurrency  # flush each answer immediately
            answers = answers_in_order(source, itertools.islice(frames, limit), top, at_once, reload.take)
        for found in answers:
            found.show(as_json=as_json)
            answered += found.error is None
            imperfect += found.degraded or found.error is not None
    return exit_code(answered, imperfect)


class Prediction(msgspec.Struct, frozen=True):
    """A line of ``--json``."""

    image: str
    top: list[dict[str, Any]] = []
    degraded: bool = False
    latency_ms: float | None = None
    error: str | None = None
    why_skipped: str = ""
    skipped: Sequence[int] = ()
    """Blocks that the answer skipped."""
    time: float = msgspec.field(default_factory=lambda: round(time.time(), 3))
    """Time of the answer, in seconds since 1970."""

    def __str__(self) -> str:
        if self.error is not None:
            return printable(self.error if self.image in self.error else f"{self.image}: {self.error}")
        named = ", ".join(f"{printable(one['label'])} {show_percent(one['probability'])}" for one in self.top)
        why = f": {self.why_skipped}" if self.why_skipped else ""
        remark = f", without {len(self.skipped)} of the blocks{why}" if self.skipped else ""
        return f"{_clock(self.time)} {printable(self.image)}: {named}  ({self.latency_ms:.1f} ms{remark})"

    def show(self, *, as_json: bool) -> None:
        """Print the answer, or the reason why there is none."""
        if as_json:
            print_json(
                msgspec.structs.replace(self, image=self.image.encode("utf-8", "replace").decode()), one_line=True
            )
        elif self.error is None:
            click.echo(str(self))
        else:
            click.echo(f"ls-edge: {_clock(self.time)} {self}", err=True)


def _clock(seconds: float | None = None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def prediction(
    name: str,
    logits: np.ndarray,
    classes: Sequence[str],
    top: int,
    latency_ms: float,
    skipped: Sequence[int] = (),
    why: str = "",
) -> Prediction:
    """Return the prediction of an image with its ``top`` most likely classes."""
    found = [{"label": classes[index], "probability": share} for index, share in likeliest(logits, top)]
    return Prediction(name, found, bool(skipped), latency_ms, None, why, skipped)


def answers_here(pipeline: Pipeline, frames: Iterable[tuple[str, Frame]], top: int) -> Iterator[Prediction]:
    """Yield the prediction of each image, computed in this process."""
    manifest = pipeline.bundle.manifest
    preprocess = Preprocessor(manifest.image)
    for name, content in frames:
        try:
            if isinstance(content, DataError):
                raise content
            array = preprocess(content, name)
            started = time.perf_counter()
            (logits,) = pipeline.forward(array[None])
            if not np.isfinite(logits).all():
                raise EngineError("the model returned NaN or infinity; check the bundle with 'ls-edge verify'")
            yield prediction(name, logits, manifest.classes, top, (time.perf_counter() - started) * 1e3)
        except LsEdgeError as error:
            yield Prediction(name, error=str(error))


def answers_in_order(
    source: Source,
    frames: Iterable[tuple[str, Frame]],
    top: int,
    concurrency: int,
    wants_reload: Callable[[], bool],
) -> Iterator[Prediction]:
    """Yield the predictions in the order of the images, with ``concurrency`` requests at the same time.

    Between images, peers.yaml is read again when ``wants_reload`` returns true.
    """
    waiting: deque[tuple[str, Future[Answer]]] = deque()

    def first() -> Prediction:
        name, future = waiting.popleft()
        try:
            found = future.result()
        except LsEdgeError as error:
            return Prediction(name, error=str(error))
        record = found.record
        return prediction(name, found.logits, found.classes, top, found.latency_ms, record.skipped, record.why_skipped)

    for name, content in itertools.takewhile(lambda _: source.is_open, frames):
        if wants_reload():
            reload_source(source, lambda text: click.echo(f"ls-edge: {_clock()} {printable(text)}", err=True))
        future: Future[Answer] = Future()
        try:
            if isinstance(content, DataError):
                raise content
            future = source.submit(content, name=name)
        except (DataError, SourceClosed) as error:
            future.set_exception(error)
        waiting.append((name, future))
        while len(waiting) >= concurrency:
            yield first()
    while waiting:
        yield first()
    if not source.is_open:
        raise SourceClosed("the source has ended, see the log; the other images were not answered")
