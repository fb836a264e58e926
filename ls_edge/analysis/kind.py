"""Description of a kind of analysis: measurement, text, and charts.

The file of a kind contains the document of its result, its measurement, its sentence, and its charts. torch and Altair
are imported in functions, so that results can be read and printed without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.core.text import NOTHING
from ls_edge.evaluation.measure import LabeledImages, Measure, TokenModel
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from ls_edge.training.inspection.inspected import Inspected

NO_RUN = "an engine shows neither attention nor gradients; analyze the run"
"""Reason why a bundle has no result of a kind."""


class Score(msgspec.Struct, frozen=True):
    """Accuracy and mean cross-entropy in nats."""

    top1: float
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of analysis; its functions take a result."""

    summary: str
    """Line in the help text of the command."""
    text: str
    """Description of the section on a page."""
    finding: Callable[[Any], str]
    """Function that returns a sentence about the result of one model."""
    charts: Callable[[Any], list[Chart]] = lambda _: []
    columns: Callable[[Any], dict[str, list[str]]] = lambda _: {}
    """Function that returns columns of the table of blocks: cells for each block, by heading."""
    layout: Literal["large", "pairs", "triples"] = "large"
    """Layout of the pictures of the result."""
    needs_run: bool = False
    """Whether the kind needs a run and has no result for a bundle."""
    in_terminal: bool = True
    """Whether terminals show the sentence in addition to the columns."""


@dataclass(frozen=True, kw_only=True)
class MeasuredKind(Kind):
    """Kind that is measured while blocks run on all images."""

    measure: Callable[[TokenModel, AnalysisPlan], Measure]
    """Constructor of the measure, which may raise :class:`NotMeasurable`; kinds with the same constructor share it."""
    result: Callable[[Any], Any]
    """Function of the measure that returns the result, or None or an empty result with too few images."""


@dataclass(frozen=True, kw_only=True)
class InspectedKind(Kind):
    """Kind that inspects weights, attention, or gradients of a run on the first images."""

    needs_run: bool = True
    inspect: Callable[[Inspected, Sequence[LabeledImages]], Any]
    """Function of the run and the images that returns the result; may raise :class:`NotMeasurable`."""


def number_text(value: float | None, form: str = ".3f") -> str:
    """Return a number for a table."""
    return NOTHING if value is None else format(value, form)


def block_names(rows: Sequence[Any]) -> list[str]:
    """Return the numbers of blocks as labels, one for each of ``rows``."""
    return [str(block) for block in range(len(rows))]


def sentence(text: str) -> str:
    """Return text as a sentence, with a capital letter and a period; an empty text remains empty."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def pixels_compared(correlation: float) -> str:
    """Describe the similarity of two maps over an image, as in "the same pixels"."""
    return "the same" if correlation > 0.8 else "similar" if correlation > 0.4 else "other"
