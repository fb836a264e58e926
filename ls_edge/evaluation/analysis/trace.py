"""Orders and skipped blocks of the answers in a trace of ``run --trace``, and what depended on them.

Lines are read one after the other; memory grows with the number of images and of orders, not of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.errors import DataError
from ls_edge.evaluation.run_summary import Tally

START = b'{"id":'
MOST_ROWS = 24
"""Orders, mistakes and images in a result."""


class TraceLine(msgspec.Struct, frozen=True):
    """The part of a line that is read here."""

    image: str
    label: int | None
    prediction: int | None
    error: str | None
    skipped: tuple[int, ...]
    order: list[tuple[int, str]] | None
    waves: list[list[list[tuple[int, str]]]] | None

    @property
    def path(self) -> str:
        """The blocks in order, ``0 2 1``; of waves ``0+2 1+3 / 4``."""
        waves = [[self.order or []]] if self.waves is None else self.waves
        return " / ".join("+".join(" ".join(str(block) for block, _ in track) for track in wave) for wave in waves)


class Answers(msgspec.Struct, frozen=True):
    """Answers of a kind, and the accuracy of those with labels."""

    of: str
    answers: int
    top1: float | None
    interval: tuple[float, float] | None


class SkippedBlock(msgspec.Struct, frozen=True):
    """Answers without a block, and those with it."""

    block: int
    without: Answers
    with_it: Answers


class SkipMistake(msgspec.Struct, frozen=True):
    """A wrong answer with skipped blocks."""

    image: str
    label: int
    prediction: int
    skipped: tuple[int, ...]
    right_otherwise: bool
    """Whether the image was answered right when no block was skipped."""


class DependentImage(msgspec.Struct, frozen=True):
    """An image with several answers."""

    image: str
    label: int | None
    answers: int
    predictions: dict[str, int]
    """Answers by predicted class, the most frequent one first."""
    same: float
    """Fraction of the answers that are the most frequent one."""


class TraceAnalysis(msgspec.Struct, frozen=True):
    """Document of ``analyze TRACE --json``."""

    schema: int
    requests: int
    failed: int
    all: Answers
    orders: int
    """Different orders and subsets."""
    by_order: list[Answers]
    """The most frequent ones."""
    by_skips: list[Answers]
    by_block: list[SkippedBlock]
    mistakes_after_skips: int
    mistakes: list[SkipMistake]
    """Those of images that were answered right without a skip first."""
    repeated: int
    """Images that were answered more than once."""
    dependent: int
    """Those with different answers."""
    images: list[DependentImage]
    """Those with the least agreement first."""
    settings: dict[str, Any]


class TraceCounts:
    """Counts over the lines of a trace."""

    def __init__(self) -> None:
        self.requests = self.failed = 0
        self._all = Tally()
        self._orders: dict[str, Tally] = {}
        self._skips: dict[int, Tally] = {}
        self._blocks: dict[int, Tally] = {}
        self._predictions: dict[str, Counter[int]] = {}
        self._labels: dict[str, int | None] = {}
        self._right_whole: set[str] = set()
        """Images that were answered right when no block was skipped."""
        self._mistakes: dict[tuple[str, tuple[int, ...]], TraceLine] = {}
        self._after_skips = 0

    def add(self, line: TraceLine) -> None:
        """Count a request."""
        self.requests += 1
        if line.error is not None or line.prediction is None:
            self.failed += 1
            return
        counts = [
            self._all,
            self._orders.setdefault(line.path, Tally()),
            self._skips.setdefault(len(line.skipped), Tally()),
            *(self._blocks.setdefault(block, Tally()) for block in line.skipped),
        ]
        for count in counts:
            count.add(line.label, line.prediction)
        self._predictions.setdefault(line.image, Counter())[line.prediction] += 1
        self._labels[line.image] = line.label
        if line.label == line.prediction and not line.skipped:
            self._right_whole.add(line.image)
        elif line.skipped and line.label is not None and line.label != line.prediction:
            self._after_skips += 1
            self._mistakes[line.image, line.skipped] = line

    def result(self, settings: dict[str, Any]) -> TraceAnalysis:
        """Return all counts; raise :class:`DataError` without an answer."""
        if not self._all.answers:
            raise DataError(f"the trace has {self.requests} requests and no answer; give the trace of another run")
        frequent = sorted(self._orders.items(), key=lambda item: (-item[1].answers, item[0]))
        repeated = {name: found for name, found in self._predictions.items() if found.total() > 1}
        dependent = [self._dependent(name, found) for name, found in repeated.items() if len(found) > 1]
        mistakes = [
            SkipMistake(line.image, line.label, line.prediction, line.skipped, line.image in self._right_whole)
            for line in self._mistakes.values()
            if line.label is not None and line.prediction is not None
        ]
        return TraceAnalysis(
            schema=1,
            requests=self.requests,
            failed=self.failed,
            all=_answers("all", self._all),
            orders=len(self._orders),
            by_order=[_answers(path, count) for path, count in frequent[:MOST_ROWS]],
            by_skips=[_answers(str(skips), count) for skips, count in sorted(self._skips.items())],
            by_block=[
                SkippedBlock(block, _answers("without", count), _answers("with", self._all.minus(count)))
                for block, count in sorted(self._blocks.items())
            ],
            mistakes_after_skips=self._after_skips,
            mistakes=sorted(mistakes, key=lambda one: (not one.right_otherwise, one.image))[:MOST_ROWS],
            repeated=len(repeated),
            dependent=len(dependent),
            images=sorted(dependent, key=lambda one: (one.same, -one.answers, one.image))[:MOST_ROWS],
            settings=settings,
        )

    def _dependent(self, name: str, found: Counter[int]) -> DependentImage:
        ranked = {str(prediction): count for prediction, count in found.most_common()}
        most = next(iter(ranked.values()))
        return DependentImage(name, self._labels[name], found.total(), ranked, most / found.total())


def _answers(of: str, tally: Tally) -> Answers:
    return Answers(of, tally.answers, tally.top1, tally.interval)


def is_trace(path: Path) -> bool:
    """Return whether a file begins as a trace does."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(START)) == START


def read_lines(path: Path) -> Iterator[tuple[TraceLine, int]]:
    """Yield the lines of a trace and the bytes read so far; raise :class:`DataError` for one that is not of a trace."""
    decoder = msgspec.json.Decoder(TraceLine)
    with path.open("rb") as stream:
        done = 0
        for number, line in enumerate(stream, 1):
            done += len(line)
            try:
                yield decoder.decode(line), done
            except msgspec.MsgspecError as error:
                raise DataError(f"{path}, line {number}: not a line of a trace ({error}); write it again") from None
