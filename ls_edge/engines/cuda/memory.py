"""CUDA stream and memory that all engines of one thread share.

During a *visit*, tokens are copied to the GPU, several engines run on them in sequence, and the result is copied back.
:meth:`CudaWorkspace.visit` needs one copy in, one copy out, and one synchronization for any number of engines. Engines
write to two buffers alternately. Host buffers are pinned, because only then are copies asynchronous and as fast as the
bus. An integrated GPU shares the host's memory, but does not cache pinned memory, so tokens between engines stay in GPU
memory there as well. Mapped buffers, which engines read and write in place, are used for measurements only.

Not run on a Jetson yet: the calls of the CUDA runtime ran on an NVIDIA H200, the rest on doubles of CUDA and TensorRT
(``tests/doubles``).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.device import hardware
from ls_edge.engines.cuda.runtime import LOST, NON_BLOCKING, TO_DEVICE, TO_HOST, CudaRuntime, cuda_runtime
from ls_edge.engines.engine import Signature, Tensor, signature_of

ALIGNMENT = 256
"""Alignment of tensors in bytes, as TensorRT requires."""


class DeviceEngine(Protocol):
    """An engine that can be queued on the stream of a workspace, between addresses on the GPU."""

    part: str
    signature: Signature

    def enqueue(self, batch: int, addresses: Mapping[str, int]) -> None:
        """Queue one run at a batch size; ``addresses`` contains the addresses of inputs and output by name."""


class CudaWorkspace:
    """A stream, two buffers on the GPU and in pinned host memory, and scratch memory for kernels.

    Used by one thread. Each engine that shares it calls :meth:`hold` and :meth:`release`; the last one frees it.
    """

    def __init__(self, signatures: Sequence[Signature], max_batch: int, *, slot_rows: int = 0) -> None:
        """Create the stream; the first visit allocates buffers for the largest tensor of the signatures.

        ``slot_rows`` is the maximum number of engines in a visit with slots. Raise :class:`EngineError` if CUDA does
        not work.
        """
        self.cuda = cuda_runtime()
        self.max_batch = max_batch
        self._slot_rows = slot_rows
        self._slot_bytes = _aligned(max_batch * 8)
        tensors = [tensor for signature in signatures for tensor in (signature.inputs[0], signature.output)]
        largest = max(math.prod(t.shape(max_batch)) * t.numpy_dtype.itemsize for t in tensors)
        size = self._slot_bytes * slot_rows + _aligned(largest)
        self._buffers = tuple(_Buffer(self.cuda, size) for _ in range(2))
        self._scratch = 0, 0
        self._holders = 0
        self.generation = 0
        """Number of times that scratch memory has moved, which makes captured graphs invalid."""
        self._stream: int | None = self.cuda.call("cudaStreamCreateWithFlags", NON_BLOCKING, doing="making a stream")
        self._free_bytes = free_bytes(self.cuda)

    @classmethod
    def for_bundle(cls, bundle: Bundle, max_batch: int) -> CudaWorkspace:
        """Create a workspace for any parts of a bundle."""
        signatures = [signature_of(bundle.manifest, part) for part in ("stem", "block 0", "head")]
        slot_rows = bundle.num_blocks + 2 if bundle.manifest.needs_slot else 0
        return cls(signatures, max_batch, slot_rows=slot_rows)

    @property
    def stream(self) -> int:
        """Address of the stream; raises :class:`EngineError` after the workspace was freed."""
        if self._stream is None:
            raise EngineError("the memory of these engines was freed; open them again")
        return self._stream

    def hold(self) -> None:
        """Count a user of this workspace."""
        self._holders += 1

    def release(self) -> None:
        """Remove a user; the last one frees stream and memory."""
        self._holders -= 1
        if self._holders > 0 or self._stream is None:
            return
        stream, self._stream = self._stream, None
        # Ignore errors: the first one has been reported already, and the remaining memory must still be freed.
        self.cuda.attempt("cudaStreamSynchronize", stream)
        self.cuda.attempt("cudaFree", self._scratch[0])  # may be 0
        for buffer in self._buffers:
            buffer.free()
        self.cuda.attempt("cudaStreamDestroy", stream)

    def taken_bytes(self) -> int:
        """Return the decrease of free GPU memory since the workspace was created, before any engine was opened."""
        return max(0, self._free_bytes - free_bytes(self.cuda))

    def scratch(self, size: int) -> tuple[int, int]:
        """Return address and size of at least ``size`` bytes of scratch memory, which one engine at a time uses."""
        address, available = self._scratch
        if size > available or not address:
            self.synchronize("waiting for engines that run")
            self._scratch = 0, 0
            self.cuda.call("cudaFree", address, doing="making room")
            wanted = _aligned(max(size, 1))
            address = self.cuda.call("cudaMalloc", wanted, doing=f"making {wanted >> 20} MiB of scratch memory")
            self._scratch = address, wanted
            self.generation += 1
        return self._scratch

    def synchronize(self, doing: str) -> None:
        """Wait for all queued work."""
        self.cuda.call("cudaStreamSynchronize", self._stream, doing=doing)

    def visit(
        self, engines: Sequence[DeviceEngine], rows: Sequence[np.ndarray], slots: np.ndarray | None = None
    ) -> np.ndarray:
        """Run engines in sequence on concatenated batches; return the output of the last engine in a new array.

        ``slots``, int64 ``[B]``, are the slots of the first engine and increase by one with each engine. Batches larger
        than ``max_batch`` are split. Arguments are not checked. Raise :class:`EngineError` if an engine or CUDA fails.
        """
        output, size = engines[-1].signature.output, sum(map(len, rows))
        result = np.empty(output.shape(size), output.dtype)
        if size > self.max_batch:
            rows = (np.concatenate(rows),)
        for start in range(0, size, self.max_batch):
            part = slice(start, start + self.max_batch)
            given = rows if size <= self.max_batch else (rows[0][part],)
            self._visit(engines, given, None if slots is None else slots[part], result[part])
        return result

    def _visit(
        self,
        engines: Sequence[DeviceEngine],
        rows: Sequence[np.ndarray],
        slots: np.ndarray | None,
        result: np.ndarray,
    ) -> None:
        batch = len(result)
        if slots is not None and len(engines) > self._slot_rows:
            raise EngineError(f"{len(engines)} engines in a row are more than the {self._slot_rows} that were planned")
        for buffer in self._buffers:
            buffer.make(f"making buffers for {_parts(engines)}")
        data = self._slot_bytes * self._slot_rows
        source, target = self._buffers
        if slots is not None:
            counts = source.array[:data].view(np.int64).reshape(self._slot_rows, -1)[: len(engines), :batch]
            counts[...] = slots + np.arange(len(counts), dtype=np.int64)[:, None]
        np.concatenate(rows, out=source.values(data, engines[0].signature.inputs[0], batch), casting="no")
        try:
            source.copy(TO_DEVICE, 0, data + sum(row.nbytes for row in rows), self.stream)
            for row, engine in enumerate(engines):
                first, *others = engine.signature.inputs
                addresses = {first.name: source.device + data, engine.signature.output.name: target.device + data}
                for other in others:
                    addresses[other.name] = self._buffers[0].device + row * self._slot_bytes
                engine.enqueue(batch, addresses)
                source, target = target, source
            source.copy(TO_HOST, data, result.nbytes, self.stream)
        except BaseException:
            # The queued work uses these buffers, so it must end before they are filled again.
            if self.cuda.attempt("cudaStreamSynchronize", self._stream) in LOST:
                self.synchronize(f"running {_parts(engines)}")
            raise
        self.synchronize(f"running {_parts(engines)}")
        result[...] = source.values(data, engines[-1].signature.output, batch)


class _Buffer:
    """Pinned host memory and GPU memory of the same size."""

    def __init__(self, cuda: CudaRuntime, size: int) -> None:
        self._cuda, self._size = cuda, size
        self._host = self.device = 0
        """Addresses; 0 before :meth:`make`."""
        self.array = np.empty(0, np.uint8)

    def make(self, doing: str) -> None:
        """Allocate the memory on the first call."""
        size = self._size
        if not self._host:
            self._host = self._cuda.call("cudaHostAlloc", size, 0, doing=doing)
            self.array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._host))
        if not self.device:
            self.device = self._cuda.call("cudaMalloc", size, doing=doing)

    def values(self, start: int, tensor: Tensor, batch: int) -> np.ndarray:
        """Return the tensor at byte ``start`` of host memory."""
        stop = start + math.prod(tensor.shape(batch)) * tensor.numpy_dtype.itemsize
        return self.array[start:stop].view(tensor.numpy_dtype).reshape(tensor.shape(batch))

    def copy(self, kind: int, start: int, size: int, stream: int) -> None:
        """Queue a copy of some bytes to or from the GPU."""
        ends = (self.device + start, self._host + start)[:: 1 if kind == TO_DEVICE else -1]
        self._cuda.call("cudaMemcpyAsync", *ends, size, kind, stream, doing="copying to or from the GPU")

    def free(self) -> None:
        """Free the memory."""
        host, device, self._host, self.device = self._host, self.device, 0, 0
        self.array = np.empty(0, np.uint8)
        self._cuda.attempt("cudaFree", device)
        if host:
            self._cuda.attempt("cudaFreeHost", host)


def free_bytes(cuda: CudaRuntime) -> int:
    """Return the free memory of the GPU; raise :class:`EngineError` if CUDA does not work."""
    memory = hardware.memory_gib() if cuda.is_integrated() else None
    if memory is not None:  # CUDA counts the page cache as used, although Linux can reclaim it
        return round(memory[1] * 2**30)
    free, _ = cuda.call("cudaMemGetInfo", doing="asking for free memory")
    return int(free)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _parts(engines: Sequence[DeviceEngine]) -> str:
    return engines[0].part if len(engines) == 1 else f"{engines[0].part} to {engines[-1].part}"
