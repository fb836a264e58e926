"""Executor of parts in sequence, with as few copies as the engines allow; used by pipelines and peers.

Engines that share GPU memory leave tokens there, with one copy in, one copy out, and one synchronization. ONNX Runtime
sessions in host memory are bound once to two buffers that they use alternately: the output of a part is the input of
the next part, so a run copies and checks tokens only once. All other engines take and return arrays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ls_edge.core.errors import DeviceLost, EngineError
from ls_edge.core.parts import ENDS, HEAD, STEM
from ls_edge.engines.cuda.memory import DeviceEngine
from ls_edge.engines.engine import Engine, Tensor, check_inputs, warm_up
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module
from ls_edge.engines.providers import memory_of
from ls_edge.engines.tensorrt.engine import TensorRTEngine


class PartFailed(EngineError):
    """Failure of the engine of :attr:`part`."""

    def __init__(self, part: int, why: str) -> None:
        super().__init__(why)
        self.part = part


class Executor:
    """Engines of some parts, for one thread at a time."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self.engines = engines
        self.needs_slot = any(len(engine.signature.inputs) > 1 for engine in engines.values())
        """Whether blocks take their slot as an input."""
        workspaces = {
            engine.workspace if isinstance(engine, (OnnxEngine, TensorRTEngine)) else None
            for engine in engines.values()
        }
        self.workspace = workspaces.pop() if len(workspaces) == 1 else None
        """GPU memory that all engines share, or None."""
        on_host = {
            part: engine
            for part, engine in engines.items()
            if isinstance(engine, OnnxEngine) and engine.workspace is None and memory_of(engine.provider) == "cpu"
        }
        self._bound = _BoundParts(on_host) if on_host and len(on_host) == len(engines) else None
        """Sessions of ONNX Runtime, if all engines are ones in host memory."""

    def run(
        self,
        parts: Sequence[int],
        inputs: np.ndarray | Sequence[np.ndarray],
        slots: np.ndarray | None = None,
        seconds: list[float] | None = None,
    ) -> np.ndarray:
        """Run parts in sequence on one batch, or on several batches that are concatenated; return a new array.

        ``slots``, int64 ``[B]``, are the slots of the first block, by default 0. ``seconds`` receives the time of each
        part; with it, parts on a GPU run one at a time. Raise :class:`PartFailed`.
        """
        rows = (inputs,) if isinstance(inputs, np.ndarray) else inputs
        if self._bound is not None:
            found = self._bound.run(parts, rows, slots, seconds)
            if found is not None:
                return found
        if self.workspace is not None and seconds is None:
            engines = [self.engines[part] for part in parts]
            first = _first_slots(parts, sum(map(len, rows))) if slots is None else slots
            try:
                start = 0
                for row in rows:
                    stop = start + len(row)
                    check_inputs(engines[0].part, engines[0].signature, _inputs(engines[0], row, first[start:stop]))
                    start = stop
                on_device = [cast("DeviceEngine", engine) for engine in engines]
                return self.workspace.visit(on_device, rows, first if self.needs_slot else None)
            except DeviceLost:
                raise
            except EngineError:
                pass  # run the parts one at a time to find the one that fails
        return self.steps(parts, _joined(rows), slots, seconds)[-1]

    def steps(
        self,
        parts: Sequence[int],
        inputs: np.ndarray | Sequence[np.ndarray],
        slots: np.ndarray | None = None,
        seconds: list[float] | None = None,
    ) -> list[np.ndarray]:
        """Run parts one at a time as :meth:`run` does; return the output of each."""
        array = inputs if isinstance(inputs, np.ndarray) else _joined(inputs)
        slots = _first_slots(parts, len(array)) if slots is None else slots
        outputs: list[np.ndarray] = []
        for place, part in enumerate(parts):
            started = time.perf_counter()
            engine = self.engines[part]
            try:
                array = engine.run(_inputs(engine, array, slots + place))
            except DeviceLost:
                raise
            except Exception as error:
                raise PartFailed(part, str(error)) from error
            outputs.append(array)
            if seconds is not None:
                seconds.append(time.perf_counter() - started)
        return outputs

    def measure(self, max_batch: int) -> float:
        """Warm up with one image and with ``max_batch``; return the typical milliseconds of a block for one image."""
        distinct = {id(engine): (part, engine) for part, engine in self.engines.items()}
        times: dict[int, float] = {}
        for batch in sorted({1, max_batch}, reverse=True):
            self.warm_up(batch)
            times = {part: warm_up(engine, batch) for part, engine in distinct.values()}
        return typical_ms(times)

    def warm_up(self, batch: int) -> None:
        """Bind all blocks at a batch size; on a GPU, also run them to record graphs."""
        if self._bound is not None:
            self._bound.prepare(batch)
        blocks = [part for part in self.engines if part not in ENDS]
        if self.workspace is None or not blocks:
            return
        first = self.engines[blocks[0]].signature.inputs[0]
        orders = [blocks]
        # Graphs exist only without slots, one for each direction between the buffers.
        if not self.needs_slot:
            orders = [blocks, blocks[1:] + blocks[:1]] if len(blocks) % 2 == 0 else [blocks + blocks]
        for order in [*orders, *orders]:
            self.run(order, np.zeros(first.shape(batch), first.dtype), np.zeros(batch, np.int64))

    def close(self) -> None:
        """Close all engines; a second call does nothing."""
        self._bound = None
        for engine in self.engines.values():
            engine.close()


