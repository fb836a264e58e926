"""Weights with which a block mixes tokens, as maps over the patches (MLP-Mixer, ResMLP, gMLP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind
from ls_edge.evaluation.measure import LabeledImages, NotMeasurable
from ls_edge.report.pictures import Picture, around_gray, picture, tiles
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from torch import nn

    from ls_edge.training.inspection.inspected import Inspected

MOST_MAPS = 16
"""Maximum number of maps in the picture of a block, those with the largest norms."""


class TokenMixing(msgspec.Struct, frozen=True):
    """Weights with which a block mixes tokens, as maps over the patches (MLP-Mixer, ResMLP, gMLP)."""

    spread: list[float]
    """Standard distance, in patches, of the squared weights of a map from their center; mean over maps."""
    uniform: float
    """Spread of equal weights."""
    pictures: list[Picture]


def inspect(inspected: Inspected, _batches: Sequence[LabeledImages]) -> TokenMixing:
    """Return the weights of linear layers over the tokens as maps over the patches, one for each output."""
    from ls_edge.training.inspection.inspected import class_of, grid_of

    view, grid = inspected.model.view, grid_of(inspected.model)
    layers = [_mixing_layer(block, view.token_spec.count) for block in view.blocks]
    if grid is None or None in layers:
        raise NotMeasurable(f"the blocks of {class_of(inspected.model)} do not mix tokens by fixed weights")
    spread, shown = [], []
    for block, layer in enumerate(layers):
        maps = layer.weight.detach().double().cpu().numpy()
        energy = np.square(maps).sum(axis=1)
        spread.append(float(np.average(_spread(np.square(maps), grid), weights=energy)))
        largest = maps[np.argsort(-energy)[:MOST_MAPS]].reshape(-1, *grid)
        shown.append(Picture(f"block {block}", picture(tiles([around_gray(one) for one in largest], 4))))
    return TokenMixing(spread, float(_spread(np.ones((1, grid[0] * grid[1])), grid)[0]), shown)


def _mixing_layer(block: nn.Module, count: int) -> Any:
    """Return the first linear layer over ``count`` tokens, or None."""
    from torch import nn

    for name, module in block.named_modules():
        over_tokens = "tokens" in name or ".gate." in name  # names of timm's mixing layers
        if over_tokens and isinstance(module, nn.Linear) and module.in_features == count:
            return module
    return None


def _spread(weights: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the standard distance of weights ``[maps, patches]`` from their center, in patches."""
    places = np.argwhere(np.ones(grid)).astype(np.float64)
    shares = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    center = shares @ places
    squares = shares @ np.square(places).sum(axis=1) - np.square(center).sum(axis=1)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def _finding(found: TokenMixing) -> str:
    local, wide = int(np.argmin(found.spread)), int(np.argmax(found.spread))
    share = found.spread[local] / max(found.uniform, 1e-12)
    seen = "some blocks mix close patches" if share < 0.8 else "no block prefers close patches"
    return (
        f"The weights of block {local} are closest together, {found.spread[local]:.2f} patches from their center, "
        f"those of block {wide} farthest apart, {found.spread[wide]:.2f}; equal weights have {found.uniform:.2f}: "
        f"{seen}."
    )


def _charts(found: TokenMixing) -> list[Chart]:
    from ls_edge.report.charts.specification import lines_chart

    spread = dict(enumerate(found.spread))
    series = {"weights": spread, "equal weights": dict.fromkeys(spread, found.uniform)}
    return [lines_chart(series, "block", "distance from the center, patches")]


MIXING = InspectedKind(
    summary="weights with which MLP models mix tokens",
    text="Weights with which a block mixes tokens: a tile shows the weights of one output over the patches, gray is 0. "
    "The chart shows their distance from their center.",
    inspect=inspect,
    finding=_finding,
    charts=_charts,
)
