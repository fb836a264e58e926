"""Tables and sentences of an analysis of the blocks of a model, for terminals and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from ls_edge.core.errors import printable
from ls_edge.core.text import NOTHING, bands_text, counted, name_blocks, show_percent
from ls_edge.evaluation.analysis import (
    AddedNorms,
    Agreement,
    Analysis,
    AttentionStatistics,
    Contribution,
    Importance,
    Map,
    Pairs,
    Probe,
    Rollout,
    Similarity,
    SlotAccuracy,
)
from ls_edge.evaluation.analysis.trace import TraceAnalysis
from ls_edge.report.terminal import PlainTable, print_table

AGREEMENT = ("blocks left out", "same class", "in all orders", "total variation", "orders")
SHOWN_ORDERS = 8
FEWEST_ANSWERS = 30
"""Answers of an order whose accuracy is compared with that of another: its 95 % interval is up to 35 points wide."""
_IN_WORDS = ("slots", "norms", "probe", "umap", "pairs", "rollout")
"""Kinds that a terminal shows as their finding alone."""
BEYOND_CHANCE = 5.0
"""Standard errors between the best and the worst slot of a block that depends on its slot."""


def about_analysis(found: Analysis) -> str:
    """Return the model and data of an analysis, in one line."""
    s = found.settings
    return (
        f"{printable(s['model'])}, {printable(s['method'])}, {counted(s['blocks'], 'block')}, "
        f"{counted(found.images, 'image')} of {s['data']}{bands_text(s['bands'])}"
    )


def verdict(found: Analysis) -> str:
    """Return the result of an analysis in one sentence; empty if neither agreement nor importance was measured."""
    said = []
    fixed = len(found.settings["bands"]) == found.settings["blocks"]
    if found.agreement is not None and not fixed:
        share = found.agreement.random.same_class
        how = "hardly matters" if share >= 0.95 else "matters little" if share >= 0.8 else "matters"
        said.append(f"block order {how}: {show_percent(share)} of the answers stay the same in random order")
    losses = [(one.importance, one.block) for one in found.importance.blocks] if found.importance is not None else []
    known = [(loss, block) for loss, block in losses if loss is not None]
    if known:
        (least, dispensable), (most, needed) = min(known), max(known)
        said.append(
            f"leaving out block {needed} costs most ({most:+.3f} nats), block {dispensable} least ({least:+.3f})"
        )
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


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


def _attention(found: AttentionStatistics) -> str:
    means = [float(np.mean(heads)) for heads in found.distance]
    every = [value for heads in found.distance for value in heads]
    return (
        f"Heads attend {min(every):.2f} to {max(every):.2f} patches away, {means[0]:.2f} on average in block 0 and "
        f"{means[-1]:.2f} in the last block."
    )


def _rollout(found: Rollout) -> str:
    same = found.correlation
    where = "the same patches" if same > 0.8 else "similar patches" if same > 0.4 else "other patches"
    return (
        f"In random order, attention reaches {where}: maps correlate by {same:+.2f} with those of the trained order, "
        f"over {counted(found.images, 'image')}. The strongest patch has {found.peak:.1f} times the mean."
    )


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
    "attention": _attention,
    "rollout": _rollout,
}


def empty_cells(found: Analysis) -> list[str]:
    """Return the reasons for the empty cells of tables and charts."""
    said = []
    if found.importance is not None and any(one.moved is None for one in found.importance.blocks):
        said.append(f"{NOTHING} under moved to: the band of the block has no other slot")
    if found.contribution is not None and any(None in slots for slots in found.contribution.random):
        orders = counted(found.contribution.orders, "random order")
        why = f"none of {orders} ran the block in that slot; raise --orders"
        if len(found.settings["bands"]) > 1:
            why = f"the band of the block excludes that slot, or {why}"
        said.append(f"An empty cell of contribution: {why}")
    if found.similarity is not None and (
        None in found.similarity.cosine or any(None in row for row in found.similarity.cka)
    ):
        said.append("An empty cell of similarity: the block adds nothing, or all images have the same tokens")
    return said


def block_table(found: Analysis) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return headings, and a row for each block, of the kinds that were measured."""
    columns = {"block": [str(block) for block in range(found.settings["blocks"])]}
    if found.importance is not None:
        top1, blocks = found.importance.trained.top1, found.importance.blocks
        columns["loss without"] = [_number(one.importance, "+.3f") for one in blocks]
        columns["accuracy without"] = [_points(one.left_out.top1 - top1) for one in blocks]
        columns["moved to"] = [NOTHING if one.moved_to is None else str(one.moved_to) for one in blocks]
        moved = [None if one.moved is None else one.moved.top1 - top1 for one in blocks]
        columns["accuracy moved"] = [NOTHING if change is None else _points(change) for change in moved]
    if found.contribution is not None:
        ranges = [[value for value in slots if value is not None] for slots in found.contribution.random]
        columns["adds"] = [_number(value) for value in found.contribution.trained]
        columns["adds, by slot"] = [f"{min(r):.2f} to {max(r):.2f}" if r else NOTHING for r in ranges]
    if found.similarity is not None:
        columns["CKA to before"] = [_number(row[step]) for step, row in enumerate(found.similarity.cka[1:])]
        columns["cosine"] = [_number(value) for value in found.similarity.cosine]
    if found.probe is not None:
        columns["slot read"] = [_number(value) for value in found.probe.accuracy]
    if found.attention is not None:
        columns["attention distance"] = [_number(float(np.mean(heads))) for heads in found.attention.distance]
        columns["entropy"] = [_number(float(np.mean(heads))) for heads in found.attention.entropy]
    return list(columns), list(zip(*columns.values(), strict=True))


