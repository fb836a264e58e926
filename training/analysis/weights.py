"""Weights of a run as numbers and pictures; they are the same in every order of the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.data.pictures import around_gray, picture, shades, tiles
from ls_edge.evaluation.analysis.inside import LayerScale, PatchFilters, Picture, PositionEmbeddings, TokenMixing
from ls_edge.training.analysis.attention import distances
from ls_edge.training.analysis.inspected import Inspected, LackingError, correlation

MOST_QUERIES = 8
"""Number of rows and of columns of patches whose similarities are shown."""
MOST_COMPONENTS = 28
"""Principal components in the picture, as in arXiv 2010.11929, Figure 7."""
MOST_MAPS = 16
"""Number of maps of mixing weights in the picture of a block, the ones with the largest norms."""


@torch.inference_mode()
def positions(inspected: Inspected) -> PositionEmbeddings:
    """Return the cosine similarity of each patch's position embedding with all others."""
    embedding, grid = getattr(inspected.model.view.model, "pos_embed", None), inspected.grid
    if not isinstance(embedding, Tensor) or grid is None or embedding.shape[1] < grid[0] * grid[1]:
        raise LackingError(f"{inspected.name} has no position embedding for each patch")
    vectors = nn.functional.normalize(embedding[0, -grid[0] * grid[1] :].double().cpu(), dim=1)
    cosine = (vectors @ vectors.T).numpy()
    apart = distances(*grid).numpy()
    pairs = apart > 0
    rings = np.round(apart).astype(int)
    by_distance = [(float(ring), float(cosine[pairs & (rings == ring)].mean())) for ring in np.unique(rings[pairs])]
    rows, columns = (np.unique(np.linspace(0, side - 1, MOST_QUERIES).astype(int)) for side in grid)
    queries = [shades(cosine[row * grid[1] + column].reshape(grid)) for row in rows for column in columns]
    text = "each tile: one patch compared with all others, from black (least similar) to white"
    shown = [Picture(text, picture(tiles(queries, len(columns))))]
    return PositionEmbeddings(by_distance, correlation(cosine[pairs], apart[pairs]), grid, shown)


@torch.inference_mode()
def filters(inspected: Inspected) -> PatchFilters:
    """Return the principal components of a patch embedding of one layer of RGB patches, the largest variance first."""
    layer = getattr(inspected.model.view.patch_embedding, "proj", None)
    if not isinstance(layer, nn.Conv2d) or layer.in_channels != 3 or layer.groups != 1:
        raise LackingError(f"the patch embedding of {inspected.name} is not one layer of RGB patches")
    weights = layer.weight.permute(0, 2, 3, 1).double().cpu().numpy()
    count, height, width, _ = weights.shape
    flat = weights.reshape(count, -1)
    _, sizes, components = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    power = float(np.square(weights).mean()) or 1.0
    neighbors = [
        (weights[:, 1:] * weights[:, :-1]).mean() if height > 1 else 0.0,
        (weights[:, :, 1:] * weights[:, :, :-1]).mean() if width > 1 else 0.0,
    ]
    first = components[:MOST_COMPONENTS].reshape(-1, height, width, 3)
    largest = weights[np.argsort(-np.linalg.norm(flat, axis=1))[:MOST_COMPONENTS]]
    shown = [
        Picture(text, picture(tiles([around_gray(one) for one in some], 7)))
        for text, some in (("principal components", first), ("filters with the largest norms", largest))
    ]
    variances = np.square(sizes) / max(float(np.square(sizes).sum()), 1e-300)
    return PatchFilters(variances.tolist(), float(np.mean(neighbors)) / power, count, (height, width), shown)


@torch.inference_mode()
def layer_scale(inspected: Inspected) -> LayerScale:
    """Return the mean magnitude of LayerScale by depth, and of CaiT's class-attention layers."""
    view = inspected.model.view
    layers = {str(number): block for number, block in enumerate(view.blocks)}
    layers |= {f"class {n}": layer for n, layer in enumerate(getattr(view.model, "blocks_token_only", ()))}
    first = "attention" if hasattr(layers["0"], "attn") else "token mixing"
    found: dict[str, list[float]] = {}
    for branch, name in ((1, first), (2, "MLP")):
        scales = [_scale(layer, branch) for layer in layers.values()]
        if None in scales:
            raise LackingError(f"the blocks of {inspected.name} have no LayerScale")
        found[name] = [scale for scale in scales if scale is not None]
    return LayerScale(list(layers), found)


def _scale(layer: nn.Module, branch: int) -> float | None:
    """Return the mean LayerScale of a branch of a timm block, under one of timm's names; None without one."""
    for name in (f"ls{branch}", f"gamma_{branch}"):
        found = getattr(layer, name, None)
        found = getattr(found, "gamma", found)
        if isinstance(found, Tensor):
            return float(found.abs().mean())
    return None


@torch.inference_mode()
def mixing(inspected: Inspected) -> TokenMixing:
    """Return the weights of linear layers over the tokens as maps over the patches: one map for each output."""
    view, grid = inspected.model.view, inspected.grid
    layers = [_mixing_layer(block, view.token_spec.count) for block in view.blocks]
    if grid is None or None in layers:
        raise LackingError(f"the blocks of {inspected.name} do not mix tokens by fixed weights")
    spread, shown = [], []
    for block, layer in enumerate(layers):
        maps = layer.weight.double().cpu().numpy()
        energy = np.square(maps).sum(axis=1)
        spread.append(float(np.average(_spread(np.square(maps), grid), weights=energy)))
        largest = maps[np.argsort(-energy)[:MOST_MAPS]].reshape(-1, *grid)
        shown.append(Picture(f"block {block}", picture(tiles([around_gray(one) for one in largest], 4))))
    return TokenMixing(spread, float(_spread(np.ones((1, grid[0] * grid[1])), grid)[0]), grid, shown)


def _mixing_layer(block: nn.Module, count: int) -> Any:
    """Return the first linear layer over ``count`` tokens, or None."""
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
