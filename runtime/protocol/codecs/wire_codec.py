"""Base class of codecs, which write tokens on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.float32]
"""``[1, N, D]`` float32, C-contiguous."""


class WireCodec(ABC):
    """Format of tokens; ``CODECS`` has one instance of each subclass. All numbers are little-endian."""

    name: ClassVar[str]
    replay_tolerance: ClassVar[float]
    """Largest difference between the logits of an answer and of its replay, relative to the largest logit
    (guarantee R2). The error grows with the number of hops; these are the tested limits."""
    value_bytes: ClassVar[int]

    def wire_bytes(self, count: int, dim: int) -> int:
        """Return the length in bytes of ``count`` tokens of ``dim`` values."""
        return count * dim * self.value_bytes

    @abstractmethod
    def encode(self, tokens: Tokens) -> memoryview:
        """Encode tokens ``[1, N, D]``."""

    @abstractmethod
    def decode(self, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
        """Decode tokens ``[1, count, dim]`` from a frame of the right length; NaN and infinity pass."""
