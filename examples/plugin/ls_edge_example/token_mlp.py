"""Family of ``token_mlp``: a small model of patches and MLPs, which timm builds by its name."""

from timm.layers import PatchEmbed
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from ls_edge.training.models.adapters.vision_transformer import VisionTransformerFamily

default_cfgs = generate_default_cfgs(
    {
        "token_mlp.untrained": {
            "num_classes": 10,
            "input_size": (3, 16, 16),
            "fixed_input_size": True,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
    }
)


class Block(nn.Module):
    """Mix the tokens, then their channels."""

    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Linear(tokens, tokens)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        """Return tokens ``[B, N, D]``."""
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class TokenMlp(nn.Module):
    """Patches, equal blocks, the mean of the tokens, and a classifier."""

    def __init__(self, img_size=16, in_chans=3, num_classes=10, embed_dim=48, depth=6):
        super().__init__()
        self.num_classes = num_classes
        self.patch_embed = PatchEmbed(img_size, 4, in_chans, embed_dim)
        self.blocks = nn.Sequential(*(Block(self.patch_embed.num_patches, embed_dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(embed_dim), nn.Linear(embed_dim, num_classes)

    def forward_head(self, x):
        """Return logits ``[B, C]``."""
        return self.head(x.mean(dim=1))

    def forward(self, images):
        """Return logits of images in trained order."""
        return self.forward_head(self.norm(self.blocks(self.patch_embed(images))))


@register_model
def token_mlp(pretrained=False, **settings):
    """Build the model for 16x16 pixels."""
    return build_model_with_cfg(TokenMlp, "token_mlp", pretrained, **settings)


class TokenMlpFamily(VisionTransformerFamily):
    """What ls-edge needs to know about :class:`TokenMlp`: stem, blocks and head; the base class has the rest."""

    members = "token_mlp"
    timm_class = TokenMlp

    def stem(self, model, images):
        """Return tokens ``[B, N, D]`` of images ``[B, 3, H, W]``."""
        return model.patch_embed(images)

    def fit_state(self, model, state):
        """Return a checkpoint under the names of the model: it has them already."""
        return state
