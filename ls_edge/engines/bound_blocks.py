"""Blocks of ONNX Runtime in memory of the host, bound to two token buffers that they use in turn.

The output of a block is the input of the next one where it lies. So a run of several blocks copies tokens in once and
out once, and checks them once; what that saves is in ``docs/measurements.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import Engine
from ls_edge.engines.onnxruntime import Buffer, OnnxEngine

KEPT_BATCH_SIZES = 32
"""Batch sizes whose bindings are kept, some KB a block each; all of them share two buffers of the largest size."""
KEPT_SEQUENCES = 64
"""Sequences of blocks whose calls are kept at a batch size."""


class BlockFailed(EngineError):
    """An engine failed; :attr:`block` says which block's."""

    def __init__(self, block: int, why: str) -> None:
        super().__init__(why)
        self.block = block


class BoundBlocks:
    """Some blocks and their buffers, used by one thread at a time; make them with :meth:`of`."""

    def __init__(self, engines: Mapping[int, OnnxEngine], *, needs_slot: bool) -> None:
        """``needs_slot``: blocks take the number of blocks before them."""
        self._engines = engines
        self._needs_slot = needs_slot
        inputs = next(iter(engines.values())).signature.inputs
        self._tokens = inputs[0]
        self._num_slots = inputs[1].below if needs_slot else None
        self._memory = self._new_memory(0)
        self._bindings: dict[int, _Bindings] = {}

    @classmethod
    def of(cls, engines: Mapping[int, Engine], *, needs_slot: bool) -> BoundBlocks | None:
        """For these engines; None where one is not of ONNX Runtime, or its tokens are not in memory of the host."""
        found = {
            block: engine
            for block, engine in engines.items()
            if isinstance(engine, OnnxEngine) and engine.workspace is None and engine.device == "cpu"
        }
        return cls(found, needs_slot=needs_slot) if found and len(found) == len(engines) else None

    def run(self, blocks: Sequence[int], rows: Sequence[np.ndarray], slots: np.ndarray | None) -> np.ndarray | None:
        """Run blocks on tokens, which are ``rows``, each ``[b, N, D]``, one behind the other.

        ``slots``, int64 ``[B]``, are those of the first block. Returns new tokens ``[B, N, D]``, or None where the
        engines would not take these arguments, and say why when they are asked. Raises :class:`BlockFailed`.
        """
        batch = len(rows[0]) if len(rows) == 1 else sum(map(len, rows))
        if not batch or not blocks or not self._takes_slots(slots, batch, len(blocks)):
            return None
        bindings = self._bindings.get(batch) or self._bind(batch)
        try:
            np.concatenate(rows, out=bindings.arrays[0], casting="no")
        except (TypeError, ValueError):  # another type or shape
            return None
        for index, step in enumerate(self._steps(bindings, tuple(blocks))):
            if self._needs_slot:
                bindings.slots.write(index if slots is None else slots + index)
            try:
                step()
            except Exception as error:
                raise BlockFailed(blocks[index], str(error)) from error
        last: np.ndarray = bindings.arrays[len(blocks) % 2].copy()
        return last

    def prepare(self, batch: int) -> None:
        """Bind all blocks at a batch size, which the first run of each would do."""
        bindings = self._bindings.get(batch) or self._bind(batch)
        for block in self._engines:
            for current in range(2):
                self._step(bindings, block, current)

    def clear(self) -> None:
        """Let go of the sessions of the engines."""
        self._bindings.clear()

    def _takes_slots(self, slots: np.ndarray | None, batch: int, blocks: int) -> bool:
        if slots is None or not self._needs_slot:
            return True
        if slots.shape != (batch,) or slots.dtype != np.int64:
            return False
        values = slots.tolist()
        return min(values) >= 0 and (self._num_slots is None or max(values) + blocks <= self._num_slots)

    def _bind(self, batch: int) -> _Bindings:
        """New bindings for a batch size, in the place of the oldest ones where they are too many."""
        if batch > len(self._memory[0]):
            self._bindings.clear()
            self._memory = self._new_memory(batch)
        if len(self._bindings) >= KEPT_BATCH_SIZES:
            del self._bindings[next(iter(self._bindings))]
        bindings = self._bindings[batch] = _Bindings([memory[:batch] for memory in self._memory])
        return bindings

    def _new_memory(self, batch: int) -> list[np.ndarray]:
        return [np.zeros(self._tokens.shape(batch), self._tokens.dtype) for _ in range(2)]

    def _steps(self, bindings: _Bindings, blocks: tuple[int, ...]) -> list[Callable[[], None]]:
        """The calls of a sequence of blocks, kept since most sequences come again."""
        steps = bindings.sequences.get(blocks)
        if steps is None:
            if len(bindings.sequences) >= KEPT_SEQUENCES:
                bindings.sequences.clear()
            steps = [self._step(bindings, block, index % 2) for index, block in enumerate(blocks)]
            bindings.sequences[blocks] = steps
        return steps

    def _step(self, bindings: _Bindings, block: int, current: int) -> Callable[[], None]:
        """The call that runs a block on the tokens in buffer ``current``; what it gives is in the other one."""
        step = bindings.steps.get((block, current))
        if step is None:
            inputs = {"tokens": bindings.tokens[current]}
            if self._needs_slot:
                inputs["slot"] = bindings.slots
            try:
                step = self._engines[block].bind(inputs, bindings.tokens[1 - current])
            except Exception as error:
                raise BlockFailed(block, str(error)) from error
            bindings.steps[block, current] = step
        return step


class _Bindings:
    """What is bound at one batch size."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        """``arrays``: the two token buffers, ``[B, N, D]``."""
        self.arrays = arrays
        self.tokens = [Buffer(array.dtype.name, array.shape, "cpu", array) for array in arrays]
        self.slots = Buffer("int64", (len(arrays[0]),), "cpu")
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}
        """Calls by block and the buffer that it reads."""
        self.sequences: dict[tuple[int, ...], list[Callable[[], None]]] = {}
        """Calls by a sequence of blocks."""
