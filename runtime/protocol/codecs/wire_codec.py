"""Base class of the codecs: how tokens are written on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.float32]
"""``[1, N, D]`` float32, C-contiguous."""


class WireCodec(ABC):
    """A way to write tokens; one instance of each subclass stands in ``CODECS``. All numbers are little-endian."""

    name: ClassVar[str]
    replay_tolerance: ClassVar[float]
    """Largest difference of logits, over the largest logit, between an answer and its replay (guarantee R2)."""
    value_bytes: ClassVar[int]

    def wire_bytes(self, count: int, dim: int) -> int:
        """Return the length in bytes of ``count`` tokens of ``dim`` values."""
        return count * dim * self.value_bytes

    @abstractmethod
    def encode(self, tokens: Tokens) -> memoryview:
        """Write tokens ``[1, N, D]``."""

    @abstractmethod
    def decode(self, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
        """Read tokens ``[1, count, dim]`` from a frame of the right length; values that are not finite pass."""
