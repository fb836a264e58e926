"""One CUDA stream and the memory that all engines of one thread share.

During a *visit*, tokens are copied to the GPU, several engines run on them in sequence, and the result is copied back:
:meth:`CudaWorkspace.visit` makes one copy in, one copy out and one synchronization, however many engines there are.
Engines write to two buffers alternately. Host buffers are pinned, because only then are copies asynchronous and at the
full speed of the bus.

Not run on hardware yet; the tests run this code on doubles of CUDA and TensorRT (``tests/doubles``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.engines.cuda_runtime import NON_BLOCKING, TO_DEVICE, TO_HOST, CudaRuntime, cuda_runtime
from ls_edge.engines.engine import Signature, signature_of

ALIGNMENT = 256
"""Bytes: TensorRT asks for tensors that begin at a multiple of this."""


class DeviceEngine(Protocol):
    """An engine that can be queued on the stream of a workspace, between addresses on the GPU."""

    part: str
    signature: Signature

    def enqueue(self, batch: int, addresses: Mapping[str, int]) -> None:
        """Queue one run at a batch size; ``addresses`` are those of inputs and output by name."""
        ...


class CudaWorkspace:
    """A stream, two buffers on the GPU, their pinned host copies, and scratch memory for kernels.

    Used by one thread. Engines that share it hold it (:meth:`hold`) and let go of it; the last one frees everything.
    """

    def __init__(self, signatures: Sequence[Signature], max_batch: int, *, slot_rows: int = 0) -> None:
        """Create the stream; buffers are allocated by the first visit and hold any tensor of the signatures.

        ``slot_rows`` is the maximum of engines in a visit that takes slots. Raises :class:`EngineError` if CUDA does
        not work.
        """
        self.cuda = cuda_runtime()
        self.max_batch = max_batch
        self._slot_rows = slot_rows
        self._slot_bytes = _aligned(max_batch * 8)
        tensors = [tensor for signature in signatures for tensor in (signature.inputs[0], signature.output)]
        largest = max(int(np.prod(t.shape(max_batch))) * t.numpy_dtype.itemsize for t in tensors)
        self._buffer_bytes = self._slot_bytes * slot_rows + _aligned(largest)
        self._device: list[int] = []
        self._pinned = _Pinned(self.cuda), _Pinned(self.cuda)
        self._scratch = 0
        self._scratch_bytes = 0
        self._holders = 0
        self.generation = 0
        """Number of times that scratch memory has moved, which makes captured graphs invalid."""
        self._stream: int | None = self.cuda.call("cudaStreamCreateWithFlags", NON_BLOCKING, doing="making a stream")

    @classmethod
    def for_bundle(cls, bundle: Bundle, max_batch: int) -> CudaWorkspace:
        """Create a workspace for any parts of a bundle."""
        signatures = [signature_of(bundle.manifest, part) for part in ("stem", "block 0", "head")]
        return cls(signatures, max_batch, slot_rows=bundle.num_blocks + 2 if bundle.manifest.needs_slot else 0)

    @property
    def stream(self) -> int:
        """The stream as a number; raises :class:`EngineError` after everything was freed."""
        if self._stream is None:
            raise EngineError("the memory of these engines was freed; open them again")
        return self._stream

    def hold(self) -> None:
        """Count a user of this workspace."""
        self._holders += 1

    def release(self) -> None:
        """Let go of it; the last user frees stream and memory."""
        self._holders -= 1
        if self._holders > 0 or self._stream is None:
            return
        stream, self._stream = self._stream, None
        # Errors do not matter here: the first one has been reported, and everything else still has to be freed.
        self.cuda.attempt("cudaStreamSynchronize", stream)
        for address in (*self._device, self._scratch):
            if address:
                self.cuda.attempt("cudaFree", address)
        self._device, self._scratch = [], 0
        for pinned in self._pinned:
            pinned.free()
        self.cuda.attempt("cudaStreamDestroy", stream)

    def scratch(self, size: int) -> tuple[int, int]:
        """Address and bytes of memory that the kernels of one engine at a time may use; at least ``size`` bytes."""
        if size > self._scratch_bytes or not self._scratch:
            self.synchronize("waiting for engines that run")
            if self._scratch:
                self.cuda.call("cudaFree", self._scratch, doing="making room")
                self._scratch = 0
            wanted = _aligned(max(size, 1))
            self._scratch = self.cuda.call("cudaMalloc", wanted, doing=f"making {wanted >> 20} MiB of scratch memory")
            self._scratch_bytes = wanted
            self.generation += 1
        return self._scratch, self._scratch_bytes

    def synchronize(self, doing: str) -> None:
        """Wait for all that was queued."""
        self.cuda.call("cudaStreamSynchronize", self._stream, doing=doing)

    def visit(self, engines: Sequence[DeviceEngine], array: np.ndarray, slots: np.ndarray | None = None) -> np.ndarray:
        """Run engines in sequence on ``array``; return the output of the last one in a new array.

        ``slots``, int64 ``[B]``, are those of the first engine; they grow by one with each engine. Batches above
        ``max_batch`` are split. Only memory is checked; raises :class:`EngineError` if an engine or CUDA fails.
        """
        output = engines[-1].signature.output
        result = np.empty(output.shape(len(array)), output.dtype)
        for start in range(0, len(array), self.max_batch):
            stop = min(start + self.max_batch, len(array))
            self._visit(engines, array[start:stop], None if slots is None else slots[start:stop], result[start:stop])
        return result

    def _visit(
        self, engines: Sequence[DeviceEngine], array: np.ndarray, slots: np.ndarray | None, result: np.ndarray
    ) -> None:
        batch = len(array)
        if slots is not None and len(engines) > self._slot_rows:
            raise EngineError(f"{len(engines)} engines in a row are more than the {self._slot_rows} that were planned")
        self._make_buffers(engines)
        data = self._slot_bytes * self._slot_rows
        given, returned = self._pinned
        host = given.array
        if slots is not None:
            rows = host[:data].view(np.int64).reshape(self._slot_rows, -1)[: len(engines), :batch]
            rows[...] = slots + np.arange(len(rows), dtype=np.int64)[:, None]
        host[data : data + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        try:
            self.cuda.call(
                "cudaMemcpyAsync",
                self._device[0],
                given.address,
                data + array.nbytes,
                TO_DEVICE,
                self._stream,
                doing=f"copying to the GPU for {engines[0].part}",
            )
            at = 0
            for row, engine in enumerate(engines):
                first, *others = engine.signature.inputs
                addresses = {
                    first.name: self._device[at] + data,
                    engine.signature.output.name: self._device[1 - at] + data,
                }
                for other in others:
                    addresses[other.name] = self._device[0] + row * self._slot_bytes
                engine.enqueue(batch, addresses)
                at = 1 - at
            self.cuda.call(
                "cudaMemcpyAsync",
                returned.address,
                self._device[at] + data,
                result.nbytes,
                TO_HOST,
                self._stream,
                doing=f"copying from the GPU after {engines[-1].part}",
            )
        except BaseException:
            # The queued work uses these buffers; it has to end before they are filled again.
            self.cuda.attempt("cudaStreamSynchronize", self._stream)
            raise
        self.synchronize(f"running {_parts(engines)}")
        result[...] = returned.array[: result.nbytes].view(result.dtype).reshape(result.shape)

    def _make_buffers(self, engines: Sequence[DeviceEngine]) -> None:
        """Allocate buffers for any tensor at the largest batch, behind the rows of slots; once."""
        size = self._buffer_bytes
        while len(self._device) < 2:
            self._device.append(self.cuda.call("cudaMalloc", size, doing=f"making buffers for {_parts(engines)}"))
        for pinned in self._pinned:
            if not pinned.address:
                pinned.grow(size)


class _Pinned:
    """Pinned host memory as an array of bytes."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self.address = 0
        self.array = np.empty(0, np.uint8)

    def grow(self, size: int) -> None:
        self.address = self._cuda.call("cudaHostAlloc", size, 0, doing=f"making {size} bytes of pinned memory")
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))

    def free(self) -> None:
        address, self.address = self.address, 0
        self.array = np.empty(0, np.uint8)
        if address:
            self._cuda.attempt("cudaFreeHost", address)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _parts(engines: Sequence[DeviceEngine]) -> str:
    return engines[0].part if len(engines) == 1 else f"{engines[0].part} to {engines[-1].part}"
