"""Values that are opened when they are used, such as the engines of a model that memory need not hold twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")
KEPT_BYTES = 1280 << 20
"""Bytes of all values that stay open: those of a ViT-L in float32, whose parts are opened once."""


class OnDemand(Mapping[int, V]):
    """Values by part; its keys are those that are open.

    Parts are used in a cycle, so the newest value makes room for another one, and the oldest stay.
    """

    def __init__(self, open_part: Callable[[int], V], size_of: Callable[[int], int]) -> None:
        self._open_part, self._size_of = open_part, size_of
        self._values: dict[int, V] = {}

    def __getitem__(self, part: int) -> V:
        """Return the value of a part, and open it if needed."""
        if part not in self._values:
            while self._values and sum(map(self._size_of, (*self._values, part))) > KEPT_BYTES:
                self._values.popitem()
            self._values[part] = self._open_part(part)
        return self._values[part]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the parts that are open."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of parts that are open."""
        return len(self._values)
