"""The sentence about each kind of analysis for one model: what to see in its section."""

from __future__ import annotations

import functools

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
from ls_edge.evaluation.analysis.inside import (
    AttentionStatistics,
    ClassAttention,
    Excitation,
    Inversion,
    LayerScale,
    Part,
    Parts,
    PatchFilters,
    PositionEmbeddings,
    Rollout,
    Saliency,
    TokenMixing,
)

BEYOND_CHANCE = 5.0
"""Standard errors between the best and the worst slot of a block that depends on its slot."""


def finding(found: Analysis, kind: str) -> str:
    """Return what to see in the section of a kind for this model, or the reason for its absence."""
    measured = getattr(found, kind)
    if measured is None:
        return f"None: {printable(found.reasons.get(kind, 'a value is not finite'))}."
    return seen(measured)


@functools.singledispatch
def seen(measured: object) -> str:
    """Return what to see in a result: a function for the type of each."""
    raise NotImplementedError(type(measured))


def sentence(text: str) -> str:
    """Return a text as a sentence; an empty text stays empty."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def costs_of(found: Importance) -> str:
    """Return which blocks cost most and least if they are left out; empty if no loss is finite."""
    known = [(one.importance, one.block) for one in found.blocks if one.importance is not None]
    if not known:
        return ""
    (least, dispensable), (most, needed) = min(known), max(known)
    return f"leaving out block {needed} costs most, {most:+.3f} nats, and block {dispensable} least, {least:+.3f}"


@seen.register
def _importance(found: Importance) -> str:
    trained, costs = found.trained.loss or 0.0, costs_of(found)
    moved = [
        (one.moved.loss - trained, one.block, one.moved_to)
        for one in found.blocks
        if one.moved is not None and one.moved.loss is not None
    ]
    if not costs or not moved:
        return sentence(costs or "no loss is finite")
    worst, block, slot = max(moved)
    return sentence(f"{costs}; moving block {block} to slot {slot} is the worst move, {worst:+.3f}")


@seen.register
def _contribution(found: Contribution) -> str:
    table = found.random
    by_slot = [[value for row in table if (value := row[slot]) is not None] for slot in range(len(table))]
    means = [float(np.mean(values)) for values in by_slot if values]
    return (
        f"In random order a block adds {means[0]:.2f} of the norm of a token in the first slot and {means[-1]:.2f} in "
        "the last one, on average over the blocks."
    )


@seen.register
def _similarity(found: Similarity) -> str:
    steps = [(row[at], at) for at, row in enumerate(found.cka[1:]) if row[at] is not None]
    cosines = [value for value in found.cosine if value is not None]
    text = ""
    if steps:
        text = "Block {1} changes the tokens most: CKA {0:.2f} to those before it. ".format(*min(steps))
    if cosines:
        text += (
            f"What a block adds in random order has a cosine of {min(cosines):.2f} to {max(cosines):.2f} to what it "
            f"adds in trained order: {'nearly the same' if min(cosines) > 0.6 else 'different'} directions."
        )
    return text.strip()


@seen.register
def _agreement(found: Agreement) -> str:
    share = found.random.same_class
    text = f"{show_percent(share)} of the answers in random order are those of the trained order"
    if not found.left_out:
        return f"{text}."
    last = found.left_out[-1]
    return f"{text}, and {show_percent(last.same_class)} with {counted(last.left_out, 'block')} left out."


@seen.register
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


@seen.register
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


@seen.register
def _probe(found: Probe) -> str:
    known = [(value, block) for block, value in enumerate(found.accuracy) if value is not None]
    control = [value for value in found.shuffled if value is not None]
    (low, least), (high, most) = min(known), max(known)
    return (
        f"A linear probe reads the slot of {show_percent(low)} (block {least}) to {show_percent(high)} (block {most}) "
        f"of the outputs; with slots exchanged at random {show_percent(float(np.mean(control)))}."
    )


@seen.register(list)
def _umap(found: list[Map]) -> str:
    one = found[0]
    if one.neighbors > 3 * one.chance:
        look = "the output tells its slot, and slots form clouds of their own"
    else:
        look = "the slots lie mixed" if one.neighbors < 1.5 * one.chance else "slots overlap"
    return sentence(
        f"{one.of}: {look}. The nearest points name the slot of {show_percent(one.neighbors)} of the points; chance is "
        f"{show_percent(one.chance)}"
    )


@seen.register
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


@seen.register
def _attention(found: AttentionStatistics) -> str:
    means = [float(np.mean(heads)) for heads in found.distance]
    every = [value for heads in found.distance for value in heads]
    return (
        f"Heads attend {min(every):.2f} to {max(every):.2f} patches away, {means[0]:.2f} on average in block 0 and "
        f"{means[-1]:.2f} in the last block."
    )


@seen.register
def _rollout(found: Rollout) -> str:
    return (
        f"In random order, attention reaches {_same_places(found.correlation)} patches: maps correlate by "
        f"{found.correlation:+.2f} with those of the trained order, over {counted(found.images, 'image')}. The "
        f"strongest patch has {found.peak:.1f} times the mean."
    )


def _same_places(correlation: float) -> str:
    return "the same" if correlation > 0.8 else "similar" if correlation > 0.4 else "other"


@seen.register
def _class_attention(found: ClassAttention) -> str:
    own = [float(np.mean(heads)) for heads in found.own]
    entropy = [value for heads in found.entropy for value in heads]
    most = float(np.log(1 + found.grid[0] * found.grid[1]))
    sharp = "focused" if min(entropy) < 0.7 * most else "spread over nearly all patches"
    return (
        f"Class attention is {sharp}: entropy {min(entropy):.2f} to {max(entropy):.2f} nats, {most:.2f} if equal "
        f"everywhere. Layer 0 keeps {show_percent(own[0])} on the class token, the last layer {show_percent(own[-1])}. "
        f"In random order it attends to {_same_places(found.correlation)} patches (correlation "
        f"{found.correlation:+.2f}, {counted(found.images, 'image')})."
    )


@seen.register
def _saliency(found: Saliency) -> str:
    if not found.top_share:
        return "The answer does not depend on the pixels."
    return (
        f"A tenth of the pixels has {show_percent(found.top_share)} of the gradient. In random order the answer "
        f"depends on {_same_places(found.correlation)} pixels: maps correlate by {found.correlation:+.2f}, over "
        f"{counted(found.images, 'image')}."
    )


@seen.register
def _positions(found: PositionEmbeddings) -> str:
    (_, near), (apart, far) = found.by_distance[0], found.by_distance[-1]
    grid = (
        "close patches have similar embeddings"
        if found.correlation < -0.3
        else "embeddings do not show how far patches are apart"
    )
    return (
        f"Neighbors have a cosine of {near:+.2f}, patches {apart:.0f} apart {far:+.2f}: {grid} (correlation with the "
        f"distance {found.correlation:+.2f}). They are added before the blocks, so the order does not change them."
    )


@seen.register
def _filters(found: PatchFilters) -> str:
    smooth = found.smoothness
    like = "smooth patterns" if smooth > 0.5 else "partly smooth patterns" if smooth > 0.15 else "noise"
    return (
        f"{found.needed} of {counted(len(found.explained), 'component')} have 90 % of the variance of "
        f"{counted(found.filters, 'filter')}. The filters look like {like}: neighboring pixels correlate by "
        f"{smooth:+.2f}."
    )


@seen.register
def _layer_scale(found: LayerScale) -> str:
    said = []
    for name, values in found.branches.items():
        largest, smallest = int(np.argmax(values)), int(np.argmin(values))
        said.append(
            f"{name}: {values[smallest]:.2g} in every layer"
            if values[smallest] == values[largest]
            else f"{name}: largest in layer {found.layers[largest]} ({values[largest]:.2g}), smallest in layer "
            f"{found.layers[smallest]} ({values[smallest]:.2g})"
        )
    return sentence("; ".join(said))


@seen.register
def _mixing(found: TokenMixing) -> str:
    local, wide = int(np.argmin(found.spread)), int(np.argmax(found.spread))
    share = found.spread[local] / max(found.uniform, 1e-12)
    seen = "some blocks mix close patches" if share < 0.8 else "no block prefers close patches"
    return (
        f"The weights of block {local} are closest together, {found.spread[local]:.2f} patches from their center, "
        f"those of block {wide} widest, {found.spread[wide]:.2f}; equal weights have {found.uniform:.2f}: {seen}."
    )


@seen.register
def _excite(found: Excitation) -> str:
    beyond = [block for block, most, value in zip(found.blocks, found.most, found.reached, strict=True) if value > most]
    one, last = found.blocks[0], found.blocks[-1]
    return (
        f"Ascent exceeds the largest value of {counted(found.images, 'image')} in {len(beyond)} of "
        f"{counted(len(found.blocks), 'block')}: from {found.noise[0]:+.2f} to {found.reached[0]:+.2f} in block {one} "
        f"(images: {found.most[0]:+.2f}), from {found.noise[-1]:+.2f} to {found.reached[-1]:+.2f} in block {last} "
        f"(images: {found.most[-1]:+.2f})."
    )


@seen.register
def _inversion(found: Inversion) -> str:
    factors = found.factors
    pairs = zip(found.blocks, found.reached, found.shifted, strict=True)
    closer = [block for block, reached, shifted in pairs if reached < shifted]
    return (
        f"Descent lowers the distance by a factor of {factors[0]:,.0f} after block {found.blocks[0]} and "
        f"{factors[-1]:,.0f} after block {found.blocks[-1]}; it comes closer than the image with slight noise in "
        f"{len(closer)} of {counted(len(found.blocks), 'block')}."
    )


@seen.register
def _parts(found: Parts) -> str:
    top1 = found.trained.top1

    def costs(part: Part) -> list[float]:
        return [100 * (top1 - one.top1) for one in part.blocks]

    said = []
    for part in found.parts:
        lost = costs(part)
        said.append(f"{part.name} {np.mean(lost):.1f} points (block {int(np.argmax(lost))}: {max(lost):.1f})")
    most = max(found.parts, key=lambda part: (float(np.mean(costs(part))), part.name))
    return f"The {most.name} matters most. Without it in one block, accuracy falls on average by: {', '.join(said)}."
