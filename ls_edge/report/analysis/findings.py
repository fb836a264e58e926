"""The sentence about each kind of analysis for one model: what to see in its section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ls_edge.core.errors import printable
from ls_edge.core.text import counted, name_blocks, show_percent
from ls_edge.evaluation.analysis import (
    AddedNorms,
    Agreement,
    Analysis,
    Contribution,
    Importance,
    Map,
    Pairs,
    Probe,
    Similarity,
    SlotAccuracy,
)
from ls_edge.report.analysis.inside import INSIDE

BEYOND_CHANCE = 5.0
"""Standard errors between the best and the worst slot of a block that depends on its slot."""


def finding(found: Analysis, kind: str) -> str:
    """Return what to see in the section of a kind for this model, or the reason for its absence."""
    measured = getattr(found, kind)
    if measured is None:
        return f"None: {printable(found.reasons.get(kind, 'a value is not finite'))}."
    return _FINDINGS[kind](measured)


def _importance(found: Importance) -> str:
    known = [(one.importance, one.block) for one in found.blocks if one.importance is not None]
    if not known:
        return "No loss is finite."
    (least, dispensable), (most, needed) = min(known), max(known)
    text = f"Leaving out block {needed} costs most, {most:+.3f} nats, and block {dispensable} least, {least:+.3f}"
    trained = found.trained.loss or 0.0
    moved = [
        (one.moved.loss - trained, one.block, one.moved_to)
        for one in found.blocks
        if one.moved is not None and one.moved.loss is not None
    ]
    if not moved:
        return f"{text}."
    worst, block, slot = max(moved)
    return f"{text}; moving block {block} to slot {slot} is the worst move, {worst:+.3f}."


def _contribution(found: Contribution) -> str:
    table = found.random
    by_slot = [[value for row in table if (value := row[slot]) is not None] for slot in range(len(table))]
    means = [float(np.mean(values)) for values in by_slot if values]
    return (
        f"In random order a block adds {means[0]:.2f} of the norm of a token in the first slot and {means[-1]:.2f} in "
        "the last one, on average over the blocks."
    )


def _similarity(found: Similarity) -> str:
    steps = [(row[at], at) for at, row in enumerate(found.cka[1:]) if row[at] is not None]
    cosines = [value for value in found.cosine if value is not None]
    text = ""
    if steps:
        text = "Block {1} changes the tokens most: CKA {0:.2f} to those before it. ".format(*min(steps))
    if cosines:
        text += (
            f"What a block adds in random order has a cosine of {min(cosines):.2f} to {max(cosines):.2f} to what it "
            f"adds in trained order: {'nearly the same' if min(cosines) > 0.6 else 'other'} directions."
        )
    return text.strip()


def _agreement(found: Agreement) -> str:
    share = found.random.same_class
    text = f"{show_percent(share)} of the answers in random order are those of the trained order"
    if not found.left_out:
        return f"{text}."
    last = found.left_out[-1]
    return f"{text}, and {show_percent(last.same_class)} with {counted(last.left_out, 'block')} left out."


def _slots(found: SlotAccuracy) -> str:
    spans = []
    for block, (row, counts) in enumerate(zip(found.accuracy, found.images, strict=True)):
        known = [(value, slot) for slot, value in enumerate(row) if value is not None]
        if len(known) > 1:
            mean = float(np.mean([value for value, _ in known]))
            chance = BEYOND_CHANCE * (mean * (1 - mean) / min(count for count in counts if count)) ** 0.5
            spans.append((max(known)[0] - min(known)[0], chance, block, min(known), max(known)))
    if not spans:
        return "Every block has a single slot."
    span, _, block, (worst, bad), (best, good) = max(spans)
    steady = [one for difference, chance, one, *_ in spans if difference <= chance]
    if len(steady) == len(spans):
        return f"No block depends on its slot: accuracies differ by {100 * span:.1f} points at most, as by chance."
    return (
        f"The slot of block {block} matters most: {show_percent(best)} of the answers are right with it in slot "
        f"{good}, {show_percent(worst)} in slot {bad}. "
        + (f"No difference beyond chance for {name_blocks(steady)}." if steady else "It matters for all blocks.")
    )


def _norms(found: AddedNorms) -> str:
    near, away = 0, []
    rows = [(block, [(v, s) for s, v in enumerate(row) if v is not None]) for block, row in enumerate(found.mean)]
    movable = [(block, known) for block, known in rows if len(known) > 1]
    if not movable:
        return "Every block has a single slot."
    for block, known in movable:
        near += abs(max(known)[1] - block) <= 1
        if own := next((value for value, slot in known if slot == block), 0.0):
            away.append(float(np.mean([value for value, slot in known if slot != block])) / own)
    place = f"{near} of {counted(len(movable), 'block')} add most within one slot of their trained place"
    if not away:
        return f"{place}; no random order ran a block in its own slot."
    mean = float(np.mean(away))
    held = "withhold elsewhere" if mean < 0.8 else "add as much elsewhere" if mean < 1.25 else "add more elsewhere"
    return f"{place}; blocks {held}: {mean:.2f} times as much in other slots as in their own."


def _probe(found: Probe) -> str:
    known = [(value, block) for block, value in enumerate(found.accuracy) if value is not None]
    control = [value for value in found.shuffled if value is not None]
    (low, least), (high, most) = min(known), max(known)
    return (
        f"A linear probe reads the slot of {show_percent(low)} (block {least}) to {show_percent(high)} (block {most}) "
        f"of the outputs; with slots exchanged at random {show_percent(float(np.mean(control)))}."
    )


def _umap(found: Sequence[Map]) -> str:
    one = found[0]
    if one.neighbors > 3 * one.chance:
        seen = "the output tells its slot, and slots form clouds of their own"
    else:
        seen = "the slots lie mixed" if one.neighbors < 1.5 * one.chance else "slots overlap"
    return (
        f"{one.of[:1].upper()}{one.of[1:]}: {seen}. The nearest points name the slot of {show_percent(one.neighbors)} "
        f"of the points; chance is {show_percent(one.chance)}."
    )


def _pairs(found: Pairs) -> str:
    pairs = [
        (value, one, other)
        for one, row in enumerate(found.difference)
        for other, value in enumerate(row)
        if value is not None
    ]
    if not pairs:
        return "The bands have no pair of blocks that may change places."
    low, high = min(pairs), max(pairs)
    text = (
        f"Blocks {low[1]} and {low[2]} commute best: exchanged, their result differs by {low[0]:.2f} of what both add; "
        f"{high[1]} and {high[2]} worst, by {high[0]:.2f}."
    )
    rank = found.rank_correlation
    return text if rank is None else f"{text} The rank correlation with the order costs is {rank:+.2f}."


_FINDINGS: dict[str, Callable[[Any], str]] = {
    "importance": _importance,
    "contribution": _contribution,
    "similarity": _similarity,
    "agreement": _agreement,
    "slots": _slots,
    "norms": _norms,
    "probe": _probe,
    "umap": _umap,
    "pairs": _pairs,
    **INSIDE,
}
