"""Interface of an engine, which runs one part of a bundle on one device, and checks of its inputs.

Only one thread at a time may use an engine, and engines that share buffers belong to the same thread. Engines that were
opened separately are independent. ``ls_edge.engines.opening`` opens engines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ls_edge.core.bundle import Manifest, OpenPart
from ls_edge.core.errors import EngineError


@dataclass(frozen=True)
class Tensor:
    """Name, type, and shape of an input or output."""

    name: str
    dtype: str
    rest: tuple[int, ...]
    below: int | None = field(default=None, compare=False)
    """Exclusive upper limit of the values, which must not be negative; None without limits."""

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy dtype; faster to compare than a name."""
        return np.dtype(self.dtype)

    def shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape at a batch size."""
        return (batch, *self.rest)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join(map(str, ('B', *self.rest)))}]"


@dataclass(frozen=True)
class Signature:
    """Inputs and output of a part according to the manifest."""

    inputs: tuple[Tensor, ...]
    output: Tensor


def signature_of(manifest: Manifest, part: str) -> Signature:
    """Return the signature of ``stem``, ``head``, ``whole``, or a block such as ``block 3``."""
    height, width = manifest.image.size
    images = Tensor("images", "float32", (3, height, width))
    rest = (manifest.tokens.count, manifest.tokens.dim)
    tokens = Tensor("tokens", manifest.tokens.dtype, rest)
    logits = Tensor("logits", "float32", (len(manifest.classes),))
    if part == "stem":
        return Signature((images,), tokens)
    if part == "head":
        return Signature((tokens,), logits)
    if part == "whole":
        return Signature((images,), logits)
    slot = (Tensor("slot", "int64", (), len(manifest.parts.blocks)),) if manifest.needs_slot else ()
    return Signature((tokens, *slot), Tensor("tokens_out", manifest.tokens.dtype, rest))


class Engine(Protocol):
    """One part on one device, used by one thread at a time."""

    part: str
    """Name of the part, such as ``stem`` or ``block 3``."""
    kind: str
    """Library: ``onnx`` or ``tensorrt``."""
    provider: str
    """Provider that runs the part, such as ``CPUExecutionProvider``."""
    signature: Signature

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the part; return a new array that the caller owns."""

    def close(self) -> None:
        """Free memory and threads."""


def warm_up(engine: Engine, batch: int = 1) -> float:
    """Run an engine twice on zeros, which allocates its memory; return the milliseconds of the second run."""
    inputs = {t.name: np.zeros(t.shape(batch), t.dtype) for t in engine.signature.inputs}
    engine.run(inputs)
    start = time.perf_counter()
    engine.run(inputs)
    return (time.perf_counter() - start) * 1e3


def check_inputs(part: str, signature: Signature, inputs: Mapping[str, np.ndarray]) -> int:
    """Return the batch size; raise :class:`EngineError` if a name, type, shape or slot differs from the manifest."""
    wanted = signature.inputs
    batch = -1
    for tensor in wanted:
        array = inputs.get(tensor.name)
        if array is None or len(inputs) != len(wanted):
            raise EngineError(f"{part} takes {', '.join(t.name for t in wanted)}, received {', '.join(inputs)}")
        if batch < 0:
            batch = array.shape[0] if array.ndim else 0
        if array.dtype != tensor.numpy_dtype or array.shape != (batch, *tensor.rest) or batch < 1:
            found = f"{array.dtype} {list(array.shape)}"
            raise EngineError(f"{part}: {tensor.name} is {found}, must be {tensor}, B at least 1")
        if tensor.below is not None and not 0 <= int(array.min()) <= int(array.max()) < tensor.below:
            raise EngineError(
                f"{part}: {tensor.name} is {array.min()} to {array.max()}, must be 0 to {tensor.below - 1}; the file "
                "would count a negative one from the end"
            )
    return batch


# Tag of the key, its length, and "location", each in any encoding that protobuf accepts. Its C++ library, which engine
# libraries use, ignores all but the lowest 32 bits of a tag.
_EXTERNAL_DATA = re.compile(rb"(?:\x0a|\x8a\x80*[\x00\x10\x20\x30\x40\x50\x60\x70])(?:\x08|\x88\x80*\x00)location")
"""Entry of a ``TensorProto`` with the name of the file of its weights."""


def contains(model: bytes | OpenPart, pattern: re.Pattern[bytes]) -> bool:
    """Return whether a pattern of at most 64 bytes occurs in an ONNX file."""
    return model.contains(pattern) if isinstance(model, OpenPart) else pattern.search(model) is not None


def refuse_weights_elsewhere(model: bytes | OpenPart, part: str) -> None:
    """Raise :class:`EngineError` if a part refers to weights in another file, which an engine library would read.

    The check searches the bytes before any library parses them and does not need the package ``onnx``.
    """
    if contains(model, re.compile(b"location")) and contains(model, _EXTERNAL_DATA):  # the first is 15 times as fast
        raise EngineError(f"{part} does not load: its weights are in another file; export it again")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
