"""timm's ``VisionTransformer``, and the base class of all adapters.

Adapters call timm's own methods wherever possible, so that a view in trained order computes the same bits as timm's
forward. Inputs of a block other than the tokens (rotary tables, a position bias that all blocks share) belong to the
block in every order. Adapters have no state, so a view can be copied and moved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from timm.models import vision_transformer
from torch import Tensor, nn

from ls_edge.core.errors import ModelError
from ls_edge.training.models.slots import Branch

BranchTable = dict[type[nn.Module], tuple[Branch, ...]]
"""Residual branches by class of block, for blocks with a norm before each branch."""
ATTENTION_AND_MLP = (Branch("norm1", "attn", "ls1.gamma"), Branch("norm2", "mlp", "ls2.gamma"))
WITH_GAMMAS = (Branch("norm1", "attn", "gamma_1"), Branch("norm2", "mlp", "gamma_2"))
"""Branches of families that keep their scales in parameters of the block."""


class VisionTransformerFamily:
    """timm's ``VisionTransformer`` and its subclasses, including distilled DeiT with its two tokens and two heads."""

    members = "ViT, DeiT, distilled DeiT, DeiT3, DINOv2, SigLIP"
    """Names of models that users may look for."""
    timm_class: type[nn.Module] = vision_transformer.VisionTransformer
    patch_embedding = "patch_embed"
    residual_branches: ClassVar[BranchTable] = {vision_transformer.Block: ATTENTION_AND_MLP}

    def prepare(self, model: Any) -> None:
        """Build tensors that blocks share; raise :class:`ModelError` for settings that views do not support."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """Return the blocks in trained order, which take tokens ``[B, N, D]`` and their :meth:`block_inputs`."""
        return list(model.blocks)

    def block_inputs(self, model: Any, index: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the inputs of block ``index`` other than the tokens, by keyword."""
        return {}

    def branches(self, model: Any) -> tuple[Branch, ...]:
        """Return the residual branches of a block; raise :class:`ModelError` unless each begins with a norm."""
        kind = type(self.blocks(model)[0])
        if kind not in self.residual_branches:
            fits = ", ".join(sorted({known.__name__ for known in self.residual_branches}))
            raise ModelError(
                f"method shared: a {kind.__name__} of {type(model).__name__} does not have a norm before each residual "
                f"branch, as {fits} does; use another method or model"
            )
        return self.residual_branches[kind]

    def keep(self, model: Any, indices: Sequence[int]) -> None:
        """Keep only these blocks, in place."""
        blocks = self.blocks(model)
        kept = [blocks[i] for i in indices]
        model.blocks = nn.Sequential(*kept) if isinstance(model.blocks, nn.Sequential) else nn.ModuleList(kept)

    def image_size(self, model: Any) -> tuple[int, int]:
        """Return the height and width of the images in pixels."""
        size = getattr(getattr(model, self.patch_embedding), "img_size", None)
        height, width = model.default_cfg["input_size"][-2:] if size is None else size
        return int(height), int(width)

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Return tokens ``[B, N, D]`` of images ``[B, 3, H, W]``, including any norm before the blocks."""
        return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))

    def head(self, model: Any, tokens: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of tokens ``[B, N, D]``: final norm, pooling, and classifier."""
        return model.forward_head(model.norm(tokens))

    def classifier(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the parameters whose shape depends on the number of classes."""
        return frozenset(name for name in model.state_dict() if name.split(".")[0] in ("head", "head_dist"))

    def fit_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint with the names of ``model`` and, if timm supports it, positions resampled to its grid."""
        timm_module: Any = sys.modules[self.timm_class.__module__]
        return timm_module.checkpoint_filter_fn(state, model)
