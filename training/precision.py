"""Device, precision, threads, and random states of training.

Weights and optimizer state are always float32; autocast only lowers the precision of matrix products.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import ImageFile
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ls_edge.core.errors import UsageError
from ls_edge.device import hardware

_ATTENTION = [getattr(SDPBackend, f"{kind}_ATTENTION") for kind in ("FLASH", "EFFICIENT", "CUDNN")] + [SDPBackend.MATH]
"""Kernels that torch allows by default."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL_MODEL = 1_000_000
"""Number of parameters below which a batch is not enough work for several threads."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device; raise :class:`UsageError` if CUDA is requested but missing."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda: torch sees no CUDA device here; use --device cpu, or see 'ls-edge doctor'")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_precision(wanted: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device) -> torch.dtype:
    """Return the type of matrix products; raise :class:`UsageError` if the device does not support it."""
    if wanted == "fp16" and device.type == "cpu":
        raise UsageError("precision fp16 needs CUDA; use bf16 or fp32 on the CPU")
    if wanted == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if hardware.multiplies_bfloat16() else torch.float32
    return TYPES[wanted]


def choose_threads(wanted: int | None, model: nn.Module) -> int:
    """Return the number of CPU threads for torch, by default one for a small model."""
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL
    return wanted or (1 if small else torch.get_num_threads())


@contextlib.contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Autocast to ``dtype`` unless it is float32."""
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        yield
    # torch keeps converted weights until its outermost context ends, which is that of own_torch_state() or the caller's
    torch.clear_autocast_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error from torch means that the device or host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error)
        for text in ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


@contextlib.contextmanager
def plain_attention(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Disable fused attention on a CPU, where the backward pass of torch's fused kernel is slower."""
    switched = [m for m in model.modules() if getattr(m, "fused_attn", False) is True] if device.type == "cpu" else []
    for module in switched:
        module.__dict__["fused_attn"] = False
    try:
        yield
    finally:
        for module in switched:
            module.__dict__["fused_attn"] = True


@contextlib.contextmanager
def own_torch_state() -> Iterator[None]:
    """Undo the modes of the caller that would change results, and restore its random states and threads on exit.

    The modes are gradients, inference, autocast, the default type, the default device, the precision of matrix
    products, and the kernels of attention.
    """
    states = random.getstate(), np.random.get_state(), torch.get_num_threads(), torch.get_default_dtype()
    takes_truncated, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(_exact_products())
        stack.enter_context(sdpa_kernel(_ATTENTION))
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads(states[2])
            torch.set_default_dtype(states[3])
            ImageFile.LOAD_TRUNCATED_IMAGES = takes_truncated


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Compute products of float32 in float32, also those of convolutions, for which torch takes TF32 on a GPU."""
    mkldnn, cudnn = cast(Any, torch.backends.mkldnn), cast(Any, torch.backends.cudnn)  # untyped
    backends, precision = (torch.backends.cuda.matmul, mkldnn.matmul, mkldnn.conv, cudnn.conv, cudnn.rnn), "highest"
    values, allows = [backend.fp32_precision for backend in backends], cudnn.conv.fp32_precision == "tf32"
    with contextlib.suppress(RuntimeError):  # torch cannot say it if some backends were set alone
        precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # also that of matrix products
    cudnn.allow_tf32 = False
    mkldnn.conv.fp32_precision = cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    try:
        yield
    finally:
        cudnn.allow_tf32 = allows
        torch.set_float32_matmul_precision(precision)
        for backend, value in zip(backends, values, strict=True):
            backend.fp32_precision = value


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed``, and restore the random states on exit; those of GPUs do not change."""
    generator = torch.default_generator
    states = random.getstate(), np.random.get_state(), generator.get_state()
    random.seed(seed)
    np.random.seed(seed)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        generator.set_state(states[2])


def seed_epoch(seed: int, epoch: int) -> None:
    """Set all global random states, so that an epoch draws the same numbers after a resume."""
    mixed = random.Random((seed << 32) ^ epoch).getrandbits(32)
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
