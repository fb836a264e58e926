"""The table of model families, and what a timm model needs to be seen as a stem, blocks of one shape and a head.

An adapter (``adapters/``) names the stem, the blocks and the head of a timm model; orders, slots, checkpoints and
export are the same for all. A new family is a module in ``adapters`` and an entry in :data:`FAMILIES`.

Models whose blocks differ in shape or in what they compute (ConViT, Hiera, Swin, Twins, convolutional ones) are
refused with the list of the families that are supported.
"""

from __future__ import annotations

import torch
from torch import nn

from ls_edge.core.errors import ModelError
from ls_edge.training.models.adapters.beit import BeitFamily
from ls_edge.training.models.adapters.cait import CaitFamily
from ls_edge.training.models.adapters.eva import EvaFamily
from ls_edge.training.models.adapters.mixer import MixerFamily
from ls_edge.training.models.adapters.vision_transformer import VisionTransformerFamily
from ls_edge.training.models.flops import evaluation_mode

Family = VisionTransformerFamily
"""The interface of all adapters; the others are its subclasses."""
FAMILIES: tuple[Family, ...] = (
    VisionTransformerFamily(),
    CaitFamily(),
    MixerFamily(),
    EvaFamily(),
    BeitFamily(),
)


def family_of(model: nn.Module) -> Family:
    """The family of a timm model, prepared for it; raises :class:`ModelError` with the reason if there is none."""
    name = type(model).__name__
    for family in FAMILIES:
        if not family.matches(model):
            continue
        blocks = family.blocks(model)
        if not blocks:
            raise ModelError(f"this {name} has no blocks; a model needs at least one")
        shapes = [{key: tuple(value.shape) for key, value in block.state_dict().items()} for block in blocks]
        odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is not None:
            raise ModelError(
                f"this {name} cannot be cut into equal blocks: block {odd} has other parameters than block 0; "
                "use a model whose blocks are all alike, such as vit_tiny_patch16_224"
            )
        family.prepare(model)
        return family
    known = "; ".join(family.members for family in FAMILIES)
    raise ModelError(
        f"{name} is no 'stem, blocks of one shape, head' that ls-edge supports; what fits: {known}; "
        "for instance vit_tiny_patch16_224 or deit_small_patch16_224"
    )


def evenly_spaced(num_blocks: int, keep: int) -> list[int]:
    """Which ``keep`` of ``num_blocks`` to keep, spread evenly, the first and the last among them where ``keep`` > 1.

    Raises :class:`ModelError` if there are fewer.
    """
    if not 1 <= keep <= num_blocks:
        raise ModelError(f"depth {keep} is not possible: the model has {num_blocks} blocks; give 1 to {num_blocks}")
    if keep == 1:
        return [0]
    return [(2 * i * (num_blocks - 1) + keep - 1) // (2 * (keep - 1)) for i in range(keep)]


def shape_of_tokens(family: Family, model: nn.Module) -> tuple[int, int]:
    """``(N, D)`` of the tokens; raises :class:`ModelError` where a block changes their shape."""
    height, width = family.image_size(model)
    parameter = next(model.parameters())
    images = torch.zeros(1, 3, height, width, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad(), evaluation_mode(model):
            tokens = family.stem(model, images)
            after = family.blocks(model)[0](tokens, **family.block_inputs(model, 0))
            logits = family.head(model, after) if after.shape == tokens.shape else None
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise ModelError(
            f"{type(model).__name__} does not take images [B, 3, {height}, {width}]: {error}; use another model"
        ) from None
    if tokens.ndim != 3 or after.shape != tokens.shape:
        raise ModelError(
            f"{type(model).__name__} does not carry one shape of tokens: {list(tokens.shape)} before a block, "
            f"{list(after.shape)} after it; use a plain vision transformer"
        )
    assert logits is not None
    if logits.ndim != 2:
        raise ModelError(
            f"{type(model).__name__} gives {list(logits.shape)} for an image and not one row of logits; leave "
            "global_pool to the model, or set it to avg or token"
        )
    return int(tokens.shape[1]), int(tokens.shape[2])
