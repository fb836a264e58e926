"""Engines of ONNX Runtime: sessions with options for many small models in one process, and their buffers.

With its defaults every session has a thread pool that spins between runs, and a memory arena: fourteen sessions
one after the other then cost many times what one costs. Here no pool spins and all sessions share one arena. On the
CUDA provider sessions share a stream and leave tokens on the GPU (:mod:`ls_edge.engines.cuda_memory`); its CUDA graphs
are not used, since ONNX Runtime up to 1.26 at least waits for the GPU after each. A provider that was asked for is the
one that runs, or opening fails; nothing falls back in silence. Only the bytes given count: a part that refers to
weights in another file does not load.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ls_edge.core.errors import EngineError
from ls_edge.device import hardware
from ls_edge.device.requirements import engine_advice
from ls_edge.engines.cuda_memory import CudaWorkspace
from ls_edge.engines.engine import Signature, Tensor, check_inputs, check_out, first_line
from ls_edge.engines.integrity import has_weights_elsewhere
from ls_edge.engines.providers import CPU, memory_of, preload, providers_of, runs_on_nvidia, switch_off_tf32, why_not

KEPT_BATCH_SIZES = 4
"""Batch sizes whose buffers an engine keeps; more take memory, fewer allocate again where sizes alternate."""
KEPT_QUEUED = 32
"""Pairs of batch size and buffers for which a binding to memory on the GPU is kept; each is some KB."""

log = logging.getLogger("ls_edge.engines")

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}


def open_session(
    raw: bytes,
    part: str,
    *,
    provider: str,
    threads: int | None,
    plain: bool = False,
    precision: str = "fp32",
    signature: Signature | None = None,
    max_batch: int = 1,
    stream: int | None = None,
) -> Any:
    """Make an ``InferenceSession`` of ``raw`` that really runs on ``provider``; raises :class:`EngineError`.

    ``plain`` leaves the options of sessions at their defaults (for comparison only). The others are those of
    :func:`ls_edge.engines.providers.providers_of`.
    """
    ort = onnxruntime_module()
    if provider not in ort.get_available_providers():
        raise EngineError(
            f"{provider} is not in this build of onnxruntime {ort.__version__} "
            f"({', '.join(ort.get_available_providers())}); install one that has it, or ask for cpu"
        )
    if has_weights_elsewhere(raw):  # before 1.24 ONNX Runtime reads them where they are named by their full path
        raise EngineError(
            f"{part} does not load in onnxruntime {ort.__version__}: it is no ONNX file, or has weights in another "
            "file; export it again"
        )
    if runs_on_nvidia(provider):
        if b"DynamicQuantizeLinear" in raw:  # and the products of its results, which the provider has no kernels for
            raise EngineError(
                f"{part} computes its int8 scales anew for each image, which {provider} leaves to the CPU; export with "
                "--precision int8 --engine tensorrt --calibrate DATA, or ask for cpu"
            )
        switch_off_tf32()
        _preload_once(ort)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # weights in another file would be looked for in the working directory; below this there is none
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    if not plain:
        _share_allocator(ort)
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        if hardware.int8_products_saturate():  # asked to where they are exact, it would take three times the time
            options.add_session_config_entry("session.x64quantprecision", "1")
        if provider == CPU:
            options.add_session_config_entry("session.use_env_allocators", "1")
    providers = providers_of(provider, precision=precision, signature=signature, max_batch=max_batch, stream=stream)
    try:
        # with its fall-back ONNX Runtime would print the reason and go on with other providers
        session = ort.InferenceSession(raw, options, providers=providers, enable_fallback=0)
    except Exception as error:
        raise EngineError(f"{part} does not load in onnxruntime {ort.__version__}: {first_line(error)}") from error
    if provider not in session.get_providers():
        why = why_not(ort, provider) or f"{', '.join(session.get_providers())} did"
        raise EngineError(f"{part}: {provider} did not load ({why}); see 'ls-edge doctor', or ask for cpu")
    session.disable_fallback()
    # Kept by ONNX Runtime for a fall-back that is switched off here; a second copy of all weights on a small board.
    session._model_bytes = None
    return session


class Buffer:
    """Memory that sessions are bound to once and that is written and read by copying.

    Binding for each run costs ten times a copy of a vision transformer's tokens: its code has left the cache by
    the time that a block has run.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], device: str, memory: np.ndarray | None = None) -> None:
        """Zeros in the memory called ``device``, see :func:`ls_edge.engines.providers.memory_of`.

        ``memory``, contiguous, of this type and shape, is used instead of new memory; for the device ``cpu`` only.
        """
        self._array = np.zeros(shape, dtype) if memory is None else memory
        self._aliased = device == "cpu"
        make = onnxruntime_module().OrtValue.ortvalue_from_numpy
        self.value: Any = make(self._array) if self._aliased else make(self._array, device, 0)

    def write(self, array: np.ndarray | int) -> None:
        """Copy in an array of this very shape and type, or fill with a number."""
        if self._aliased:
            self._array[...] = array
        else:
            self.value.update_inplace(
                np.ascontiguousarray(np.broadcast_to(array, self._array.shape), self._array.dtype)
            )

    def read(self, out: np.ndarray | None = None) -> np.ndarray:
        """Copy out, into ``out`` or a new array."""
        found: np.ndarray = self._array if self._aliased else self.value.numpy()
        if out is None:
            return found.copy() if self._aliased else found
        np.copyto(out, found)
        return out


