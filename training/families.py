"""Adapters from timm's models to "stem, blocks of one shape, head".

A family says of a timm model what its stem and head are and which modules are its blocks; everything else
(orders, slots, checkpoints, export) is the same for all. A new family is one class here and its name in
:data:`FAMILIES`.

Here now: VisionTransformer (ViT, DeiT and its distilled form, DeiT3, DINOv2, SigLIP). Left out: models whose
blocks differ in shape or take more than the tokens (ConViT, Hiera, Swin, Twins); they are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from timm.models import vision_transformer
from torch import Tensor, nn

from ls_edge.errors import ModelError


class Family(Protocol):
    """What a view needs to know of a timm model; without state, so that a view can be copied and moved."""

    name: str

    def fits(self, model: nn.Module) -> bool:
        """Whether this family is the one for ``model``."""
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks in trained order, each called with tokens ``[B, N, D]`` alone."""
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


class VisionTransformerFamily:
    """timm's ``VisionTransformer`` and its subclasses: prefix tokens, position embedding and pooling are timm's own."""

    name = "VisionTransformer"

    def fits(self, model: nn.Module) -> bool:
        """Any VisionTransformer; distilled DeiT overrides the very methods that are called here."""
        return isinstance(model, vision_transformer.VisionTransformer)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return list(_any(model).blocks)

    def keep(self, model: nn.Module, indices: Sequence[int]) -> None:
        """Keep these blocks."""
        blocks = self.blocks(model)
        _any(model).blocks = nn.Sequential(*(blocks[i] for i in indices))

    def image_size(self, model: nn.Module) -> tuple[int, int]:
        """What the patch embedding was built for."""
        size = getattr(_any(model).patch_embed, "img_size", None)
        if size is None:
            size = _any(model).default_cfg["input_size"][-2:]
        height, width = size
        return int(height), int(width)

    def stem(self, model: nn.Module, images: Tensor) -> Tensor:
        """Patch embedding, prefix tokens and position embedding, and the norm ahead of the blocks if there is one."""
        m = _any(model)
        tokens: Tensor = m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(images))))
        return tokens

    def head(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Final norm, pooling and classifier."""
        m = _any(model)
        logits: Tensor = m.forward_head(m.norm(tokens))
        return logits

    def classifier(self, model: nn.Module) -> frozenset[str]:
        """Both heads of a distilled DeiT."""
        return frozenset(name for name in model.state_dict() if name.split(".")[0] in ("head", "head_dist"))

    def fit_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert as timm does: other names, position embedding resampled to this grid."""
        converted: dict[str, Tensor] = vision_transformer.checkpoint_filter_fn(state, _any(model))
        return converted


def _any(model: nn.Module) -> Any:
    return model


FAMILIES: tuple[Family, ...] = (VisionTransformerFamily(),)


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
        return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ModelError(
        f"{name} is no 'stem, blocks of one shape, head' that ls-edge knows (it knows {known}); "
        "use a plain vision transformer, such as vit_tiny_patch16_224 or deit_small_patch16_224"
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
            after = family.blocks(model)[0](tokens)
    except (RuntimeError, AssertionError, ValueError) as error:
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
    return int(tokens.shape[1]), int(tokens.shape[2])
