"""TensorRT engines with numpy inputs and outputs, which keep tokens on the GPU in between. Does not need torch.

:func:`open_tensorrt` loads an engine from this user's cache or builds it. The engines of a thread share a
:class:`~ls_edge.engines.cuda.memory.CudaWorkspace`: a stream, buffers, and memory for activations, which one engine at
a time uses. Single images and batches have separate profiles and contexts. For one image and for the largest batch, a
run becomes a CUDA graph when it is queued for the second time; a graph needs one call instead of one per kernel. If
CUDA cannot record a graph, runs continue without one (:attr:`TensorRTEngine.no_graphs` has the reason). Larger batches
are split. Only one thread at a time may use an engine.

Not run on hardware yet; the tests run this code on doubles of CUDA and TensorRT (``tests/doubles``). For TensorRT for
RTX, names are compared with its bindings, and nothing else was tried.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.cuda.runtime import THREAD_LOCAL
from ls_edge.engines.engine import Signature, Tensor, check_inputs, first_line
from ls_edge.engines.reference import check_engine
from ls_edge.engines.tensorrt.build import (
    NO_REASON,
    BuiltPart,
    EngineOptions,
    build_part,
    is_rtx,
    tensorrt_logger,
    tensorrt_module,
    tensorrt_runtime,
    this_device,
)
from ls_edge.engines.tensorrt.cache import EngineCache, OnStatus, TensorRTDevice

log = logging.getLogger("ls_edge.engines")

_UNFIT = ("Serialization", "serialization version", "bufferSize", "plan file", "ebuild")
"""Words of TensorRT about an engine that is damaged, or of another version or device."""
_LAYER = re.compile(r"^Name: (.*?), LayerType: (\w+)(.*)$", re.MULTILINE)


class UnfitEngine(EngineError):
    """A serialized engine has to be built again."""


@dataclass
class _Context:
    """An execution context, and its graph if it always runs with the same batch size and addresses."""

    context: Any
    generation: int
    """Generation of the workspace when the context was created."""
    graph: Any = None
    """``cudaGraphExec_t``; None before the second run and without graphs."""


class TensorRTEngine:
    """A part that runs in TensorRT."""

    kind = "tensorrt"

    def __init__(
        self,
        plan: bytes,
        part: str,
        signature: Signature,
        device: TensorRTDevice,
        workspace: CudaWorkspace,
        kernels: bytes = b"",
    ) -> None:
        """Load a serialized engine and its :attr:`kernels`; raise :class:`UnfitEngine` if it must be built again."""
        self.part = part
        self.signature = signature
        self.provider = str(device)
        self.workspace = workspace
        self.no_graphs = "it takes a slot, whose address changes with each run" if len(signature.inputs) > 1 else ""
        """Reason why runs do not become CUDA graphs; empty if they do."""
        self._trt = tensorrt_module()
        self._engine: Any = tensorrt_runtime(self._trt).deserialize_cuda_engine(plan)
        if self._engine is None:
            why = self._why
            kind = UnfitEngine if any(word in why for word in _UNFIT) else EngineError
            raise kind(f"the engine of {part} does not load in {device} ({why}); run with --engine onnx")
        self._check_signature()
        self._strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._rtx_config = self._configured(kernels) if is_rtx(self._trt) else None
        workspace.hold()
        self._contexts: dict[tuple[int, ...], _Context] = {}
        """Contexts, by batch and addresses for runs with a graph, otherwise by profile.

        A context is created on its first run, because it takes memory. Each graph has its own context, because it
        depends on the state of the context that it was captured from.
        """
        try:
            self._scratch_bytes = int(self._engine.device_memory_size_v2)
            workspace.scratch(self._scratch_bytes)  # allocated once, since all engines are opened before the first run
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Check the arrays against the manifest, run, and return a new array; raise :class:`EngineError`."""
        check_inputs(self.part, self.signature, inputs)
        return self.workspace.visit([self], (inputs[self.signature.inputs[0].name],), inputs.get("slot"))

    def enqueue(self, batch: int, addresses: Mapping[str, int]) -> None:
        """Queue one run; see :class:`~ls_edge.engines.cuda.memory.DeviceEngine`."""
        if self._engine is None:
            raise EngineError(f"the engine of {self.part} was closed; open it again")
        uses_graph = not self.no_graphs and batch in (1, self.workspace.max_batch)
        key = (batch, *addresses.values()) if uses_graph else (self._profile_of(batch),)
        found = self._contexts.get(key)
        if found is not None and found.generation != self.workspace.generation:
            self._drop(key)
            found = None
        if found is None:
            found = self._contexts[key] = self._new_context(batch)
        elif uses_graph and self._launch(found):
            return
        self._set(found.context, batch, addresses)
        self._execute(found.context)

    def drop_contexts(self) -> None:
        """Free the contexts, which the next runs create again; must not be called while work is queued."""
        for key in list(self._contexts):
            self._drop(key)

    def layers(self) -> str:
        """Return name, type, and data types of the engine's layers, one layer per line."""
        oneline = self._trt.LayerInformationFormat.ONELINE
        return described(str(self._engine.create_engine_inspector().get_engine_information(oneline)))

    @property
    def kernels(self) -> bytes:
        """Kernels that TensorRT for RTX has compiled for this GPU, for the next start; TensorRT has none."""
        return b"" if self._rtx_config is None else bytes(self._rtx_config.get_runtime_cache().serialize())

    def close(self) -> None:
        """Free GPU memory; a second call does nothing."""
        if self._engine is None:
            return
        self.drop_contexts()
        self._engine = None
        self.workspace.release()

    def _launch(self, found: _Context) -> bool:
        """Run the graph of a context after its first run, recording it if needed; return False if that fails."""
        if found.graph is None:
            try:
                found.graph = self._capture(found.context)
            except EngineError as error:
                self.no_graphs = first_line(error)
                tensorrt_logger(self._trt).take()
                log.warning("runs without CUDA graphs", extra={"part": self.part, "why": self.no_graphs})
                return False
        self.workspace.cuda.call("cudaGraphLaunch", found.graph, self.workspace.stream, doing=f"running {self.part}")
        return True

    def _capture(self, context: Any) -> Any:
        """Record one run as a graph; restore the state of the stream even if that fails."""
        cuda, stream, call = self.workspace.cuda, self.workspace.stream, self.workspace.cuda.call
        # This mode records only calls of this thread; other threads of the process may allocate meanwhile.
        call("cudaStreamBeginCapture", stream, THREAD_LOCAL, doing="recording a graph")
        try:
            self._execute(context)
        except BaseException:
            cuda.attempt("cudaStreamEndCapture", stream)
            raise
        graph = call("cudaStreamEndCapture", stream, doing="recording a graph")
        try:
            return call("cudaGraphInstantiateWithFlags", graph, 0, doing="making a graph")
        finally:
            cuda.attempt("cudaGraphDestroy", graph)

    def _drop(self, key: tuple[int, ...]) -> None:
        found = self._contexts.pop(key)
        if found.graph is not None:
            self.workspace.cuda.attempt("cudaGraphExecDestroy", found.graph)

    def _new_context(self, batch: int) -> _Context:
        context = self._engine.create_execution_context(self._rtx_config or self._strategy)
        if context is None:
            raise EngineError(
                f"{self.part}: no memory for the engine on {self.provider} ({self._why}); serve fewer blocks"
            )
        # Only the first context of an engine gets a profile automatically.
        try:
            context.set_optimization_profile_async(self._profile_of(batch), self.workspace.stream)
        except RuntimeError as error:
            raise EngineError(f"{self.part}: TensorRT does not take the engine's profile ({self._why})") from error
        context.set_device_memory(*self.workspace.scratch(self._scratch_bytes))
        return _Context(context, self.workspace.generation)

    def _configured(self, kernels: bytes) -> Any:
        """Return a configuration of TensorRT for RTX, whose contexts compile the kernels that are not known yet."""
        runtime_config = self._engine.create_runtime_config()
        runtime_config.set_execution_context_allocation_strategy(self._strategy)
        # Otherwise, runs use slower kernels until others are compiled, and graphs keep them.
        eager = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        runtime_config.dynamic_shapes_kernel_specialization_strategy = eager
        runtime_cache = runtime_config.create_runtime_cache()
        if kernels:
            runtime_cache.deserialize(kernels)  # returns False and keeps none for another GPU or driver
        runtime_config.set_runtime_cache(runtime_cache)
        return runtime_config

    def _set(self, context: Any, batch: int, addresses: Mapping[str, int]) -> None:
        for tensor in self.signature.inputs:
            if not context.set_input_shape(tensor.name, tensor.shape(batch)):
                raise EngineError(f"{self.part}: the engine does not take a batch of {batch}; build it for larger ones")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise EngineError(f"{self.part}: the engine has no tensor {name}; export the bundle again")

    def _execute(self, context: Any) -> None:
        if not context.execute_async_v3(self.workspace.stream):
            raise EngineError(
                f"{self.part} failed on {self.provider} ({self._why}); see 'ls-edge doctor', or run with --engine onnx"
            )

    def _profile_of(self, batch: int) -> int:
        return int(batch > 1 and self._engine.num_optimization_profiles > 1)

    @property
    def _why(self) -> str:
        return tensorrt_logger(self._trt).take() or NO_REASON

    def _check_signature(self) -> None:
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        types = [np.dtype(self._trt.nptype(engine.get_tensor_dtype(name))).name for name in names]
        found = {Tensor(n, dtype, tuple(engine.get_tensor_shape(n))[1:]) for n, dtype in zip(names, types, strict=True)}
        wanted = {*self.signature.inputs, self.signature.output}
        if found != wanted:
            theirs, ours = ("; ".join(sorted(map(str, tensors))) for tensors in (found, wanted))
            raise EngineError(f"{self.part}: the engine has {theirs}, the manifest {ours}; export the bundle again")


