"""Wrong answers of a run: accuracy by class, and confused classes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ls_edge.core.records import RequestRecord
from ls_edge.evaluation.run_summary import Tally

MOST_CONFUSED = 10


class Confusion(NamedTuple):
    """Images of one class that were classified as another."""

    label: int
    prediction: int
    images: int
    share: float
    """Fraction of the labeled answers of the class."""


def by_class(records: Iterable[RequestRecord]) -> list[tuple[int, Tally]]:
    """Return the label and the labeled answers of each class, the worst class first."""
    tallies: dict[int, Tally] = defaultdict(Tally)
    for record in records:
        if record.error is None and record.label is not None:
            tallies[record.label].add(record.label, record.prediction, record.image)
    return sorted(tallies.items(), key=lambda item: (item[1].top1 or 0.0, item[0]))


def confusions(records: Sequence[RequestRecord]) -> list[Confusion]:
    """Return the pairs of classes that were confused most often, at most :data:`MOST_CONFUSED`."""
    tallies = dict(by_class(records))
    pairs = Counter(
        (record.label, record.prediction)
        for record in records
        if record.error is None and record.label is not None and record.prediction != record.label
    )
    return [
        Confusion(label, prediction, count, count / tallies[label].answers)
        for (label, prediction), count in pairs.most_common(MOST_CONFUSED)
        if prediction is not None
    ]