class _Batch:
    def __init__(self, size: int) -> None:
        self.slots = np.zeros(size, np.int64)
        self.slot_value: Any = onnxruntime_module().OrtValue.ortvalue_from_numpy(self.slots)
        self.buffers: dict[tuple[Tensor, int], tuple[np.ndarray, Any]] = {}
        """Arrays and the ``OrtValue`` objects that share their memory, by tensor and side."""
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}
        """Prepared calls by part and side, which is the buffer that the part reads."""


class _BoundParts:
    """ONNX Runtime sessions that are bound to two buffers in host memory, reading one and writing the other."""

    def __init__(self, engines: Mapping[int, OnnxEngine]) -> None:
        self._engines = engines
        below = (t.below for engine in engines.values() for t in engine.signature.inputs[1:])
        self._num_slots: int | None = next(below, None)
        self._largest = 0
        self._memory: dict[tuple[str, tuple[int, ...], int], np.ndarray] = {}
        """Arrays at the largest batch size, by type, shape and side."""
        self._batches: dict[int, _Batch] = {}

    def run(
        self,
        parts: Sequence[int],
        rows: Sequence[np.ndarray],
        slots: np.ndarray | None,
        seconds: list[float] | None,
    ) -> np.ndarray | None:
        """Run as :meth:`Executor.run` does; return None for arguments that the engines would reject."""
        size = len(rows[0]) if len(rows) == 1 else sum(map(len, rows))
        if not size or not parts or not self._takes(slots, size, parts):
            return None
        batch = self._batches.get(size) or self._new_batch(size)
        steps = [self._step(batch, part, place % 2) for place, part in enumerate(parts)]
        given, _ = self._buffer(batch, self._engines[parts[0]].signature.inputs[0], 0)
        result, _ = self._buffer(batch, self._engines[parts[-1]].signature.output, len(parts) % 2)
        marks = [time.perf_counter()]
        try:
            np.concatenate(rows, out=given, casting="no")
        except (TypeError, ValueError):  # a different type or shape
            return None
        if self._num_slots is not None:
            batch.slots[...] = _first_slots(parts, size) if slots is None else slots
        for part, step in zip(parts, steps, strict=True):
            try:
                step()
            except Exception as error:
                raise PartFailed(part, str(error)) from error
            if self._num_slots is not None:
                batch.slots += 1
            marks.append(time.perf_counter())
        found: np.ndarray = result.copy()
        if seconds is not None:
            marks[-1] = time.perf_counter()
            seconds.extend(after - before for before, after in itertools.pairwise(marks))
        return found

    def prepare(self, size: int) -> None:
        """Bind all parts at a batch size in advance, instead of in their first runs."""
        batch = self._batches.get(size) or self._new_batch(size)
        for part in self._engines:
            for side in range(2):
                self._step(batch, part, side)

    def _takes(self, slots: np.ndarray | None, size: int, parts: Sequence[int]) -> bool:
        if slots is None or self._num_slots is None:
            return True
        if slots.shape != (size,) or slots.dtype != np.int64:
            return False
        values: list[int] = slots.tolist()
        blocks = len(parts) - (parts[-1] == HEAD)  # stem and head take no slot
        return min(values) + (parts[0] == STEM) >= 0 and max(values) + blocks <= self._num_slots

    def _new_batch(self, size: int) -> _Batch:
        """Add a batch size, whose bindings take a few KB per part; all share the buffers of the largest size."""
        if size > self._largest:
            self._batches.clear()
            self._memory.clear()
            self._largest = size
        batch = self._batches[size] = _Batch(size)
        return batch

    def _buffer(self, batch: _Batch, tensor: Tensor, side: int) -> tuple[np.ndarray, Any]:
        found = batch.buffers.get((tensor, side))
        if found is None:
            key = tensor.dtype, tensor.rest, side
            if key not in self._memory:
                self._memory[key] = np.zeros(tensor.shape(self._largest), tensor.dtype)
            array = self._memory[key][: len(batch.slots)]
            found = batch.buffers[tensor, side] = array, onnxruntime_module().OrtValue.ortvalue_from_numpy(array)
        return found

    def _step(self, batch: _Batch, part: int, side: int) -> Callable[[], None]:
        """Return the function that runs a part from the buffer of a side to the other one."""
        step = batch.steps.get((part, side))
        if step is None:
            engine = self._engines[part]
            tokens, *slot = engine.signature.inputs
            values = {tokens.name: self._buffer(batch, tokens, side)[1]} | {t.name: batch.slot_value for t in slot}
            try:
                step = engine.bind(values, self._buffer(batch, engine.signature.output, 1 - side)[1])
            except Exception as error:
                raise PartFailed(part, str(error)) from error
            batch.steps[part, side] = step
        return step


def typical_ms(times: Mapping[int, float]) -> float:
    """Return the median time of the blocks, or of stem and head if there are no blocks."""
    return float(np.median([times[part] for part in times.keys() - ENDS.keys() or times]))


def _joined(rows: Sequence[np.ndarray]) -> np.ndarray:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _first_slots(parts: Sequence[int], size: int) -> np.ndarray:
    """Return the slots of the first part such that the first block has slot 0."""
    return np.full(size, -1 if parts[0] == STEM else 0, np.int64)


def _inputs(engine: Engine, array: np.ndarray, slots: np.ndarray) -> dict[str, np.ndarray]:
    first, *slot = engine.signature.inputs
    return {first.name: array} | {tensor.name: slots for tensor in slot}
