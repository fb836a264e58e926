"""MLP-Mixer, ResMLP, and gMLP, which have no prefix tokens and blocks that mix a fixed number of tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.models import mlp_mixer
from torch import Tensor

from ls_edge.training.models.adapters.vision_transformer import BranchTable, VisionTransformerFamily
from ls_edge.training.models.slots import Branch


class MixerFamily(VisionTransformerFamily):
    """timm's ``MlpMixer``."""

    members = "MLP-Mixer, ResMLP, gMLP"
    timm_class = mlp_mixer.MlpMixer
    patch_embedding = "stem"
    residual_branches: ClassVar[BranchTable] = {
        mlp_mixer.MixerBlock: (Branch("norm1", "mlp_tokens", channels_first=True), Branch("norm2", "mlp_channels")),
        mlp_mixer.ResBlock: (
            Branch("norm1", "linear_tokens", "ls1", channels_first=True),
            Branch("norm2", "mlp_channels", "ls2"),
        ),
        mlp_mixer.SpatialGatingBlock: (Branch("norm", "mlp_channels"),),
    }

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Return the patch embedding."""
        return model.stem(images)
