"""Magnitude of LayerScale (arXiv 2103.17239) by depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind, sentence
from ls_edge.evaluation.measure import LabeledImages, NotMeasurable
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from torch import nn

    from ls_edge.training.inspection.inspected import Inspected


class LayerScale(msgspec.Struct, frozen=True):
    """Mean magnitude of LayerScale (arXiv 2103.17239) by depth, of each residual branch."""

    layers: list[str]
    branches: dict[str, list[float]]


def inspect(inspected: Inspected, _batches: Sequence[LabeledImages]) -> LayerScale:
    """Return the mean magnitude of LayerScale by depth, and of CaiT's class-attention layers."""
    from ls_edge.training.inspection.inspected import class_of

    view = inspected.model.view
    layers = {str(number): block for number, block in enumerate(view.blocks)}
    layers |= {f"class {n}": layer for n, layer in enumerate(getattr(view.model, "blocks_token_only", ()))}
    first = "attention" if hasattr(layers["0"], "attn") else "token mixing"
    found: dict[str, list[float]] = {}
    for branch, name in ((1, first), (2, "MLP")):
        scales = [_scale(layer, branch) for layer in layers.values()]
        if None in scales:
            raise NotMeasurable(f"the blocks of {class_of(inspected.model)} have no LayerScale")
        found[name] = [scale for scale in scales if scale is not None]
    return LayerScale(list(layers), found)


def _scale(layer: nn.Module, branch: int) -> float | None:
    """Return the mean magnitude of LayerScale in a branch of a timm block, or None if it has none."""
    from torch import Tensor

    for name in (f"ls{branch}", f"gamma_{branch}"):
        found = getattr(layer, name, None)
        found = getattr(found, "gamma", found)
        if isinstance(found, Tensor):
            return float(found.detach().abs().mean())
    return None


def _finding(found: LayerScale) -> str:
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


def _charts(found: LayerScale) -> list[Chart]:
    from ls_edge.report.charts.specification import lines_chart

    series = {name: dict(zip(found.layers, values, strict=True)) for name, values in found.branches.items()}
    return [lines_chart(series, "layer", "mean magnitude", order=found.layers)]


LAYER_SCALE = InspectedKind(
    summary="magnitude of LayerScale",
    text="Mean magnitude of LayerScale, the learned factor of each residual branch, by depth.",
    inspect=inspect,
    finding=_finding,
    charts=_charts,
)
