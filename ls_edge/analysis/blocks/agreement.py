"""Agreement of answers in random order, and with blocks left out, with the answers in trained order."""

from __future__ import annotations

import msgspec
import numpy as np

from ls_edge.analysis.kind import MeasuredKind, number_text
from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.core.text import counted, show_percent
from ls_edge.evaluation.measure import Mean, Measure, Order, TokenModel, log_softmax
from ls_edge.report.theme import Chart

HEADINGS = ("blocks left out", "same class", "in all orders", "total variation", "orders")


class AnswersCompared(msgspec.Struct, frozen=True):
    """Agreement of the answers in some orders with those in trained order."""

    left_out: int
    same_class: float
    """Fraction of answers with the class of the trained order, over images and orders."""
    all_same_class: float
    """Fraction of images with the class of the trained order in all orders."""
    total_variation: float | None
    """Mean total variation distance: half the sum of the absolute differences of the class probabilities."""
    orders: int


class Agreement(msgspec.Struct, frozen=True):
    """Agreement of answers with the trained order."""

    random: AnswersCompared
    left_out: list[AnswersCompared]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of a table below :data:`HEADINGS`."""
        return [
            (
                "none" if one.left_out == 0 else str(one.left_out),
                show_percent(one.same_class),
                show_percent(one.all_same_class),
                number_text(one.total_variation),
                str(one.orders),
            )
            for one in (self.random, *self.left_out)
        ]


class AgreementMeasure(Measure):
    """Answers in random orders and with blocks left out, compared with those in trained order."""

    def __init__(self, _: TokenModel, plan: AnalysisPlan) -> None:
        self._trained = plan.trained
        self._groups = {0: plan.random(), **plan.left_out()}
        self.orders = {plan.trained, *(order for orders in self._groups.values() for order in orders)}
        self._logits: dict[Order, np.ndarray] = {}
        self._same = {order: Mean() for order in self.orders}
        self._distance = {order: Mean() for order in self.orders}
        self._always = {count: Mean() for count in self._groups}

    def add(self, order: Order, logits: np.ndarray) -> None:
        """Keep the logits of a batch."""
        self._logits[order] = logits

    def end(self) -> None:
        """Compare the orders of a batch."""
        trained = self._logits[self._trained]
        probabilities = np.exp(log_softmax(trained))
        same = {}
        for order, logits in self._logits.items():
            same[order] = logits.argmax(axis=1) == trained.argmax(axis=1)
            self._same[order].add(float(same[order].sum()), len(logits))
            difference = np.abs(np.exp(log_softmax(logits)) - probabilities)
            self._distance[order].add(float(difference.sum()) / 2, len(logits))
        for count, orders in self._groups.items():
            self._always[count].add(float(np.all([same[order] for order in orders], axis=0).sum()), len(trained))
        self._logits.clear()

    def result(self) -> Agreement:
        """Return the agreement in random order, and by the number of blocks left out."""
        compared = []
        for count, orders in self._groups.items():
            distances = [self._distance[order].mean for order in orders]
            known = [distance for distance in distances if distance is not None]
            compared.append(
                AnswersCompared(
                    left_out=count,
                    same_class=float(np.mean([self._same[order].mean for order in orders])),
                    all_same_class=self._always[count].mean or 0.0,
                    total_variation=float(np.mean(known)) if len(known) == len(orders) else None,
                    orders=len(orders),
                )
            )
        return Agreement(compared[0], compared[1:])


def _finding(found: Agreement) -> str:
    share = found.random.same_class
    text = f"{show_percent(share)} of the answers in random order are the same as in trained order"
    if not found.left_out:
        return f"{text}."
    last = found.left_out[-1]
    return f"{text}, and {show_percent(last.same_class)} with {counted(last.left_out, 'block')} left out."


def _charts(found: Agreement) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import PERCENT, lines_chart

    compared = (found.random, *found.left_out)
    series: dict[str, dict[int, float | None]] = {
        "same class": {one.left_out: one.same_class for one in compared},
        "same class in all orders": {one.left_out: one.all_same_class for one in compared},
        "total variation": {one.left_out: one.total_variation for one in compared},
    }
    return [lines_chart(series, "blocks left out", None, scale=alt.Scale(domain=[0, 1]), axis=PERCENT)]


AGREEMENT = MeasuredKind(
    summary="share of answers that stay the same in random order",
    text="Answers in random order compared with those in trained order. Total variation is half the sum of the "
    "differences of the probabilities.",
    measure=AgreementMeasure,
    result=AgreementMeasure.result,
    finding=_finding,
    charts=_charts,
    in_terminal=False,
)
