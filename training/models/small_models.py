"""Models by their names in timm, including three small models of this project for the demo and for CIFAR-10.

The small models are timm's VisionTransformer and MlpMixer in timm's registry, so timm builds, lists, and loads them
like its own. They have no pretrained weights.
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

import msgspec
import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._hub import load_model_config_from_hf
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import ModelError
from ls_edge.core.files import HUB_PREFIX, ask_hub, is_hub
from ls_edge.training.models.families import families
from ls_edge.training.models.view import BlockView

_data: Any = timm.data  # it re-exports its functions without declaring them


def _settings(size: int, first: str = "patch_embed.proj") -> dict[str, Any]:
    half = (0.5, 0.5, 0.5)
    return {
        "num_classes": 10,
        "input_size": (3, size, size),
        "fixed_input_size": True,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": half,
        "std": half,
        "first_conv": first,
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs(
    {
        "vit_digits.untrained": _settings(16),
        "vit_cifar.untrained": _settings(32),
        "mixer_cifar.untrained": _settings(32, "stem.proj"),
    }
)
SMALL_MODELS = [name.split(".")[0] for name in default_cfgs]


@register_model
def vit_digits(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Return the model of the demo for 16x16 pixels: 8 blocks of width 64 on 16 tokens, 0.4 million parameters."""
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "num_heads": 4, "init_values": 0.5}
    return _build("vit_digits", pretrained, {**shape, **kwargs})


@register_model
def vit_cifar(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Return a model for 32x32 pixels: 8 blocks of width 192 on 16 tokens, 2.9 million parameters."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "num_heads": 6, "embed_layer": ConvolutionalStem}
    return _build("vit_cifar", pretrained, {**shape, **kwargs})


@register_model
def mixer_cifar(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    """Return a Mixer for 32x32 pixels: 8 blocks of width 128 on 64 tokens, 1.2 million parameters.

    timm's builders of MLP-Mixers fix width, depth, and patches, so they cannot build a small one.
    """
    defaults = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "num_blocks": 8, "num_classes": 10}
    return build_model_with_cfg(MlpMixer, "mixer_cifar", pretrained, **{**defaults, **kwargs})


class ConvolutionalStem(nn.Module):
    """Four 3x3 convolutions with one token per 8x8 pixels: ``[B, 3, H, W]`` to ``[B, H*W/64, D]``.

    Replaces the usual single convolution, with which small vision transformers learn much more slowly from few images
    ("Early Convolutions Help Transformers See Better", arXiv 2106.14881, section 4).
    """

    def __init__(
        self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, bias: bool = True, **_: Any
    ) -> None:
        """Take the arguments of timm's ``PatchEmbed``; ``patch_size`` must be 8, ``embed_dim`` sets all widths."""
        super().__init__()
        if patch_size != 8 or img_size % 8:
            raise TypeError(f"the stem makes one token per 8x8 pixels, not per {patch_size} of {img_size}")
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
    common = {"depth": 8, "mlp_ratio": 2.0, "class_token": False, "global_pool": "avg", "num_classes": 10}
    model: VisionTransformer = build_model_with_cfg(VisionTransformer, variant, pretrained, **{**common, **kwargs})
    for module in model.modules():
        if isinstance(module, nn.Linear):  # timm's fixed standard deviation of 0.02 is too small for narrow layers
            nn.init.xavier_uniform_(module.weight)
    if isinstance(model.pos_embed, nn.Parameter):
        nn.init.normal_(model.pos_embed, std=0.2)
    if isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight, std=0.01)
    return model


