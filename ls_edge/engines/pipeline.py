"""All parts of a bundle in one process: the baseline of a single device and the reference for distributed answers.

A :class:`Pipeline` has the methods of a torch model view, but on numpy arrays: ``stem``, ``block``, ``head``, and
``forward`` in any arrangement. Only one thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bundle import Bundle
from ls_edge.core.closing import Closing
from ls_edge.core.errors import UsageError
from ls_edge.core.logs import OnProgress, ignore_progress
from ls_edge.core.parts import HEAD, STEM, part_name
from ls_edge.engines.engine import Engine
from ls_edge.engines.executor import Executor
from ls_edge.engines.on_demand import OnDemand
from ls_edge.engines.opening import EngineChoice, EngineSettings, open_block_engines, open_engine

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Pipeline(Closing):
    """Stem, blocks and head of a bundle as engines; created by :meth:`open`."""

    def __init__(self, bundle: Bundle, engines: Mapping[int, Engine], choice: EngineChoice) -> None:
        self.bundle = bundle
        self.choice = choice
        self.provider = engines[STEM].provider
        self.owners = bundle.owners
        self.num_blocks = bundle.num_blocks
        self.executor = Executor(engines)

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        *,
        on_step: OnProgress = ignore_progress,
        **settings: Unpack[EngineSettings],
    ) -> Pipeline:
        """Open all parts except ``whole``; arguments and errors are those of :func:`open_block_engines`."""
        parts, choices = (STEM, *range(bundle.num_blocks), HEAD), list[EngineChoice]()
        engines = open_block_engines(bundle, parts, on_step=on_step, on_choice=choices.append, **settings)
        return cls(bundle, engines, choices[-1])

    @classmethod
    def on_demand(cls, bundle: Bundle) -> Pipeline:
        """Return all parts as engines of one thread on the CPU that are opened when they are used, for a few images."""
        engines = OnDemand(
            lambda part: open_engine(bundle, part_name(part), threads=1, provider="cpu"),
            lambda part: bundle.part(part_name(part)).bytes,
            bundle.owners,
        )
        found = cls(bundle, {STEM: engines[STEM]}, EngineChoice("onnx", engines[STEM].provider))
        found.executor = Executor({})
        found.executor.engines = engines
        return found

    def stem(self, images: np.ndarray) -> np.ndarray:
        """Convert normalized images float32 ``[B, 3, H, W]`` to tokens ``[B, N, D]``."""
        return self.executor.engines[STEM].run({"images": images})

    def block(self, index: int, tokens: np.ndarray, slot: int | np.ndarray = 0) -> np.ndarray:
        """Run a block on tokens ``[B, N, D]``; ``slot`` (int or int64 ``[B]``) only matters if the bundle needs it."""
        inputs = {"tokens": tokens}
        if self.bundle.manifest.needs_slot:
            inputs["slot"] = np.broadcast_to(np.asarray(slot, dtype=np.int64), tokens.shape[:1])
        return self.executor.engines[self._checked(index)].run(inputs)

    def head(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens ``[B, N, D]`` to logits float32 ``[B, C]``."""
        return self.executor.engines[HEAD].run({"tokens": tokens})

    def array_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens as an array float32 ``[B, N, D]``."""
        return tokens.astype(np.float32, copy=False)

    def forward(self, images: np.ndarray, arrangement: Arrangement | Sequence[int] | None = None) -> np.ndarray:
        """Convert images ``[B, 3, H, W]`` to logits ``[B, C]``, by default in trained order."""
        if arrangement is None:
            arrangement = range(self.num_blocks)
        if not isinstance(arrangement, Arrangement):
            arrangement = Arrangement.plain(arrangement)
        for index in arrangement.order:
            self._checked(index)
        if not arrangement.is_plain:
            return self.head(apply(arrangement, self.stem(images), self.block))
        return self.executor.run((STEM, *arrangement.order, HEAD), images)

    def profile(self, images: np.ndarray) -> tuple[np.ndarray, list[float]]:
        """Run :meth:`forward` in trained order; return the logits, and the seconds of stem, each block and head."""
        seconds: list[float] = []
        return self.executor.run((STEM, *range(self.num_blocks), HEAD), images, seconds=seconds), seconds

    def close(self) -> None:
        """Free the engines."""
        self.executor.close()

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.num_blocks:
            raise UsageError(f"the bundle has no block {index}; it has blocks 0 to {self.num_blocks - 1}")
        return index
