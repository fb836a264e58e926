"""``vit_faulty``, a model under timm's registry that fails in chosen steps of a training."""

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer

default_cfgs = generate_default_cfgs({
    "vit_faulty.untrained": {
        "num_classes": 10, "input_size": (3, 16, 16), "fixed_input_size": True, "mean": (0.5,) * 3, "std": (0.5,) * 3,
        "first_conv": "patch_embed.proj", "classifier": "head",
    }
})  # fmt: skip


class Faulty(VisionTransformer):
    """A vision transformer whose logits pass through ``fault(step, logits)`` in training; steps count from 1."""

    steps = 0
    fault = None

    def forward_head(self, tokens, pre_logits=False):
        logits = super().forward_head(tokens, pre_logits)
        if self.training:
            Faulty.steps += 1
            logits = Faulty.fault(Faulty.steps, logits)
        return logits


@register_model
def vit_faulty(pretrained=False, **kwargs):
    shape = {"img_size": 16, "patch_size": 4, "class_token": False, "global_pool": "avg"}
    return build_model_with_cfg(Faulty, "vit_faulty", pretrained, **{**shape, **kwargs})