def create(name: str, *, pretrained: bool = False, **args: Any) -> nn.Module:
    """Call timm's ``create_model``; raise :class:`ModelError` with one line if that fails."""
    families()  # packages with families may register models with timm
    if not is_hub(name) and (not timm.is_model(name.split(".")[0]) or name.startswith(("hf_hub:", "local-dir:"))):
        near = difflib.get_close_matches(name, [*SMALL_MODELS, *timm.list_models()], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists them all"
        raise ModelError(f"unknown model {name!r}; {hint}")
    drawn = [key for key in ("rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords") if args.get(key)]
    if drawn:
        raise ModelError(
            f"{name} with {drawn[0]} {args[drawn[0]]} draws rotary coordinates once for all blocks, but blocks run "
            "separately here; leave it out"
        )
    try:
        with _quiet_hub() if pretrained else contextlib.nullcontext("") as unreachable:
            model = timm.create_model(name, pretrained=pretrained, **args)
    except TypeError as error:
        raise ModelError(f"{name} cannot be built with {args}: {error}; leave that setting out") from None
    except Exception as error:  # noqa: BLE001 - the hub and the builders raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not pretrained:
            raise ModelError(
                f"{name} cannot be built with {args}: {reason}; change model.args.img_size or the model"
            ) from None
        if unreachable and type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            reason = f"{unreachable} cannot be reached, and the weights are not in its cache"
        raise ModelError(
            f"cannot get timm's pretrained weights of {name}: {reason}; give a file with --init, or leave --pretrained "
            "out"
        ) from None
    assert isinstance(model, nn.Module)
    return model


def architecture(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name in timm's registry and the arguments of a model, which may be on the Hub."""
    if not is_hub(name):
        return name, {}
    cfg, model, args = ask_hub(name, lambda: load_model_config_from_hf(name.removeprefix(HUB_PREFIX)))
    size = {"img_size": cfg["input_size"][-1]} if cfg.get("fixed_input_size") and "input_size" in cfg else {}
    return model, {**size, **args}


@contextlib.contextmanager
def _quiet_hub() -> Iterator[str]:
    """Silence the Hugging Face Hub; if its host cannot be resolved, yield the host and prevent retries.

    Cached weights load in both cases.
    """
    constants: Any = importlib.import_module("huggingface_hub.constants")
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    reachable = bool(urllib.request.getproxies())
    if not reachable:
        with contextlib.suppress(OSError):
            reachable = bool(socket.getaddrinfo(host, 443))
    with contextlib.ExitStack() as stack:
        for name in ("huggingface_hub", "timm"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        if not reachable:
            stack.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
            constants.HF_HUB_OFFLINE = True
        yield "" if reachable else host


@contextlib.contextmanager
def _without_values(size: int | None) -> Iterator[None]:
    """Create parameters without memory and initial values, except for those with a dimension of ``size``."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and size not in parameter.shape:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(name: str, args: dict[str, Any], kept: Sequence[int] | None = None, *, empty: bool = False) -> BlockView:
    """Return an untrained model with the blocks ``kept``, by default all; raise :class:`ModelError`.

    Only the classifier of an ``empty`` one has values; :meth:`BlockView.load_weights` gives it the others.
    """
    try:
        with _without_values(args.get("num_classes")) if empty else contextlib.nullcontext():
            view = BlockView(create(name, **args))
    except ModelError:
        if not empty:
            raise
        return build(name, args, kept)  # hybrids run their convolutions while they are built
    if kept is not None and list(kept) != list(range(view.num_blocks)):
        if not kept or not all(0 <= index < view.num_blocks for index in kept):
            raise ModelError(f"{name} has blocks 0 to {view.num_blocks - 1}, so {list(kept)} cannot be kept")
        view.keep_blocks(kept)
    return view


def image_spec_of(view: BlockView) -> ImageSpec:
    """Return timm's evaluation preprocessing of a model, at the image size for which it was built."""
    cfg = _data.resolve_model_data_config(view.model)
    interpolation = cfg["interpolation"]
    (r, g, b), (sr, sg, sb) = cfg["mean"], cfg["std"]
    return ImageSpec(
        size=view.image_size,
        mean=(float(r), float(g), float(b)),
        std=(float(sr), float(sg), float(sb)),
        interpolation=interpolation if interpolation in {"nearest", "bilinear", "bicubic", "lanczos"} else "bicubic",
        crop_pct=float(cfg["crop_pct"]),
        crop_mode=cfg["crop_mode"] if cfg.get("crop_mode") in ("squash", "border") else msgspec.UNSET,
    )
