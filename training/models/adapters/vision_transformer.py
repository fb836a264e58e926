"""One adapter for each family of timm models: what its stem, blocks and head are.

Each calls timm's own methods wherever timm has them, so that in trained order the view computes bit by bit what
timm's forward computes. What a block is given besides the tokens (rotary tables, a position bias that all blocks
share) belongs to the block and stays with it in every order.

Adapters have no state, so a view can be copied and moved. Left out: augmentation of rotary coordinates and of
patches while training (timm draws them once an image for all blocks, a block by itself cannot).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models import beit, cait, eva, mlp_mixer, vision_transformer
from torch import Tensor, nn

from ls_edge.errors import ModelError

TABLE = "rope_table"
"""Buffer in which a rotary table that is not learned is kept; not part of checkpoints."""


class VisionTransformerFamily:
    """timm's ``VisionTransformer`` and its subclasses: prefix tokens, position embedding and pooling are timm's own.

    Distilled DeiT among them: its two prefix tokens and the mean of its two heads are in methods that it overrides.
    """

    name = "VisionTransformer"
    members = "ViT, DeiT, distilled DeiT, DeiT3, DINOv2, SigLIP"
    _kind: type[nn.Module] = vision_transformer.VisionTransformer
    _timm: Any = vision_transformer
    _embed = "patch_embed"
    _heads: tuple[str, ...] = ("head", "head_dist")

    def fits(self, model: nn.Module) -> bool:
        """Whether it is of timm's class or a subclass."""
        return isinstance(model, self._kind)

    def prepare(self, model: nn.Module) -> None:
        """Nothing to do."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return list(_any(model).blocks)

    def extras(self, model: nn.Module, index: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Tokens are all that a block needs."""
        return {}

    def keep(self, model: nn.Module, indices: Sequence[int]) -> None:
        """Keep these blocks, in a container of timm's type."""
        blocks = self.blocks(model)
        kept = [blocks[i] for i in indices]
        was = _any(model).blocks
        _any(model).blocks = nn.Sequential(*kept) if isinstance(was, nn.Sequential) else nn.ModuleList(kept)

    def image_size(self, model: nn.Module) -> tuple[int, int]:
        """What the patch embedding was built for."""
        size = getattr(getattr(model, self._embed), "img_size", None)
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
        """The classifier's weight and bias; both of them in a distilled DeiT."""
        return frozenset(name for name in model.state_dict() if name.split(".")[0] in self._heads)

    def fit_state(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert as timm does for the family: other names, positions resampled to this grid where timm knows how."""
        converted: dict[str, Tensor] = self._timm.checkpoint_filter_fn(state, model)
        return converted


class CaitFamily(VisionTransformerFamily):
    """CaiT (arXiv 2103.17239): the patch blocks move; the class token and its attention blocks are the head's."""

    name = "Cait"
    members = "CaiT"
    _kind = cait.Cait
    _timm = cait
    _heads = ("head",)

    def stem(self, model: nn.Module, images: Tensor) -> Tensor:
        """Patches and their positions; there is no class token yet."""
        m = _any(model)
        tokens: Tensor = m.pos_drop(m.patch_embed(images) + m.pos_embed)
        return tokens

    def head(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Class attention over the patches, norm, pooling and classifier."""
        m = _any(model)
        if hasattr(m, "forward_cls"):
            both = m.forward_cls(tokens)
        else:  # timm up to 1.0.30 has it in forward_features only
            answer = m.cls_token.expand(tokens.shape[0], -1, -1)
            for block in m.blocks_token_only:
                answer = block(tokens, answer)
            both = torch.cat((answer, tokens), dim=1)
        logits: Tensor = m.forward_head(m.norm(both))
        return logits


class MixerFamily(VisionTransformerFamily):
    """MLP-Mixer, ResMLP and gMLP: no prefix tokens, and blocks that mix a fixed number of tokens."""

    name = "MlpMixer"
    members = "MLP-Mixer, ResMLP, gMLP"
    _kind = mlp_mixer.MlpMixer
    _timm = mlp_mixer
    _embed = "stem"
    _heads = ("head",)

    def stem(self, model: nn.Module, images: Tensor) -> Tensor:
        """Patch embedding."""
        tokens: Tensor = _any(model).stem(images)
        return tokens


class EvaFamily(VisionTransformerFamily):
    """EVA, EVA-02, DINOv3 and the rotary ViTs: a block has its rotary table, its own one where they are learned."""

    name = "Eva"
    members = "EVA, EVA-02, DINOv3, ViTs with rotary positions"
    _kind = eva.Eva
    _timm = eva
    _heads = ("head",)

    def prepare(self, model: nn.Module) -> None:
        """Build the table that all blocks share and switch off the augmentation of its coordinates.

        Raises :class:`ModelError` for what a block alone cannot draw.
        """
        m = _any(model)
        if m.rope is None:
            return
        if m.patch_drop is not None:
            raise ModelError(
                f"{type(model).__name__} with patch_drop_rate changes its rotary tables with every batch; leave "
                "patch_drop_rate out"
            )
        if getattr(m.rope, "aug_active", False):  # sapiens2 has it by default: training does without it
            m.rope.aug_active = False
            m.rope.shift_coords = m.rope.jitter_coords = m.rope.rescale_coords = None
        if not getattr(m, "rope_mixed", False):
            with torch.no_grad():
                model.register_buffer(TABLE, self._whole_table(model).clone(), persistent=False)

    def extras(self, model: nn.Module, index: int) -> dict[str, Tensor]:
        """The rotary table of block ``index``."""
        m = _any(model)
        if m.rope is None:
            return {}
        if getattr(m, "rope_mixed", False):
            return {"rope": self._whole_table(model)[index]}
        return {"rope": getattr(m, TABLE)}

    def _whole_table(self, model: nn.Module) -> Tensor:
        m = _any(model)
        fixed = not m.dynamic_img_size and hasattr(m.rope, "feat_shape")
        table: Tensor = m.rope.get_embed() if fixed else m.rope.get_embed(shape=list(m.patch_embed.grid_size))
        return table

    def keep(self, model: nn.Module, indices: Sequence[int]) -> None:
        """Keep these blocks, and what is learned of their rotary tables."""
        super().keep(model, indices)
        m = _any(model)
        if getattr(m, "rope_mixed", False):
            m.rope.freqs = nn.Parameter(m.rope.freqs.detach()[:, list(indices)].clone())
            m.rope.depth = len(indices)

    def stem(self, model: nn.Module, images: Tensor) -> Tensor:
        """Patch embedding, prefix tokens, position embedding if there is one."""
        m = _any(model)
        tokens: Tensor = m.norm_pre(m._pos_embed(m.patch_embed(images))[0])
        return tokens


class BeitFamily(VisionTransformerFamily):
    """BEiT: the relative position bias is a block's own, or one that all share."""

    name = "Beit"
    members = "BEiT, BEiT v2"
    _kind = beit.Beit
    _timm = beit
    _heads = ("head",)

    def extras(self, model: nn.Module, index: int) -> dict[str, Tensor]:  # noqa: ARG002
        """The bias that all blocks share, if there is one."""
        shared = _any(model).rel_pos_bias
        return {} if shared is None else {"shared_rel_pos_bias": shared()}

    def stem(self, model: nn.Module, images: Tensor) -> Tensor:
        """Patches, class token and, if there is one, the position embedding."""
        m = _any(model)
        patches = m.patch_embed(images)
        tokens: Tensor = torch.cat((m.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        if m.pos_embed is not None:
            tokens = tokens + m.pos_embed
        dropped: Tensor = m.pos_drop(tokens)
        return dropped


def _any(model: nn.Module) -> Any:
    return model
