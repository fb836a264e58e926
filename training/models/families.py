"""Table of model families, and checks that a timm model has a stem, equal blocks, and a head.

An adapter (``adapters/``) names the stem, the blocks, and the head of a timm model; orders, slots, checkpoints, and
export are the same for all families. To add a family, write a module in ``adapters`` and add it to :data:`FAMILIES`;
other packages register theirs (:mod:`ls_edge.core.plugins`).

Models whose blocks differ in shape or computation (ConViT, Hiera, Swin, Twins, convolutional models) are rejected.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from ls_edge.core import plugins
from ls_edge.core.errors import ModelError
from ls_edge.training.models.adapters.beit import BeitFamily
from ls_edge.training.models.adapters.cait import CaitFamily
from ls_edge.training.models.adapters.eva import EvaFamily
from ls_edge.training.models.adapters.mixer import MixerFamily
from ls_edge.training.models.adapters.vision_transformer import VisionTransformerFamily
from ls_edge.training.models.flops import evaluation_mode

Family = VisionTransformerFamily
"""Base class of all adapters."""
FAMILIES: tuple[Family, ...] = (VisionTransformerFamily(), CaitFamily(), MixerFamily(), EvaFamily(), BeitFamily())


@functools.cache
def families() -> tuple[Family, ...]:
    """Return the families of other packages, then our own; raise :class:`UsageError` if one cannot be loaded."""
    others = (plugins.load("families", name, VisionTransformerFamily, ()) for name in plugins.registered("families"))
    return (*(family() for family in others), *FAMILIES)


def family_of(model: nn.Module) -> Family:
    """Return the family of a timm model, and prepare the model; raise :class:`ModelError` if there is none."""
    name = type(model).__name__
    family = next((one for one in families() if isinstance(model, one.timm_class)), None)
    if family is None:
        known = "; ".join(one.members for one in families())
        raise ModelError(
            f"{name} is not a model with a stem, blocks of one shape and a head that ls-edge supports; supported: "
            f"{known}; for example vit_tiny_patch16_224 or deit_small_patch16_224"
        )
    blocks = family.blocks(model)
    if not blocks:
        raise ModelError(f"this {name} has no blocks; a model needs at least one")
    shapes = [{key: tuple(value.shape) for key, value in block.state_dict().items()} for block in blocks]
    odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise ModelError(
            f"this {name} cannot be cut into equal blocks: the parameters of block {odd} differ from block 0; use a "
            "model whose blocks are all alike, such as vit_tiny_patch16_224"
        )
    family.prepare(model)
    return family


def evenly_spaced(num_blocks: int, keep: int) -> tuple[int, ...]:
    """Return ``keep`` evenly spaced indices of ``num_blocks`` (arXiv 2407.04513, refined models).

    They include the first and the last one if ``keep`` > 1. Raise :class:`ModelError` if there are fewer blocks.
    """
    if not 1 <= keep <= num_blocks:
        raise ModelError(f"depth {keep} is not possible; use 1 to {num_blocks}, the number of blocks of the model")
    gaps = max(1, keep - 1)
    return tuple((2 * i * (num_blocks - 1) + gaps) // (2 * gaps) for i in range(keep))


def shape_of_tokens(family: Family, model: nn.Module) -> tuple[int, int]:
    """Return the shape ``(N, D)`` of the tokens; raise :class:`ModelError` if a block changes it."""
    name, (height, width) = type(model).__name__, family.image_size(model)
    if any(parameter.is_meta for parameter in model.parameters()):  # built empty, except for its classifier
        model = copy.deepcopy(model).to("meta")
    parameter = next(model.parameters())
    images = torch.zeros(1, 3, height, width, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad(), evaluation_mode(model):
            tokens = family.stem(model, images)
            after = family.blocks(model)[0](tokens, **family.block_inputs(model, 0))
            logits = family.head(model, after) if after.shape == tokens.shape else after
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise ModelError(f"{name} does not take images [B, 3, {height}, {width}]: {error}; use another model") from None
    if tokens.ndim != 3 or after.shape != tokens.shape:
        raise ModelError(
            f"{name} changes the shape of its tokens: {list(tokens.shape)} before a block, {list(after.shape)} after "
            "it; use a plain vision transformer"
        )
    if logits.ndim != 2:
        raise ModelError(
            f"{name} returns {list(logits.shape)} for an image instead of one row of logits; leave global_pool to the "
            "model, or set it to avg or token"
        )
    return int(tokens.shape[1]), int(tokens.shape[2])