def described(text: str) -> str:
    """Return name, type, and data types of each layer in TensorRT's description, or the text in another form."""
    types = re.compile(r"Datatype: ([^,}\]]+?) *[,}\]]")
    layers = (
        f"{name}: {kind}, {'/'.join(dict.fromkeys(types.findall(rest)))}" for name, kind, rest in _LAYER.findall(text)
    )
    return "\n".join(layers) or text


def open_tensorrt(
    bundle: Bundle,
    part: str,
    signature: Signature,
    options: EngineOptions,
    workspace: CudaWorkspace,
    *,
    on_status: OnStatus = lambda _: None,
) -> TensorRTEngine:
    """Open a part from the cache of built engines; build it if it is missing.

    Engines with the same ``workspace`` belong to one thread; ``on_status`` receives the reason for a build. Raise
    :class:`EngineError` if TensorRT, CUDA, or a GPU is missing, if the part cannot be built, or if a new engine
    computes wrong values.
    """
    cache, device = EngineCache(), this_device()

    def load(built: BuiltPart) -> TensorRTEngine:
        kernels = cache.checked(built.key, built.plan, device) or b""
        return TensorRTEngine(built.plan, part, signature, device, workspace, kernels)

    built = build_part(bundle, part, options, cache=cache, on_status=on_status, must_keep=False)
    try:
        loaded = load(built)
    except UnfitEngine as error:
        on_status(f"{str(error).rpartition('; ')[0]}; building it again")
        cache.forget(built.key)
        built = build_part(bundle, part, options, cache=cache, on_status=on_status, must_keep=False)
        loaded = load(built)
    if cache.checked(built.key, built.plan, device) is None:
        try:
            check_engine(bundle, loaded, workspace.max_batch)
        except BaseException:
            loaded.close()
            raise
        loaded.drop_contexts()  # which take memory
        cache.note_checked(built.key, built.plan, device, loaded.kernels)
    return loaded
