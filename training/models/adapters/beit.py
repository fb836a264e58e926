"""BEiT: each block has its own relative position bias, or all blocks share one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.models import beit
from torch import Tensor

from ls_edge.training.models.adapters.vision_transformer import (
    WITH_GAMMAS,
    BranchTable,
    VisionTransformerFamily,
)


class BeitFamily(VisionTransformerFamily):
    """timm's ``Beit``."""

    members = "BEiT, BEiT v2"
    timm_class = beit.Beit
    residual_branches: ClassVar[BranchTable] = {beit.Block: WITH_GAMMAS}

    def block_inputs(self, model: Any, index: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the position bias that all blocks share, if there is one."""
        return {} if model.rel_pos_bias is None else {"shared_rel_pos_bias": model.rel_pos_bias()}

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Return class token and patches, with the position embedding added if there is one."""
        patches = model.patch_embed(images)
        tokens: Tensor = torch.cat((model.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        if model.pos_embed is not None:
            tokens = tokens + model.pos_embed
        return model.pos_drop(tokens)
