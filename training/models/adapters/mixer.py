"""MLP-Mixer, ResMLP and gMLP: no prefix tokens, and blocks that mix a fixed number of tokens."""

from __future__ import annotations

from typing import Any

from timm.models import mlp_mixer
from torch import Tensor

from ls_edge.training.models.adapters.vision_transformer import VisionTransformerFamily


class MixerFamily(VisionTransformerFamily):
    """timm's ``MlpMixer``."""

    name = "MlpMixer"
    members = "MLP-Mixer, ResMLP, gMLP"
    timm_class = mlp_mixer.MlpMixer
    timm_module = mlp_mixer
    patch_embedding = "stem"
    classifiers = ("head",)

    def stem(self, model: Any, images: Tensor) -> Tensor:
        """Patch embedding."""
        tokens: Tensor = model.stem(images)
        return tokens
