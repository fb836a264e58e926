"""EVA, EVA-02, DINOv3, and rotary ViTs: each block takes a rotary table, which is its own if tables are learned.

Augmentation of rotary coordinates and patches is not supported, since timm draws it once per image for all blocks,
which is impossible if blocks run separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from timm.layers.pos_embed_sincos import get_mixed_freqs
from timm.models import eva
from torch import Tensor, nn

from ls_edge.core.errors import ModelError
from ls_edge.training.models.adapters.vision_transformer import (
    WITH_GAMMAS,
    BranchTable,
    VisionTransformerFamily,
)

TABLE = "rope_table"
"""Buffer with a rotary table that is not learned; not part of checkpoints."""


class EvaFamily(VisionTransformerFamily):
    """timm's ``Eva``."""

    members = "EVA, EVA-02, DINOv3, ViTs with rotary positions"
    timm_class = eva.Eva
    residual_branches: ClassVar[BranchTable] = {eva.EvaBlock: WITH_GAMMAS}

    def prepare(self, model: Any) -> None:
        """Build the table that all blocks share, and disable the augmentation of its coordinates.

        Raise :class:`ModelError` for ``patch_drop_rate``.
        """
        if model.rope is None:
            return
        if model.patch_drop is not None:
            raise ModelError(
                f"{type(model).__name__} with patch_drop_rate changes its rotary tables with every batch; leave "
                "patch_drop_rate out"
            )
        if getattr(model.rope, "aug_active", False):  # on by default in sapiens2
            model.rope.aug_active = False
            model.rope.shift_coords = model.rope.jitter_coords = model.rope.rescale_coords = None
        if not getattr(model, "rope_mixed", False):
            with torch.no_grad():
                model.register_buffer(TABLE, _rotary_tables(model).clone(), persistent=False)

    def block_inputs(self, model: Any, index: int) -> dict[str, Tensor]:
        """Return the rotary table of block ``index``."""
        if model.rope is None:
            return {}
        if getattr(model, "rope_mixed", False):
            return {"rope": _learned_table(model, index)}
        return {"rope": getattr(model, TABLE)}

    def keep(self, model: Any, indices: Sequence[int]) -> None:
        """Keep these blocks and their learned rotary tables."""
        super().keep(model, indices)
        if getattr(model, "rope_mixed", False):
            model.rope.freqs = nn.Parameter(model.rope.freqs.detach()[:, list(indices)].clone())
            model.rope.depth = len(indices)

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Return patch and prefix tokens, with position embeddings added if the model has them."""
        return model.norm_pre(model._pos_embed(model.patch_embed(images))[0])


def _learned_table(model: Any, index: int) -> Tensor:
    """Return the table of one block; timm computes the tables of all blocks together."""
    rope = model.rope
    if model.dynamic_img_size or rope.t_x is None:
        return _rotary_tables(model)[index]
    return get_mixed_freqs(rope.freqs[:, index], rope.t_x, rope.t_y)


def _rotary_tables(model: Any) -> Tensor:
    """Return one table for all blocks or, if tables are learned, one for each block."""
    fixed = not model.dynamic_img_size and hasattr(model.rope, "feat_shape")
    return model.rope.get_embed() if fixed else model.rope.get_embed(shape=list(model.patch_embed.grid_size))
