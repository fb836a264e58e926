"""The sentence about each kind of analysis that reads weights, attention or gradients of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ls_edge.core.text import counted, show_percent
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


def _attention(found: AttentionStatistics) -> str:
    means = [float(np.mean(heads)) for heads in found.distance]
    every = [value for heads in found.distance for value in heads]
    return (
        f"Heads attend {min(every):.2f} to {max(every):.2f} patches away, {means[0]:.2f} on average in block 0 and "
        f"{means[-1]:.2f} in the last block."
    )


def _rollout(found: Rollout) -> str:
    return (
        f"In random order, attention reaches {_same_places(found.correlation)} patches: maps correlate by "
        f"{found.correlation:+.2f} with those of the trained order, over {counted(found.images, 'image')}. The "
        f"strongest patch has {found.peak:.1f} times the mean."
    )


def _same_places(correlation: float) -> str:
    return "the same" if correlation > 0.8 else "similar" if correlation > 0.4 else "other"


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


def _saliency(found: Saliency) -> str:
    if not found.top_share:
        return "The answer does not depend on the pixels."
    return (
        f"A tenth of the pixels has {show_percent(found.top_share)} of the gradient. In random order the answer "
        f"depends on {_same_places(found.correlation)} pixels: maps correlate by {found.correlation:+.2f}, over "
        f"{counted(found.images, 'image')}."
    )


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


def _filters(found: PatchFilters) -> str:
    smooth = found.smoothness
    like = "smooth patterns" if smooth > 0.5 else "partly smooth patterns" if smooth > 0.15 else "noise"
    return (
        f"{found.needed} of {counted(len(found.explained), 'component')} have 90 % of the variance of "
        f"{counted(found.filters, 'filter')}. The filters look like {like}: neighboring pixels correlate by "
        f"{smooth:+.2f}."
    )


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
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}."


def _mixing(found: TokenMixing) -> str:
    local, wide = int(np.argmin(found.spread)), int(np.argmax(found.spread))
    share = found.spread[local] / max(found.uniform, 1e-12)
    seen = "some blocks mix close patches" if share < 0.8 else "no block prefers close patches"
    return (
        f"The weights of block {local} are closest together, {found.spread[local]:.2f} patches from their center, "
        f"those of block {wide} widest, {found.spread[wide]:.2f}; equal weights have {found.uniform:.2f}: {seen}."
    )


def _excite(found: Excitation) -> str:
    beyond = [block for block, most, value in zip(found.blocks, found.most, found.reached, strict=True) if value > most]
    one, last = found.blocks[0], found.blocks[-1]
    return (
        f"Ascent exceeds the largest value of {counted(found.images, 'image')} in {len(beyond)} of "
        f"{counted(len(found.blocks), 'block')}: from {found.noise[0]:+.2f} to {found.reached[0]:+.2f} in block {one} "
        f"(images: {found.most[0]:+.2f}), from {found.noise[-1]:+.2f} to {found.reached[-1]:+.2f} in block {last} "
        f"(images: {found.most[-1]:+.2f})."
    )


def _inversion(found: Inversion) -> str:
    factors = found.factors
    pairs = zip(found.blocks, found.reached, found.shifted, strict=True)
    closer = [block for block, reached, shifted in pairs if reached < shifted]
    return (
        f"Descent lowers the distance by a factor of {factors[0]:,.0f} after block {found.blocks[0]} and "
        f"{factors[-1]:,.0f} after block {found.blocks[-1]}; it comes closer than the image with slight noise in "
        f"{len(closer)} of {counted(len(found.blocks), 'block')}."
    )


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


INSIDE: dict[str, Callable[[Any], str]] = {
    "parts": _parts,
    "attention": _attention,
    "rollout": _rollout,
    "class_attention": _class_attention,
    "saliency": _saliency,
    "positions": _positions,
    "filters": _filters,
    "layer_scale": _layer_scale,
    "mixing": _mixing,
    "excite": _excite,
    "inversion": _inversion,
}
