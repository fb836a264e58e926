"""Weights of a run as numbers and pictures; they are the same in every order of the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.data.pictures import around_gray, picture, shades, tiles
from ls_edge.evaluation.analysis.inside import LayerScale, PatchFilters, Picture, PositionEmbeddings, TokenMixing
from ls_edge.training.analysis.attention import distances
from ls_edge.training.analysis.inspected import Inspected, Look, correlation

MOST_QUERIES = 8
"""Rows and columns of patches whose similarities are shown."""
MOST_COMPONENTS = 28
"""Principal components in the picture, as in arXiv 2010.11929, Figure 7."""
MOST_MAPS = 16
"""Maps of a block's mixing weights in its picture, those with the largest norms."""


class PositionWeights(Look):
    """Cosine similarity of each patch's position embedding with all others."""

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        self._embedding: Any = getattr(self.model.view.model, "pos_embed", None)
        grid = inspected.grid
        if not isinstance(self._embedding, Tensor) or grid is None or self._embedding.shape[1] < grid[0] * grid[1]:
            self.reason = f"{inspected.name} has no position embedding for each patch"

    @torch.inference_mode()
    def result(self) -> PositionEmbeddings | None:
        """Return the similarities by distance, and their picture."""
        grid = self.inspected.grid
        if self.reason or grid is None:
            return None
        count = grid[0] * grid[1]
        vectors = self._embedding[0, -count:].double().cpu()
        cosine = (nn.functional.normalize(vectors, dim=1) @ nn.functional.normalize(vectors, dim=1).T).numpy()
        apart = distances(*grid).numpy()
        pairs = apart > 0
        rings = np.round(apart).astype(int)
        by_distance = [(float(ring), float(cosine[pairs & (rings == ring)].mean())) for ring in np.unique(rings[pairs])]
        rows, columns = (np.unique(np.linspace(0, side - 1, MOST_QUERIES).astype(int)) for side in grid)
        queries = [shades(cosine[row * grid[1] + column].reshape(grid)) for row in rows for column in columns]
        text = "each tile: one patch compared with all others, from black (least similar) to white"
        shown = [Picture(text, picture(tiles(queries, len(columns))))]
        return PositionEmbeddings(by_distance, correlation(cosine[pairs], apart[pairs]), grid, shown)


class FilterWeights(Look):
    """Principal components of the filters of a patch embedding that is one layer of RGB patches."""

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        layer = getattr(inspected.patch_embedding, "proj", None)
        if isinstance(layer, nn.Conv2d) and layer.in_channels == 3 and layer.groups == 1:
            self._layer = layer
        else:
            self.reason = f"the patch embedding of {inspected.name} is not one layer of RGB patches"

    @torch.inference_mode()
    def result(self) -> PatchFilters | None:
        """Return the components, the largest variance first."""
        if self.reason:
            return None
        filters = self._layer.weight.permute(0, 2, 3, 1).double().cpu().numpy()
        count, height, width, _ = filters.shape
        flat = filters.reshape(count, -1)
        _, sizes, components = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
        power = float(np.square(filters).mean()) or 1.0
        neighbors = [
            (filters[:, 1:] * filters[:, :-1]).mean() if height > 1 else 0.0,
            (filters[:, :, 1:] * filters[:, :, :-1]).mean() if width > 1 else 0.0,
        ]
        first = components[:MOST_COMPONENTS].reshape(-1, height, width, 3)
        largest = filters[np.argsort(-np.linalg.norm(flat, axis=1))[:MOST_COMPONENTS]]
        shown = [
            Picture(text, picture(tiles([around_gray(one) for one in some], 7)))
            for text, some in (("principal components", first), ("filters with the largest norms", largest))
        ]
        variances = np.square(sizes) / max(float(np.square(sizes).sum()), 1e-300)
        return PatchFilters(variances.tolist(), float(np.mean(neighbors)) / power, count, (height, width), shown)


class LayerScaleWeights(Look):
    """Magnitude of LayerScale by depth, and of CaiT's class-attention layers."""

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        model = self.model.view.model
        self._layers = {str(number): block for number, block in enumerate(self.model.view.blocks)}
        self._layers |= {f"class {n}": layer for n, layer in enumerate(getattr(model, "blocks_token_only", ()))}
        if not all(_scale(layer, branch) is not None for layer in self._layers.values() for branch in (1, 2)):
            self.reason = f"the blocks of {inspected.name} have no LayerScale"

    @torch.inference_mode()
    def result(self) -> LayerScale | None:
        """Return the mean magnitudes."""
        if self.reason:
            return None
        first = "attention" if hasattr(self._layers["0"], "attn") else "token mixing"
        return LayerScale(
            layers=list(self._layers),
            branches={
                name: [float(_scale(layer, branch).abs().mean()) for layer in self._layers.values()]
                for branch, name in ((1, first), (2, "MLP"))
            },
        )


def _scale(layer: nn.Module, branch: int) -> Any:
    """Return the LayerScale of a branch of a timm block, under one of timm's names; None without one."""
    for name in (f"ls{branch}", f"gamma_{branch}"):
        found = getattr(layer, name, None)
        found = getattr(found, "gamma", found)
        if isinstance(found, Tensor):
            return found
    return None


class MixingWeights(Look):
    """Linear layers over the tokens as maps over the patches: one map for each output."""

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        count = self.model.view.token_spec.count
        found = [_mixing_layer(block, count) for block in self.model.view.blocks]
        self._layers = [layer for layer in found if layer is not None]
        if inspected.grid is None or len(self._layers) < len(found):
            self.reason = f"the blocks of {inspected.name} do not mix tokens by fixed weights"

    @torch.inference_mode()
    def result(self) -> TokenMixing | None:
        """Return the spread of the maps by block, and the maps with the largest norms."""
        grid = self.inspected.grid
        if self.reason or grid is None:
            return None
        spread, shown = [], []
        for block, layer in enumerate(self._layers):
            maps = layer.weight.double().cpu().numpy()
            energy = np.square(maps).sum(axis=1)
            spread.append(float(np.average(_spread(np.square(maps), grid), weights=energy)))
            largest = maps[np.argsort(-energy)[:MOST_MAPS]].reshape(-1, *grid)
            shown.append(Picture(f"block {block}", picture(tiles([around_gray(one) for one in largest], 4))))
        return TokenMixing(spread, float(_spread(np.ones((1, grid[0] * grid[1])), grid)[0]), grid, shown)


def _mixing_layer(block: nn.Module, count: int) -> nn.Linear | None:
    """Return the first linear layer over ``count`` tokens."""
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
    found: np.ndarray = np.sqrt(np.maximum(squares, 0.0))
    return found
