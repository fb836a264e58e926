"""``ls-edge predict``: classify images through the reachable peers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import click
import numpy as np

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.descriptor_limit import require_descriptors
from ls_edge.cli.holder_check import check_holders, wait_for_holders
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, LsEdgeError, printable
from ls_edge.core.logs import set_up
from ls_edge.core.peers_file import load_peers
from ls_edge.data.image_inputs import expand_argument, read_images
from ls_edge.runtime.source.results import Answer, likeliest
from ls_edge.runtime.source.source import Source


@click.command(
    cls=Command,
    examples=(
        "ls-edge predict --peers peers.yaml --bundle bundle cat.jpg dog.png",
        "ls-edge predict --peers peers.yaml --bundle bundle photos --top 1 --json",
        "ls-edge predict --peers peers.yaml --bundle bundle - < cat.jpg",
        "ls-edge predict --peers peers.yaml --bundle bundle camera --limit 100",
    ),
)
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@options.PEERS
@options.BUNDLE
@options.count("--top", "Number of classes to print, most likely first.", default=3, show_default=True)
@options.count("--limit", "Number of images.  [default: all; no limit for a camera]")
@options.POLICY
@options.CONCURRENCY
@options.BUDGET_MS
@options.MAX_SKIPS
@options.wait("Time for each block to get a warm holder before the first image.")
@click.option("--json", "as_json", is_flag=True, help="Output as JSON, one line per image.")
@options.SECRET_KEY
@options.STRICT_BUNDLE
def command(
    images: tuple[str, ...], peers: Path, bundle: Path, top: int, limit: int | None, policy: str, concurrency: int,
    budget_ms: float, max_skips: int | None, wait: float, as_json: bool, secret_key: Path | None, strict_bundle: bool,
) -> int:  # fmt: skip
    """Classify images through the reachable peers.

    Prints class names and probabilities for each IMAGE: a file, a folder (all images below it), '-' for an encoded
    image on standard input, or 'camera' or 'camera:1' for the frames of a camera until Ctrl-C (requires OpenCV).

    An image that cannot be read gets a line with an error. Exit code 3 if that happened or an answer skipped blocks, 1
    if nothing was answered.
    """
    set_up(as_json=False, level=logging.ERROR)
    file = load_peers(peers)
    require_descriptors(file)
    opened = Bundle.open(bundle)
    inputs = [item for given in images for item in expand_argument(given)]
    printer = PredictionPrinter(opened.manifest.classes, top, as_json=as_json)
    if all(item.error is not None for item in inputs):  # no reason to look for peers
        for item in inputs:
            printer.failed(item.name, str(item.error))
        return printer.exit_code()

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(
            Source.open(
                file, opened, policy=policy, secret_key=secret_key, strict_bundle=strict_bundle, budget_ms=budget_ms,
                max_skips=max_skips, max_inflight=concurrency,
            )
        )  # fmt: skip
        if warning := check_holders(source, wait_for_holders(source, wait), wait):
            click.echo(f"ls-edge: warning: {printable(warning)}", err=True)
        frames = stack.enter_context(contextlib.closing(read_images(inputs)))
        for name, answer in answers_in_order(source, frames, concurrency, limit):
            if isinstance(answer, LsEdgeError):
                printer.failed(name, str(answer))
            else:
                printer.answered(name, answer)
    return printer.exit_code()


def answers_in_order(
    source: Source, frames: Iterator[tuple[str, bytes | np.ndarray | DataError]], concurrency: int, limit: int | None
) -> Iterator[tuple[str, Answer | LsEdgeError]]:
    """Yield the answer or the error of each image, in order, with ``concurrency`` requests at the same time.

    Frames of a camera are sent one at a time, so that each is answered while it is new.
    """
    waiting: deque[tuple[str, Future[Answer] | DataError]] = deque()
    count = 0
    while limit is None or count < limit:
        item = next(frames, None)
        if item is None:
            break
        name, content = item
        count += 1
        try:
            waiting.append((name, content if isinstance(content, DataError) else source.submit(content, name=name)))
        except DataError as error:
            waiting.append((name, error))
        live = not isinstance(content, (bytes, DataError))
        while len(waiting) >= (1 if live else concurrency):
            yield _result(*waiting.popleft())
    while waiting:
        yield _result(*waiting.popleft())


def _result(name: str, answer: Future[Answer] | DataError) -> tuple[str, Answer | LsEdgeError]:
    if isinstance(answer, DataError):
        return name, answer
    try:
        return name, answer.result()
    except LsEdgeError as error:
        return name, error


class PredictionPrinter:
    """Printer of one line per image, which counts the outcomes."""

    def __init__(self, classes: tuple[str, ...], top: int, *, as_json: bool) -> None:
        self._classes = classes
        self._top = min(top, len(classes))
        self._as_json = as_json
        self._answered = self._degraded = self._failed = 0

    def answered(self, name: str, answer: Answer) -> None:
        """Print the most likely classes."""
        self._answered += 1
        self._degraded += answer.degraded
        top = likeliest(answer.logits, self._top)
        if self._as_json:
            self._line(
                name, [{"label": self._classes[index], "probability": p} for index, p in top], answer.degraded,
                answer.latency_ms, None, answer.record.why_skipped,
            )  # fmt: skip
            return
        named = ", ".join(f"{printable(self._classes[index])} {p:.1%}" for index, p in top)
        why = f": {answer.record.why_skipped}" if answer.record.why_skipped else ""
        remark = f", without {len(answer.record.skipped)} of the blocks{why}" if answer.degraded else ""
        click.echo(f"{printable(name)}: {named}  ({answer.latency_ms:.1f} ms{remark})")

    def failed(self, name: str, why: str) -> None:
        """Print the reason for a missing answer."""
        self._failed += 1
        if self._as_json:
            self._line(name, [], False, None, why)
        else:
            line = why if name in why else f"{name}: {why}"
            click.echo(f"ls-edge: {printable(line)}", err=True)

    def exit_code(self) -> int:
        """Return 1 if nothing was answered, 3 if something failed or blocks were skipped, else 0."""
        if not self._answered:
            return 1
        return DEGRADED if self._failed or self._degraded else 0

    def _line(
        self,
        name: str,
        top: list[dict[str, Any]],
        degraded: bool,
        latency_ms: float | None,
        error: str | None,
        why_skipped: str = "",
    ) -> None:
        document = {
            "image": name.encode("utf-8", "replace").decode(), "top": top, "degraded": degraded,
            "latency_ms": latency_ms, "error": error, "why_skipped": why_skipped,
        }  # fmt: skip
        click.echo(json.dumps(document, allow_nan=False))
