"""Values that are opened when they are used, such as the engines of a model that memory need not hold twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ls_edge.device import hardware

V = TypeVar("V")
KEPT_BYTES = 1280 << 20
"""Bytes of all values that stay open, unless less is free: those of a ViT-L in float32, whose parts are opened once."""


class OnDemand(Mapping[int, V]):
    """Values by part; its keys are those that are open.

    Parts are used in a cycle, so the newest value makes room for another one, and the oldest stay.
    """

    def __init__(
        self, open_part: Callable[[int], V], size_of: Callable[[int], int], owners: Sequence[int] = ()
    ) -> None:
        """Prepare; ``owners`` has the block whose value each block uses."""
        self._open_part, self._size_of, self._owners = open_part, size_of, dict(enumerate(owners))
        self._values: dict[int, V] = {}
        memory = hardware.memory_gib()
        self._most = KEPT_BYTES if memory is None else min(KEPT_BYTES, memory[1] * 2**29)  # half of what is free

    def __getitem__(self, part: int) -> V:
        """Return the value of a part, and open it if needed."""
        part = self._owners.get(part, part)
        if part not in self._values:
            while self._values and sum(map(self._size_of, (*self._values, part))) > self._most:
                self._values.popitem()
            self._values[part] = self._open_part(part)
        return self._values[part]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the parts that are open."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of parts that are open."""
        return len(self._values)
