"""Adapters from timm's models to "stem, blocks of one shape, head".

A family says of a timm model what its stem and head are and which modules are its blocks; everything else
(orders, slots, checkpoints, export) is the same for all. A new family is one class in ``adapters``
and its name in :data:`FAMILIES`.

Left out: models whose blocks differ in shape or in what they compute (ConViT, Hiera, Swin, Twins, convolutional
ones); they are refused with the list of what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ls_edge.errors import ModelError
from ls_edge.training.models.adapters import BeitFamily, CaitFamily, EvaFamily, MixerFamily, VisionTransformerFamily


class Family(Protocol):
    """What a view needs to know of a timm model; without state, so that a view can be copied and moved."""

    name: str
    members: str
    """The models that users know it by."""

    def fits(self, model: nn.Module) -> bool:
        """Whether this family is the one for ``model``."""
        ...

    def prepare(self, model: nn.Module) -> None:
        """Make ready once what the blocks share; raises :class:`ModelError` for settings that no view can have."""
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks in trained order, each called with tokens ``[B, N, D]`` and its :meth:`extras`."""
        ...

    def extras(self, model: nn.Module, index: int) -> dict[str, Tensor]:
        """What block ``index`` is called with besides the tokens, by keyword."""
        ...

    def keep(self, model: nn.Module, indices: Sequence[int]) -> None:
        """Drop all blocks but these, in place."""
        ...

    def image_size(self, model: nn.Module) -> tuple[int, int]:
        """Height and width of the images that the stem takes, in pixels."""
        ...

    def stem(self, model: nn.Module, images: Tensor) -> Tensor:
        """Images ``[B, 3, H, W]`` to tokens ``[B, N, D]``."""
        ...

    def head(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Tokens ``[B, N, D]`` to logits ``[B, C]``."""
        ...

    def classifier(self, model: nn.Module) -> frozenset[str]:
        """Names of the parameters whose shape follows the number of classes."""
        ...

    def fit_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors under the names and position grid of ``model``."""
        ...


FAMILIES: tuple[Family, ...] = (VisionTransformerFamily(), CaitFamily(), MixerFamily(), EvaFamily(), BeitFamily())


def family_of(model: nn.Module) -> Family:
    """The family of a timm model; raises :class:`ModelError` where none fits, with the reason."""
    name = type(model).__name__
    for family in FAMILIES:
        if not family.fits(model):
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
        f"{name} is no 'stem, blocks of one shape, head' that ls-edge knows; what fits: {known}; "
        "for instance vit_tiny_patch16_224 or deit_small_patch16_224"
    )


def evenly_spaced(blocks: int, keep: int) -> list[int]:
    """Which ``keep`` of ``blocks`` to keep, spread evenly, the first and the last among them where ``keep`` > 1.

    Raises :class:`ModelError` where that many are not there.
    """
    if not 1 <= keep <= blocks:
        raise ModelError(f"depth {keep} is not possible: the model has {blocks} blocks; say 1 to {blocks}")
    if keep == 1:
        return [0]
    return [(2 * i * (blocks - 1) + keep - 1) // (2 * (keep - 1)) for i in range(keep)]


def shape_of_tokens(family: Family, model: nn.Module) -> tuple[int, int]:
    """``(N, D)`` of the tokens; raises :class:`ModelError` where a block changes their shape."""
    height, width = family.image_size(model)
    parameter = next(model.parameters())
    images = torch.zeros(1, 3, height, width, device=parameter.device, dtype=parameter.dtype)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            tokens = family.stem(model, images)
            after = family.blocks(model)[0](tokens, **family.extras(model, 0))
            logits = family.head(model, after) if after.shape == tokens.shape else None
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise ModelError(
            f"{type(model).__name__} does not take images [B, 3, {height}, {width}]: {error}; use another model"
        ) from None
    finally:
        for module, mode in modes.items():
            module.training = mode
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