class Buffers:
    """Buffers shared by the engines that one thread uses, by role, type and shape; freed with their last user."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[str, str, tuple[int, ...], str], Buffer] = WeakValueDictionary()

    def get(self, role: str, dtype: str, shape: tuple[int, ...], device: str) -> Buffer:
        """The one for this role; its contents are undefined."""
        key = (role, dtype, shape, device)
        buffer = self._known.get(key)
        if buffer is None:
            buffer = self._known[key] = Buffer(dtype, shape, device)
        return buffer


@dataclass(frozen=True)
class Binding:
    """An engine at one batch size, bound to buffers."""

    inputs: dict[str, Buffer]
    output: Buffer
    step: Callable[[], None]
    """Run the engine on the buffers."""


class OnnxEngine:
    """A part in an ONNX Runtime session."""

    kind = "onnx"

    def __init__(
        self,
        raw: bytes,
        part: str,
        signature: Signature,
        *,
        provider: str,
        threads: int,
        buffers: Buffers | None = None,
        precision: str = "fp32",
        max_batch: int = 1,
        workspace: CudaWorkspace | None = None,
    ) -> None:
        """Open ``raw``; raises :class:`EngineError` naming the part where it, or the provider, does not load.

        With a ``workspace``, for the CUDA provider alone, tokens stay on the GPU between engines that share it.
        ``precision`` and ``max_batch`` are for providers that build engines.
        """
        self.part = part
        self.signature = signature
        self.threads = threads
        self.workspace = workspace
        self._session: Any = open_session(
            raw, part, provider=provider, threads=threads, precision=precision, signature=signature,
            max_batch=max_batch, stream=None if workspace is None else workspace.stream,
        )  # fmt: skip
        self.provider = provider
        if workspace is not None:
            workspace.hold()
        self._check_signature()
        self._buffers = buffers if buffers is not None else Buffers()
        self._bindings: OrderedDict[int, Binding] = OrderedDict()
        self._queued: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        """Bindings of :meth:`enqueue` by batch and addresses."""
        self._run_options: Any = None

    @property
    def session(self) -> Any:
        """The ``onnxruntime.InferenceSession``; raises :class:`EngineError` after :meth:`close`."""
        if self._session is None:
            raise EngineError(f"the engine of {self.part} was closed; open it again")
        return self._session

    @property
    def device(self) -> str:
        """Where inputs and outputs are, as ONNX Runtime names the memory."""
        return memory_of(self.provider)

    def run(self, inputs: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Run on arrays that are checked against the manifest; raises :class:`EngineError`.

        ``out`` must be of the output's type and shape.
        """
        batch = check_inputs(self.part, self.signature, inputs)
        check_out(self.part, self.signature.output, batch, out)
        if self.workspace is not None:
            assert self.session is not None
            result = self.workspace.visit([self], inputs[self.signature.inputs[0].name], inputs.get("slot"))
            if out is None:
                return result
            np.copyto(out, result)
            return out
        binding = self._bound(batch)
        for name, array in inputs.items():
            binding.inputs[name].write(array)
        binding.step()
        return binding.output.read(out)

    def enqueue(self, batch: int, addresses: Mapping[str, int]) -> None:
        """Queue one run on the workspace's stream; see :class:`~ls_edge.engines.cuda_memory.DeviceEngine`."""
        key = (batch, *addresses.values())
        binding = self._queued.pop(key, None)
        if binding is None:
            binding = self.session.io_binding()
            for tensor in self.signature.inputs:
                binding.bind_input(
                    tensor.name, "cuda", 0, np.dtype(tensor.dtype).type, tensor.shape(batch), addresses[tensor.name]
                )
            output = self.signature.output
            binding.bind_output(
                output.name, "cuda", 0, np.dtype(output.dtype).type, output.shape(batch), addresses[output.name]
            )
        self._queued[key] = binding
        while len(self._queued) > KEPT_QUEUED:
            self._queued.popitem(last=False)
        if self._run_options is None:
            self._run_options = onnxruntime_module().RunOptions()
            # the visit waits once, at its end
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        try:
            self.session.run_with_iobinding(binding, self._run_options)
        except Exception as error:
            raise EngineError(f"{self.part} failed on {self.provider}: {first_line(error)}") from error

    def bind(self, inputs: Mapping[str, Buffer], output: Buffer) -> Callable[[], None]:
        """Return a call that runs on these very buffers, which are not checked, and allocates nothing."""
        session, binding = self.session, self.session.io_binding()
        for name, buffer in inputs.items():
            binding.bind_ortvalue_input(name, buffer.value)
        binding.bind_ortvalue_output(self.signature.output.name, output.value)

        def step() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                raise EngineError(f"{self.part} failed on {self.provider}: {first_line(error)}") from error

        return step

    def close(self) -> None:
        """Free memory and threads; a second call does nothing."""
        self._bindings.clear()
        self._queued.clear()
        if self._session is not None and self.workspace is not None:
            self._session = None  # before the stream that it runs on
            self.workspace.release()
        self._session = None

    def _bound(self, batch: int) -> Binding:
        """The binding for a batch size, from the cache of the most recently used ones."""
        binding = self._bindings.get(batch)
        if binding is None:
            get, output = self._buffers.get, self.signature.output
            inputs = {t.name: get(t.name, t.dtype, t.shape(batch), self.device) for t in self.signature.inputs}
            out = get("output", output.dtype, output.shape(batch), self.device)
            binding = self._bindings[batch] = Binding(inputs, out, self.bind(inputs, out))
            while len(self._bindings) > KEPT_BATCH_SIZES:
                self._bindings.popitem(last=False)
        elif len(self._bindings) > 1:
            self._bindings.move_to_end(batch)
        return binding

    def _check_signature(self) -> None:
        def found(args: Any) -> list[Tensor]:
            return [
                Tensor(a.name, _TYPES.get(a.type, a.type), tuple(d if isinstance(d, int) else -1 for d in a.shape[1:]))
                for a in args
            ]

        for what, args, wanted in (
            ("inputs", self._session.get_inputs(), self.signature.inputs),
            ("outputs", self._session.get_outputs(), (self.signature.output,)),
        ):
            if found(args) != list(wanted):
                theirs, ours = ", ".join(map(str, found(args))), ", ".join(map(str, wanted))
                raise EngineError(
                    f"{self.part}: the file's {what} are {theirs}, by the manifest {ours}; export the bundle again"
                )


def onnxruntime_module() -> Any:
    """The package ``onnxruntime``; raises :class:`EngineError` where it is not installed or does not load.

    Its telemetry, which newer builds have on, is switched off unless ``ORT_DISABLE_TELEMETRY`` is set already.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(
            f"onnxruntime does not load ({first_line(error)}); to install it: {engine_advice()}"
        ) from None
    return onnxruntime


_preloaded = False


def _preload_once(ort: Any) -> None:
    """Find pip's CUDA libraries before the first session that needs them."""
    global _preloaded
    if not _preloaded:
        _preloaded = True
        said = preload(ort)
        if said:
            log.debug("preloading CUDA libraries", extra={"text": said})


_allocator_shared = False


def _share_allocator(ort: Any) -> None:
    """One CPU memory arena for all sessions of the process; whoever registered one before us keeps theirs."""
    global _allocator_shared
    if _allocator_shared:
        return
    _allocator_shared = True
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with contextlib.suppress(Exception):  # registered already: that one is shared
        ort.create_and_register_allocator(info, None)
