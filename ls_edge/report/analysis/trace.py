"""The sentence about each section of an analysis of a trace."""

from __future__ import annotations

from ls_edge.core.text import counted, show_percent
from ls_edge.evaluation.analysis.trace import TraceAnalysis

FEWEST_ANSWERS = 30
"""Answers of an order whose accuracy is compared with that of another: its 95 % interval is up to 35 points wide."""


def trace_findings(found: TraceAnalysis) -> dict[str, str]:
    """Return what to see in each section of an analysis of a trace."""
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
        return f"{text}. No two orders have {FEWEST_ANSWERS} answers, so their accuracies do not compare."
    (low, worst), (high, best) = min(known), max(known)
    return f"{text}. Accuracy is from {show_percent(low)} ({worst}) to {show_percent(high)} ({best})."


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
    shown = f", of which {len(found.mistakes)} are here" if found.mistakes_after_skips > len(found.mistakes) else ""
    return (
        f"{counted(found.mistakes_after_skips, 'wrong answer')} had skipped blocks{shown}; {certain} of these images "
        "were answered right with all blocks."
    )


def _dependents_seen(found: TraceAnalysis) -> str:
    if not found.repeated:
        return "Every image was answered once, so nothing is known; repeat them with a --limit above their number."
    return (
        f"{found.dependent:,} of the {counted(found.repeated, 'image')} with several answers have different ones, by "
        "order, subset or faulty peer; the least certain come first."
    )