def agreement_rows(found: Analysis) -> list[tuple[str, ...]]:
    """Return the rows below :data:`AGREEMENT`."""
    if found.agreement is None:
        return []
    return [
        (
            "none" if one.left_out == 0 else str(one.left_out),
            show_percent(one.same_class),
            show_percent(one.all_same_class),
            _number(one.total_variation),
            str(one.orders),
        )
        for one in (found.agreement.random, *found.agreement.left_out)
    ]


def print_analysis(found: Analysis, console: Console) -> None:
    """Print the model, a row for each block, and the agreement of answers."""
    console.print(f"{found.settings['of']}: {about_analysis(found)}")
    if said := verdict(found):
        console.print(said)
    if found.importance is not None:
        trained = found.importance.trained
        console.print(f"trained order: accuracy {trained.top1:.3f}, loss {_number(trained.loss)}")
    headings, rows = block_table(found)
    if len(headings) > 1:
        _print_rows(headings, rows, console)
    if found.agreement is not None:
        console.print("\nanswers in random order, compared with trained order:")
        _print_rows(AGREEMENT, agreement_rows(found), console)
    for line in empty_cells(found):
        console.print(line)
    for kind in _IN_WORDS:
        if getattr(found, kind) is not None:
            console.print(f"{kind}: {finding(found, kind)}")


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    print_table(PlainTable.of(*(f">{heading}" for heading in headings), rows=rows), console)


def _number(value: float | None, form: str = ".3f") -> str:
    return NOTHING if value is None else format(value, form)


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


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


def print_trace_analysis(found: TraceAnalysis, console: Console) -> None:
    """Print the finding of each section, and the most frequent orders."""
    console.print(f"{found.settings['of']}: {counted(found.requests, 'request')}, {found.failed:,} failed")
    for heading, text in trace_findings(found).items():
        console.print(f"{heading}: {printable(text)}")
    rows = [(one.of, f"{one.answers:,}", show_percent(one.top1)) for one in found.by_order[:SHOWN_ORDERS]]
    _print_rows(("order", "answers", "accuracy"), rows, console)
