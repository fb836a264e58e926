"""Building models: timm's by name, and small ones of our own for the demo and for CIFAR-10.

Our own are timm's VisionTransformer and MlpMixer under its registry, so they are built, listed and loaded like timm's.
They have no pretrained weights.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import ModelError
from ls_edge.training.models.view import BlockView

_data: Any = timm.data  # it re-exports its functions without saying so


def _settings(size: int, first: str = "patch_embed.proj") -> dict[str, Any]:
    half = (0.5, 0.5, 0.5)
    return {
        "num_classes": 10, "input_size": (3, size, size), "fixed_input_size": True, "crop_pct": 1.0,
        "interpolation": "bicubic", "mean": half, "std": half, "first_conv": first, "classifier": "head",
    }  # fmt: skip


default_cfgs = generate_default_cfgs(
    {
        "vit_digits.untrained": _settings(16),
        "vit_cifar.untrained": _settings(32),
        "mixer_cifar.untrained": _settings(32, "stem.proj"),
    }
)


@register_model
def vit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """The demo's: 8 blocks of width 64 on 16x16 pixels in 16 patches; 0.4 million parameters."""
    defaults = {
        "img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0,
        "class_token": False, "global_pool": "avg", "num_classes": 10, "init_values": 0.5,
    }  # fmt: skip
    return _build("vit_digits", pretrained, {**defaults, **kwargs})


@register_model
def vit_cifar(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """For 32x32 pixels: 8 blocks of width 192 on 16 tokens behind a convolutional stem; 2.9 million parameters."""
    defaults = {
        "img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 8, "num_heads": 6, "mlp_ratio": 2.0,
        "class_token": False, "global_pool": "avg", "num_classes": 10, "embed_layer": ConvolutionalStem,
    }  # fmt: skip
    return _build("vit_cifar", pretrained, {**defaults, **kwargs})


@register_model
def mixer_cifar(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    """For 32x32 pixels: 8 blocks of width 128 on 64 tokens of plain patches; 1.2 million parameters.

    timm's builders of MLP-Mixers fix width, depth and patches, so that none of them can be made small.
    """
    defaults = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "num_blocks": 8, "num_classes": 10}
    model: MlpMixer = build_model_with_cfg(MlpMixer, "mixer_cifar", pretrained, **{**defaults, **kwargs})
    return model


class ConvolutionalStem(nn.Module):
    """Four 3x3 convolutions, a token for each 8x8 pixels: ``[B, 3, H, W]`` to ``[B, H*W/64, D]``.

    In place of the usual single convolution with the stride of a patch, with which small vision transformers learn
    much more slowly from few images ("Early Convolutions Help Transformers See Better", arXiv 2106.14881, section 4).
    """

    def __init__(
        self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, bias: bool = True, **_: Any
    ) -> None:
        """The arguments are those of timm's ``PatchEmbed``; ``patch_size`` is 8. ``embed_dim`` sets all widths."""
        super().__init__()
        if patch_size != 8 or img_size % 8:
            raise TypeError(f"its stem makes a token of 8x8 pixels, not of {patch_size} of {img_size}")
        self.img_size, self.patch_size = (img_size, img_size), (8, 8)
        self.grid_size = (img_size // 8, img_size // 8)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        layers: list[nn.Module] = []
        before = in_chans
        for width, stride in ((embed_dim // 3, 2), (embed_dim * 2 // 3, 2), (embed_dim * 2 // 3, 1), (embed_dim, 2)):
            layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        self.body = nn.Sequential(*layers)
        self.proj = nn.Conv2d(embed_dim, embed_dim, 1, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens ``[B, N, D]``."""
        tokens: Tensor = self.proj(self.body(images))
        return torch.flatten(tokens, 2).transpose(1, 2)


def _build(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> VisionTransformer:
    model: VisionTransformer = build_model_with_cfg(VisionTransformer, variant, pretrained, **kwargs)
    for module in model.modules():
        if isinstance(module, nn.Linear):  # timm's fixed deviation of 0.02 is far too little for narrow ones
            nn.init.xavier_uniform_(module.weight)
    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=0.2)
    if isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight, std=0.01)
    return model


OWN = ("vit_digits", "vit_cifar", "mixer_cifar")


def create(name: str, *, pretrained: bool = False, **args: Any) -> nn.Module:
    """Call timm's ``create_model``, with one-line errors; raises :class:`ModelError`."""
    if not timm.is_model(name.split(".")[0]) or name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        near = difflib.get_close_matches(name, [*OWN, *timm.list_models()], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists them all"
        raise ModelError(f"unknown model {name!r}; {hint}")
    drawn = [key for key in ("rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords") if args.get(key)]
    if drawn:
        raise ModelError(
            f"{name} with {drawn[0]} {args[drawn[0]]} draws rotary coordinates once for all blocks, and blocks run by "
            "themselves here; leave it out"
        )
    offline = ""
    try:
        with contextlib.ExitStack() as stack:
            if pretrained:
                offline = stack.enter_context(quiet_hub())
            model = timm.create_model(name, pretrained=pretrained, **args)
    except TypeError as error:
        raise ModelError(f"{name} cannot be built with {args}: {error}; leave that setting out") from None
    except Exception as error:  # noqa: BLE001 - the hub and the builders raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if pretrained:
            if offline and type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
                reason = f"{offline} cannot be reached, and they are not in its cache"
            raise ModelError(
                f"timm's pretrained weights of {name} could not be had: {reason}; give a file with --init, or leave "
                "--pretrained out"
            ) from None
        raise ModelError(f"{name} cannot be built with {args}: {reason}; change --img-size or the model") from None
    assert isinstance(model, nn.Module)
    return model


@contextlib.contextmanager
def quiet_hub() -> Iterator[str]:
    """Keep Hugging Face's hub from logging each of its attempts, and from any where its host has no address.

    Gives the name of that host then, else "". Weights in the cache load in either case.
    """
    constants: Any = importlib.import_module("huggingface_hub.constants")
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    missing = "" if urllib.request.getproxies() or _has_address(host) else host
    with contextlib.ExitStack() as stack:
        for name in ("huggingface_hub", "timm"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        if missing:
            stack.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
            constants.HF_HUB_OFFLINE = True
        yield missing


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def build(name: str, args: dict[str, Any], kept: Sequence[int] | None = None) -> BlockView:
    """An untrained model as a view, with the blocks ``kept`` of it; raises :class:`ModelError`."""
    view = BlockView.of(create(name, **args))
    if kept is not None and list(kept) != list(range(view.num_blocks)):
        bad = next((index for index in kept if not 0 <= index < view.num_blocks), None)
        if bad is not None or not kept:
            raise ModelError(f"{name} has blocks 0 to {view.num_blocks - 1}, so {list(kept)} cannot be kept")
        view.keep_blocks(kept)
    return view


def image_spec_of(view: BlockView) -> ImageSpec:
    """Evaluation settings that timm has for a model, at the size that it was built for."""
    cfg = _data.resolve_model_data_config(view.model)
    interpolation = str(cfg["interpolation"])
    mean, std = tuple(map(float, cfg["mean"])), tuple(map(float, cfg["std"]))
    assert len(mean) == len(std) == 3
    return ImageSpec(
        size=view.image_size,
        mean=mean,
        std=std,
        interpolation=interpolation if interpolation in {"nearest", "bilinear", "bicubic", "lanczos"} else "bicubic",
        crop_pct=float(cfg["crop_pct"]),
    )
