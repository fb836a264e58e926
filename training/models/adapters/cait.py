"""CaiT (arXiv 2103.17239): the patch blocks can be reordered; the class-attention stage belongs to the head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.models import cait
from torch import Tensor

from ls_edge.training.models.adapters.vision_transformer import (
    WITH_GAMMAS,
    BranchTable,
    VisionTransformerFamily,
)


class CaitFamily(VisionTransformerFamily):
    """timm's ``Cait``."""

    members = "CaiT"
    timm_class = cait.Cait
    residual_branches: ClassVar[BranchTable] = {cait.LayerScaleBlock: WITH_GAMMAS}

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Return patches with their position embeddings; the head adds the class token."""
        return model.pos_drop(model.patch_embed(images) + model.pos_embed)

    def head(self, model: Any, tokens: Tensor) -> Tensor:
        """Run class attention over the patches, norm, pooling, and classifier."""
        if hasattr(model, "forward_cls"):
            both = model.forward_cls(tokens)
        else:  # timm up to 1.0.30 has it only in forward_features
            class_token = model.cls_token.expand(tokens.shape[0], -1, -1)
            for block in model.blocks_token_only:
                class_token = block(tokens, class_token)
            both = torch.cat((class_token, tokens), dim=1)
        return model.forward_head(model.norm(both))
