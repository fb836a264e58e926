"""Analysis of a trace of ``run --trace``: orders and skipped blocks, and their effect on the answers.

Lines are read one by one; memory grows with the number of images and orders, but not with the number of requests.
Charts need Altair, which is imported in functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ls_edge.analysis.overview import print_rows
from ls_edge.core.errors import DataError, printable
from ls_edge.core.text import counted, shorten, show_percent
from ls_edge.evaluation.run_summary import Tally
from ls_edge.report.theme import Chart

START = b'{"id":'
MOST_ROWS = 24
"""Maximum number of orders, mistakes, and images in a result."""
SHOWN_ORDERS = 8
"""Maximum number of orders on a terminal."""
FEWEST_ANSWERS = 30
"""Minimum number of answers for comparing orders; the 95 % interval is then up to 35 points wide."""


class TraceLine(msgspec.Struct, frozen=True):
    """Fields of a line that the analysis needs."""

    image: str
    label: int | None
    prediction: int | None
    error: str | None
    skipped: tuple[int, ...]
    order: list[tuple[int, str]] | None
    waves: list[list[list[tuple[int, str]]]] | None

    @property
    def path(self) -> str:
        """The blocks in order, such as ``0 2 1``, or in waves of tracks, such as ``0+2 1+3 / 4``."""
        waves = [[self.order or []]] if self.waves is None else self.waves
        return " / ".join("+".join(" ".join(str(block) for block, _ in track) for track in wave) for wave in waves)


class Answers(msgspec.Struct, frozen=True):
    """Number of answers in a group, and the accuracy of those with labels."""

    of: str
    answers: int
    top1: float | None
    interval: tuple[float, float] | None


class SkippedBlock(msgspec.Struct, frozen=True):
    """Answers without and with a block."""

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
    """Whether an answer to the image without skipped blocks was right."""


class DependentImage(msgspec.Struct, frozen=True):
    """An image with several answers."""

    image: str
    label: int | None
    answers: int
    predictions: dict[str, int]
    """Number of answers by predicted class, most frequent first."""
    same: float
    """Fraction of the answers with the most frequent class."""


class TraceAnalysis(msgspec.Struct, frozen=True):
    """Document of ``analyze TRACE --json``."""

    schema: int
    requests: int
    failed: int
    all: Answers
    orders: int
    """Number of different orders and subsets."""
    by_order: list[Answers]
    """Answers in the most frequent orders and subsets."""
    by_skips: list[Answers]
    by_block: list[SkippedBlock]
    mistakes_after_skips: int
    mistakes: list[SkipMistake]
    """Mistakes, beginning with images that were right with all blocks."""
    repeated: int
    """Number of images that were answered more than once."""
    dependent: int
    """Number of images with different answers."""
    images: list[DependentImage]
    """Images with different answers, least agreement first."""
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
        """Images with a right answer without skipped blocks."""
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
            count.add(line.label, line.prediction, line.image)
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
            raise DataError(
                f"the trace has {counted(self.requests, 'request')} and no answer; give the trace of another run"
            )
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
    """Yield each line of a trace and the number of bytes read so far; raise :class:`DataError` for an invalid line."""
    decoder = msgspec.json.Decoder(TraceLine)
    with path.open("rb") as stream:
        done = 0
        for number, line in enumerate(stream, 1):
            done += len(line)
            try:
                yield decoder.decode(line), done
            except msgspec.MsgspecError as error:
                raise DataError(f"{path}, line {number}: not a line of a trace ({error}); write it again") from None


def print_trace_analysis(found: TraceAnalysis, console: Console) -> None:
    """Print the finding of each section, and the most frequent orders."""
    console.print(f"{found.settings['of']}: {counted(found.requests, 'request')}, {found.failed:,} failed")
    for heading, text in trace_findings(found).items():
        console.print(f"{heading}: {printable(text)}")
    rows = [(one.of, f"{one.answers:,}", show_percent(one.top1)) for one in found.by_order[:SHOWN_ORDERS]]
    print_rows(("order", "answers", "accuracy"), rows, console)


def trace_findings(found: TraceAnalysis) -> dict[str, str]:
    """Return the finding of each section by heading."""
    return {
        "Orders": _orders_seen(found),
        "Skipped blocks": _skips_seen(found),
        "Mistakes after a skip": _mistakes_seen(found),
        "Images whose answer depends on the order": _dependents_seen(found),
    }


def _orders_seen(found: TraceAnalysis) -> str:
    first = found.by_order[0]
    text = (
        f"{counted(found.all.answers, 'answer')} took {counted(found.orders, 'order')}; the most frequent one, "
        f"{first.of or 'without blocks'}, {show_percent(first.answers / found.all.answers)} of them"
    )
    known = [(one.top1, one.of) for one in found.by_order if one.top1 is not None and one.answers >= FEWEST_ANSWERS]
    if len(known) < 2:
        return f"{text}. No two orders have {FEWEST_ANSWERS} answers, too few to compare their accuracies."
    (low, worst), (high, best) = min(known), max(known)
    return f"{text}. Accuracy ranges from {show_percent(low)} ({worst}) to {show_percent(high)} ({best})."


def _skips_seen(found: TraceAnalysis) -> str:
    if not found.by_block:
        return "No answer skipped a block."
    losses = [
        (one.with_it.top1 - one.without.top1, one)
        for one in found.by_block
        if one.with_it.top1 is not None and one.without.top1 is not None
    ]
    if not losses:
        return "There are no labels, or every answer skipped the same blocks."
    loss, one = max(losses, key=lambda pair: pair[0])
    return (
        f"Block {one.block} was missed most: {show_percent(one.without.top1)} right without it in "
        f"{counted(one.without.answers, 'answer')}, {show_percent(one.with_it.top1)} with it, "
        f"a difference of {100 * loss:.1f} points."
    )


def _mistakes_seen(found: TraceAnalysis) -> str:
    if not found.by_block:
        return "No answer skipped a block."
    certain = sum(one.right_otherwise for one in found.mistakes)
    shown = f" ({len(found.mistakes)} are shown)" if found.mistakes_after_skips > len(found.mistakes) else ""
    return (
        f"{counted(found.mistakes_after_skips, 'wrong answer')} had skipped blocks{shown}; {certain} of these images "
        "were right with all blocks."
    )


def _dependents_seen(found: TraceAnalysis) -> str:
    if not found.repeated:
        return "Every image has a single answer; repeat images with a --limit above their number to compare answers."
    return (
        f"{found.dependent:,} of the {counted(found.repeated, 'image')} with several answers have different ones, "
        "because of the order, the subset, or a faulty peer; the least certain come first."
    )


def order_chart(found: TraceAnalysis) -> Chart | None:
    """Draw the accuracy of the most frequent orders of a trace."""
    return _trace_chart([(shorten(one.of, 60), "", one) for one in found.by_order])


def skips_chart(found: TraceAnalysis) -> Chart | None:
    """Draw the accuracy by number of skipped blocks; return None if all answers skipped the same number."""
    rows = [(f"{one.of} skipped", "", one) for one in found.by_skips]
    return _trace_chart(rows) if len(rows) > 1 else None


def blocks_chart(found: TraceAnalysis) -> Chart | None:
    """Draw the accuracy of answers without and with each block."""
    kinds = ("without the block", "with it")
    without = [(f"block {one.block}", kinds[0], one.without) for one in found.by_block]
    return _trace_chart([*without, *((f"block {one.block}", kinds[1], one.with_it) for one in found.by_block)], kinds)


def _trace_chart(given: Sequence[tuple[str, str, Answers]], kinds: Sequence[str] = ()) -> Chart | None:
    """Draw the accuracy of each name and kind that has labels."""
    from ls_edge.report.charts.accuracy_charts import accuracy_row
    from ls_edge.report.charts.specification import accuracy_chart

    rows = [
        accuracy_row(name, one.top1, one.interval, one.answers, kind=kind)
        for name, kind, one in given
        if one.top1 is not None
    ]
    return accuracy_chart(rows, 22, kinds=kinds)
