"""Run several blocks of a peer one after the other, with as few copies as the engines allow.

Where all engines share memory on a GPU the tokens stay there: one copy in, one copy out, one synchronisation. Where all
are sessions of ONNX Runtime on the CPU, they are bound to the same two buffers. Else each engine takes and gives arrays
of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from ls_edge.core.errors import EngineError
from ls_edge.engines.bound_blocks import BlockFailed, BoundBlocks
from ls_edge.engines.cuda_memory import CudaWorkspace, DeviceEngine
from ls_edge.engines.engine import Engine, check_inputs
from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.engines.tensorrt_engine import TensorRTEngine

GRAPH_TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, between a run as a CUDA graph and one without."""


class BlockOutputs(NamedTuple):
    """What a run of some blocks gave."""

    last: np.ndarray
    """Tokens after the last block."""
    steps: Callable[[], list[np.ndarray]]
    """Returns the tokens after each block; where they were not kept, from a second run."""


class BlockRunner:
    """The engines of a peer's blocks, used by one thread at a time."""

    def __init__(self, engines: Mapping[int, Engine], *, needs_slot: bool) -> None:
        """``needs_slot``: blocks take the number of blocks before them."""
        self.engines = engines
        self.needs_slot = needs_slot
        self.workspace = _shared_workspace(engines)
        self._bound = BoundBlocks.of(engines, needs_slot=needs_slot)

    def run(
        self, blocks: Sequence[int], tokens: np.ndarray | Sequence[np.ndarray], slots: np.ndarray | None = None
    ) -> BlockOutputs:
        """Run blocks on tokens ``[B, N, D]``, or several such one behind the other.

        ``slots``, int64 ``[B]``, are those of the first block. Raises :class:`BlockFailed`.
        """
        rows = (tokens,) if isinstance(tokens, np.ndarray) else tokens
        if self._bound is not None:
            last = self._bound.run(blocks, rows, slots)
            if last is not None:
                return BlockOutputs(last, lambda: self._steps(blocks, _joined(rows), slots))
        joined = _joined(rows)
        if self.workspace is not None:
            engines = [self.engines[block] for block in blocks]
            try:
                check_inputs(engines[0].part, engines[0].signature, self._inputs(joined, slots, 0))
                on_device = [cast("DeviceEngine", engine) for engine in engines]
                last = self.workspace.visit(on_device, joined, slots if self.needs_slot else None)
                return BlockOutputs(last, lambda: self._steps(blocks, joined, slots))
            except EngineError:
                pass  # one by one, to say which; a failure that does not show again has cost time alone
        steps = self._steps(blocks, joined, slots)
        return BlockOutputs(steps[-1], lambda: steps)

    def close(self) -> None:
        """Close all engines; a second call does nothing."""
        if self._bound is not None:
            self._bound.clear()
        for engine in self.engines.values():
            engine.close()

    def _steps(self, blocks: Sequence[int], tokens: np.ndarray, slots: np.ndarray | None) -> list[np.ndarray]:
        """The tokens after each block, run one at a time."""
        steps: list[np.ndarray] = []
        for index, block in enumerate(blocks):
            try:
                tokens = self.engines[block].run(self._inputs(tokens, slots, index))
            except Exception as error:
                raise BlockFailed(block, str(error)) from error
            steps.append(tokens)
        return steps

    def warm_up(self, batch: int) -> None:
        """Prepare runs at a batch size: on the CPU bind all blocks; on a GPU run them, so that graphs are made.

        Where a CUDA graph does not give what the engine without one does, graphs are switched off.
        """
        if self._bound is not None:
            self._bound.prepare(batch)
        blocks = list(self.engines)
        if self.workspace is None or not blocks:
            return
        first = self.engines[blocks[0]].signature.inputs[0]
        tokens = np.random.default_rng(0).standard_normal(first.shape(batch)).astype(first.dtype)
        slots = np.zeros(batch, np.int64) if self.needs_slot else None
        orders = [blocks]
        if not self.needs_slot:  # with one there are no graphs; else each block runs in both ways between the buffers
            orders = [blocks, blocks[1:] + blocks[:1]] if len(blocks) % 2 == 0 else [blocks + blocks]
        for order in orders:
            plain, *again = (self.run(order, tokens, slots).last for _ in range(3))
            bound = GRAPH_TOLERANCE * float(np.abs(plain).max())
            if not all(np.abs(other - plain).max() <= bound for other in again) and np.isfinite(plain).all():
                for engine in self.engines.values():
                    if isinstance(engine, TensorRTEngine):
                        engine.drop_graphs("a run as a CUDA graph gave other numbers than one without")
                return

    def _inputs(self, tokens: np.ndarray, slots: np.ndarray | None, index: int) -> dict[str, np.ndarray]:
        if not self.needs_slot:
            return {"tokens": tokens}
        given = np.zeros(len(tokens), np.int64) if slots is None else slots
        return {"tokens": tokens, "slot": given + index}


def _joined(rows: Sequence[np.ndarray]) -> np.ndarray:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _shared_workspace(engines: Mapping[int, Engine]) -> CudaWorkspace | None:
    """The memory on a GPU that all engines share; None where one does not."""
    found = {
        id(engine.workspace) if isinstance(engine, (OnnxEngine, TensorRTEngine)) else None: engine
        for engine in engines.values()
    }
    if len(found) != 1:
        return None
    engine = next(iter(found.values()))
    return engine.workspace if isinstance(engine, (OnnxEngine, TensorRTEngine)) else None
