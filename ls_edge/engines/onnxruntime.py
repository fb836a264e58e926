"""ONNX Runtime engines: sessions with options for many small models in one process.

By default, each session has a thread pool that spins between runs and its own memory arena, so fourteen sessions in
sequence cost several times as much as one. Here, pools do not spin and all sessions share one arena. With the CUDA
provider, sessions share a stream and leave tokens on the GPU (:mod:`ls_edge.engines.cuda.memory`). The provider's CUDA
graphs are not used, because ONNX Runtime (at least up to 1.26) waits for the GPU after each. Opening fails if the
requested provider does not load, without a silent fallback, or if a part refers to weights in another file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ls_edge.core.bundle import OpenPart
from ls_edge.core.errors import THREAD_LIMIT, DeviceLost, EngineError
from ls_edge.device import hardware
from ls_edge.device.requirements import engine_advice
from ls_edge.device.threads import can_start_threads
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.cuda.runtime import cuda_runtime
from ls_edge.engines.engine import Signature, Tensor, check_inputs, contains, first_line, refuse_weights_elsewhere
from ls_edge.engines.providers import CPU, memory_of, preload, providers_of, why_not
from ls_edge.engines.tensorrt.build import PLAIN, EngineOptions

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
_DYNAMIC = re.compile(b"DynamicQuantizeLinear")
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}


def open_session(
    model: bytes | OpenPart,
    part: str,
    *,
    provider: str,
    threads: int | None,
    plain: bool = False,
    providers: Sequence[tuple[str, dict[str, str]]] | None = None,
) -> Any:
    """Create an ``InferenceSession`` of a model that runs on ``provider``; raise :class:`EngineError` if it cannot.

    ``plain`` keeps ONNX Runtime's default options, for comparisons only. ``providers`` is a result of
    :func:`ls_edge.engines.providers.providers_of`.
    """
    ort = onnxruntime_module()
    provider, asked = provider.partition(":")[0], provider
    _check_provider(ort, model, part, provider)
    if memory_of(provider) == "cuda":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # not all of NVIDIA's providers have an option
        preload(ort)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    entries = {
        # ONNX Runtime looks for weights in other files in the working directory; below this path, there are none.
        "session.model_external_initializers_file_folder_path": os.devnull,
        "session.load_model_format": "ONNX",  # ONNX Runtime's own format would not be searched for such weights
    }
    if not plain:
        _share_allocator(ort)
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        entries |= {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
        if hardware.int8_products_saturate():  # on other processors, this would make products three times slower
            entries["session.x64quantprecision"] = "1"
        if provider == CPU:
            entries["session.use_env_allocators"] = "1"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if not can_start_threads((threads or os.cpu_count() or 1) - 1):
        raise EngineError(f"{part} does not load in onnxruntime {ort.__version__}: {THREAD_LIMIT}")
    try:
        with _freed_memory_returned():
            # With the fallback, ONNX Runtime would print the reason and continue with other providers.
            session = ort.InferenceSession(
                model.path if isinstance(model, OpenPart) else model,
                options,
                providers=providers or providers_of(asked),
                enable_fallback=0,
            )
    except Exception as error:
        raise EngineError(f"{part} does not load in onnxruntime {ort.__version__}: {first_line(error)}") from error
    if provider not in session.get_providers():
        why = why_not(ort, provider) or f"{', '.join(session.get_providers())} did"
        raise EngineError(f"{part}: {asked} did not load ({why}); see 'ls-edge doctor', or use cpu")
    session.disable_fallback()
    # The session keeps these bytes for the disabled fallback: a second copy of all weights on a small board.
    session._model_bytes = None
    return session


def _check_provider(ort: Any, model: bytes | OpenPart, part: str, provider: str) -> None:
    """Raise :class:`EngineError` if ONNX Runtime does not have the provider, or the provider cannot run the model."""
    available = ort.get_available_providers()
    if provider not in available:
        raise EngineError(
            f"{provider} is not in this build of onnxruntime {ort.__version__} ({', '.join(available)}); install one "
            "that has it, or use cpu"
        )
    refuse_weights_elsewhere(model, part)  # before 1.24, ONNX Runtime reads files that are named by their full path
    # The provider has no kernels for DynamicQuantizeLinear, nor for products of its results.
    if memory_of(provider) == "cuda" and contains(model, _DYNAMIC):
        raise EngineError(
            f"{part} computes its int8 scales for each image, which {provider} leaves to the CPU; export with "
            "--precision int8 --engine tensorrt --calibrate DATA, or use cpu"
        )


class OnnxEngine:
    """A part that runs in an ONNX Runtime session."""

    kind = "onnx"

    def __init__(
        self,
        model: bytes | OpenPart,
        part: str,
        signature: Signature,
        *,
        provider: str,
        threads: int,
        options: EngineOptions = PLAIN,
        workspace: CudaWorkspace | None = None,
    ) -> None:
        """Open a model; raise :class:`EngineError` that names the part if it or the provider does not load.

        With a ``workspace`` (CUDA provider only), tokens stay on the GPU between engines that share it. ``options``
        limit GPU memory.
        """
        self.part = part
        self.signature = signature
        self.threads = threads
        self.workspace = workspace
        stream = None if workspace is None else workspace.stream
        providers = providers_of(provider, options=options, threads=threads, stream=stream)
        self._session: Any = open_session(model, part, provider=provider, threads=threads, providers=providers)
        self.provider = provider
        if workspace is not None:
            workspace.hold()
        self._check_signature()
        self._queued: dict[tuple[int, ...], Any] = {}
        """Bindings of :meth:`enqueue` by batch and addresses."""
        self._run_options: Any = None

    @property
    def session(self) -> Any:
        """The ``onnxruntime.InferenceSession``; raises :class:`EngineError` after :meth:`close`."""
        if self._session is None:
            raise EngineError(f"the engine of {self.part} was closed; open it again")
        return self._session

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Check the arrays against the manifest, run, and return a new array; raise :class:`EngineError`."""
        check_inputs(self.part, self.signature, inputs)
        session = self.session
        if self.workspace is not None:
            return self.workspace.visit([self], (inputs[self.signature.inputs[0].name],), inputs.get("slot"))
        try:
            found: np.ndarray = session.run(None, inputs)[0]
        except Exception as error:
            raise self._failed(error) from error
        return found

    def enqueue(self, batch: int, addresses: Mapping[str, int]) -> None:
        """Queue one run on the workspace's stream; see :class:`~ls_edge.engines.cuda.memory.DeviceEngine`."""
        key = (batch, *addresses.values())
        binding = self._queued.get(key)
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
        if self._run_options is None:
            self._run_options = onnxruntime_module().RunOptions()
            # A visit waits only once, at its end.
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        try:
            self.session.run_with_iobinding(binding, self._run_options)
        except Exception as error:
            raise self._failed(error) from error

    def bind(self, inputs: Mapping[str, Any], output: Any) -> Callable[[], None]:
        """Return a function that runs on these ``OrtValue`` objects without checks and allocations.

        Binding for each run would cost ten times as much as copying the tokens of a vision transformer.
        """
        session, binding = self.session, self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(self.signature.output.name, output)

        def step() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                raise self._failed(error) from error

        return step

    def close(self) -> None:
        """Free memory and threads; a second call does nothing."""
        self._queued.clear()
        if self._session is not None and self.workspace is not None:
            self._session = None  # must be freed before its stream
            self.workspace.release()
        self._session = None

    def _failed(self, error: Exception) -> EngineError:
        if self.workspace is None and memory_of(self.provider) == "cuda":
            try:
                cuda_runtime().call("cudaStreamSynchronize", 0, doing=f"running {self.part}")
            except DeviceLost as lost:
                return lost
            except EngineError:
                pass  # CUDA's own error does not stay, or its runtime is missing
        return EngineError(f"{self.part} failed on {self.provider}: {first_line(error)}")

    def _check_signature(self) -> None:
        for what, args, wanted in (
            ("inputs", self._session.get_inputs(), self.signature.inputs),
            ("outputs", self._session.get_outputs(), (self.signature.output,)),
        ):
            found = [
                Tensor(a.name, _TYPES.get(a.type, a.type), tuple(d if isinstance(d, int) else -1 for d in a.shape[1:]))
                for a in args
            ]
            if found != list(wanted):
                theirs, ours = ", ".join(map(str, found)), ", ".join(map(str, wanted))
                raise EngineError(
                    f"{self.part}: the file's {what} are {theirs}, by the manifest {ours}; export the bundle again"
                )


