"""timm's ``VisionTransformer``, and the base of all adapters.

An adapter calls timm's own methods wherever timm has them, so that in trained order a view computes bit by bit what
timm's forward computes. Inputs of a block besides the tokens (rotary tables, a position bias that all blocks share)
belong to the block and stay with it in every order. Adapters have no state, so that a view can be copied and moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from timm.models import vision_transformer
from torch import Tensor, nn

from ls_edge.core.errors import ModelError
from ls_edge.training.methods.slots import Branch

BranchTable = dict[type[nn.Module], tuple[Branch, ...]]
"""The residual branches of each class of blocks that has a norm ahead of every branch."""
ATTENTION_AND_MLP = (Branch("norm1", "attn"), Branch("norm2", "mlp"))


class VisionTransformerFamily:
    """timm's ``VisionTransformer`` and its subclasses: prefix tokens, position embedding and pooling are timm's own.

    Distilled DeiT among them: its two prefix tokens and the mean of its two heads are in methods that it overrides.
    """

    name = "VisionTransformer"
    members = "ViT, DeiT, distilled DeiT, DeiT3, DINOv2, SigLIP"
    """The models by the names that users look for."""
    timm_class: type[nn.Module] = vision_transformer.VisionTransformer
    timm_module: Any = vision_transformer
    """Has the ``checkpoint_filter_fn`` of the family."""
    patch_embedding = "patch_embed"
    classifiers: tuple[str, ...] = ("head", "head_dist")
    residual_branches: ClassVar[BranchTable] = {vision_transformer.Block: ATTENTION_AND_MLP}

    def matches(self, model: nn.Module) -> bool:
        """Whether ``model`` belongs to this family."""
        return isinstance(model, self.timm_class)

    def prepare(self, model: Any) -> None:
        """Prepare once what the blocks share; raises :class:`ModelError` for settings that no view can have."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The blocks in trained order, each called with tokens ``[B, N, D]`` and its :meth:`block_inputs`."""
        return list(model.blocks)

    def block_inputs(self, model: Any, index: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Inputs of block ``index`` besides the tokens, by keyword."""
        return {}

    def branches(self, model: Any) -> tuple[Branch, ...]:
        """The residual branches of a block; raises :class:`ModelError` where its norms do not stand ahead of them."""
        kind = type(self.blocks(model)[0])
        if kind not in self.residual_branches:
            fits = ", ".join(sorted({known.__name__ for known in self.residual_branches}))
            raise ModelError(
                f"method shared: a {kind.__name__} of {type(model).__name__} is not made of a norm ahead of each "
                f"residual branch, as {fits} is; use another method or model"
            )
        return self.residual_branches[kind]

    def keep(self, model: Any, indices: Sequence[int]) -> None:
        """Drop all blocks but these, in place."""
        blocks = self.blocks(model)
        kept = [blocks[i] for i in indices]
        model.blocks = nn.Sequential(*kept) if isinstance(model.blocks, nn.Sequential) else nn.ModuleList(kept)

    def image_size(self, model: Any) -> tuple[int, int]:
        """Height and width of the images that the stem takes, in pixels."""
        size = getattr(getattr(model, self.patch_embedding), "img_size", None)
        height, width = model.default_cfg["input_size"][-2:] if size is None else size
        return int(height), int(width)

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Images ``[B, 3, H, W]`` to tokens ``[B, N, D]``, up to the norm before the blocks if there is one."""
        tokens: Tensor = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        return tokens

    def head(self, model: Any, tokens: Tensor) -> Tensor:
        """Tokens ``[B, N, D]`` to logits ``[B, C]``: final norm, pooling and classifier."""
        logits: Tensor = model.forward_head(model.norm(tokens))
        return logits

    def classifier(self, model: nn.Module) -> frozenset[str]:
        """Names of the parameters whose shape follows the number of classes."""
        return frozenset(name for name in model.state_dict() if name.split(".")[0] in self.classifiers)

    def fit_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors under the names of ``model``; positions are resampled to its grid if timm can."""
        converted: dict[str, Tensor] = self.timm_module.checkpoint_filter_fn(state, model)
        return converted
