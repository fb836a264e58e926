"""Run a part as a TensorRT engine: numpy in, numpy out, buffers on the GPU in between. No torch.

The engine comes from this user's cache or is built now (:func:`open_tensorrt`). Buffers for the largest batch are
made once and bound once; a run copies in, executes and copies out on one CUDA stream. Larger batches are run in turns.
One thread at a time.

Not run on hardware yet; see ``ls_edge.engines.tensorrt_build``. Left out: keeping tokens on the GPU between the parts
of one process, and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ls_edge.bundle import Bundle
from ls_edge.engines import tensorrt_build
from ls_edge.engines.engine import Signature, Tensor, check_inputs, check_out
from ls_edge.engines.tensorrt_build import MAX_BATCH, Device, checked, cuda_module, key_of, tensorrt_module, this_device
from ls_edge.engines.tensorrt_cache import EngineCache, OnStatus
from ls_edge.errors import EngineError


class TensorRTEngine:
    """A part in a TensorRT engine."""

    kind = "tensorrt"

    def __init__(self, plan: bytes, part: str, signature: Signature, device: Device, *, max_batch: int) -> None:
        """Load a serialised engine; raises :class:`EngineError` where it is not for this device or not this part."""
        self.part = part
        self.signature = signature
        self.provider = str(device)
        self.max_batch = max_batch
        self._trt, self._cuda = tensorrt_module(), cuda_module()
        # an engine may not outlive the runtime that made it
        self._runtime: Any = self._trt.Runtime(self._trt.Logger(self._trt.Logger.ERROR))
        self._engine: Any = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineError(f"the engine of {part} does not load in {device}; it is of another device or version")
        self._check_signature()
        self._context: Any = self._engine.create_execution_context()
        if self._context is None:
            raise EngineError(f"{part}: not enough memory on {device.gpu} for the engine; serve fewer blocks there")
        self._stream: Any = checked(self._cuda, self._cuda.cudaStreamCreate(), "making a stream")
        self._buffers: dict[str, int] = {}
        for tensor in (*signature.inputs, signature.output):
            size = int(np.prod(tensor.shape(max_batch))) * np.dtype(tensor.dtype).itemsize
            address = int(checked(self._cuda, self._cuda.cudaMalloc(size), f"making buffers for {part}"))
            self._buffers[tensor.name] = address
            self._context.set_tensor_address(tensor.name, address)

    def run(self, inputs: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Run on arrays that are checked against the manifest; raises :class:`EngineError`."""
        batch = check_inputs(self.part, self.signature, inputs)
        output = self.signature.output
        check_out(self.part, output, batch, out)
        if self._context is None:
            raise EngineError(f"the engine of {self.part} was closed; open it again")
        if out is not None and out.flags.c_contiguous:
            result = out
        else:
            result = np.empty(output.shape(batch), output.dtype)
        for start in range(0, batch, self.max_batch):
            stop = min(start + self.max_batch, batch)
            self._run({name: array[start:stop] for name, array in inputs.items()}, result[start:stop])
        if out is not None and result is not out:
            np.copyto(out, result)
            return out
        return result

    def close(self) -> None:
        """Free memory on the GPU; a second call does nothing."""
        if self._context is None:
            return
        self._context = self._engine = self._runtime = None
        for address in self._buffers.values():
            self._cuda.cudaFree(address)
        self._buffers.clear()
        self._cuda.cudaStreamDestroy(self._stream)

    def _run(self, inputs: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        cuda, kinds, stream = self._cuda, self._cuda.cudaMemcpyKind, self._stream
        alive = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in alive.items():
            self._context.set_input_shape(name, array.shape)
            copied = cuda.cudaMemcpyAsync(
                self._buffers[name], array.ctypes.data, array.nbytes, kinds.cudaMemcpyHostToDevice, stream
            )
            checked(cuda, copied, f"copying {name} of {self.part}")
        if not self._context.execute_async_v3(int(stream)):
            raise EngineError(f"{self.part} failed on {self.provider}; see 'ls-edge doctor', or use --engine onnx")
        source = self._buffers[self.signature.output.name]
        copied = cuda.cudaMemcpyAsync(out.ctypes.data, source, out.nbytes, kinds.cudaMemcpyDeviceToHost, stream)
        checked(cuda, copied, f"copying the result of {self.part}")
        checked(cuda, cuda.cudaStreamSynchronize(stream), f"running {self.part}")

    def _check_signature(self) -> None:
        trt, engine = self._trt, self._engine
        wanted: dict[str, tuple[Any, Tensor]] = {t.name: (trt.TensorIOMode.INPUT, t) for t in self.signature.inputs}
        wanted[self.signature.output.name] = (trt.TensorIOMode.OUTPUT, self.signature.output)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for name in {*names, *wanted}:
            mode, tensor = wanted.get(name, (None, None))
            if tensor is None or name not in names:
                raise EngineError(f"{self.part}: the engine has {', '.join(names)}, the manifest {', '.join(wanted)}")
            rest = tuple(engine.get_tensor_shape(name))[1:]
            dtype = np.dtype(trt.nptype(engine.get_tensor_dtype(name))).name
            if engine.get_tensor_mode(name) != mode or dtype != tensor.dtype or rest != tensor.rest:
                raise EngineError(f"{self.part}: the engine's {name} is {dtype} {list(rest)}, by the manifest {tensor}")


def open_tensorrt(
    bundle: Bundle,
    part: str,
    signature: Signature,
    *,
    max_batch: int = MAX_BATCH,
    cache: EngineCache | None = None,
    on_status: OnStatus = lambda _: None,
) -> TensorRTEngine:
    """Open a part from the cache of built engines, building it where it is not there.

    ``on_status`` is called with the reason where one is built. Raises :class:`EngineError` where TensorRT, CUDA or
    a GPU is not there or the part cannot be built.
    """
    device = this_device()
    raw = bundle.read(part)
    key = key_of(bundle.part(part).sha256, device, bundle.manifest.precision, max_batch)
    cache = cache if cache is not None else EngineCache()

    def load() -> TensorRTEngine:
        plan = cache.get(
            key, lambda timing: tensorrt_build.build(raw, part, key, timing), lambda why: on_status(f"{part}: {why}")
        )
        return TensorRTEngine(plan, part, signature, device, max_batch=max_batch)

    try:
        return load()
    except EngineError as error:
        if "does not load in" not in str(error):
            raise
        on_status(f"{error}; building it again")
        cache.forget(key)
        return load()