def onnxruntime_module() -> Any:
    """Import ``onnxruntime``; raise :class:`EngineError` if it is missing or does not load.

    Disable its telemetry, which newer builds enable, unless ``ORT_DISABLE_TELEMETRY`` is set.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
        from onnxruntime import InferenceSession  # noqa: F401  a folder that is called onnxruntime has none
    except ImportError as error:
        raise EngineError(
            f"onnxruntime does not load ({first_line(error)}); to install it: {engine_advice()}"
        ) from None
    return onnxruntime


@contextlib.contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Make glibc return what is freed inside to the system; it would keep copies of weights for later allocations.

    Other C libraries return large buffers anyway and have no such function. At the end, the thresholds become those
    that glibc itself reaches, with which arrays of tokens are allocated without a system call.
    """
    mallopt: Callable[[int, int], int] = getattr(_libc(), "mallopt", lambda _parameter, _value: 0)
    mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        getattr(_libc(), "malloc_trim", lambda _kept: 0)(0)  # 0.5 to 0.7 MiB for each block of a ViT-B in int8


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@functools.cache
def _share_allocator(ort: Any) -> None:
    """Register one CPU memory arena for all sessions of the process, unless one is registered already."""
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with contextlib.suppress(Exception):
        # The first run of a ViT-L leaves one piece, which later runs take; otherwise, its activations take 8 MiB more.
        ort.create_and_register_allocator(info, ort.OrtArenaCfg({"initial_chunk_size_bytes": 32 << 20}))
