"""ONNX Runtime sessions under options for many small models in one process.

With its defaults every session has a thread pool that spins between runs, and a memory arena: fourteen sessions
one after the other then cost many times what one costs. Here no pool spins and all sessions share one arena. A
provider that was asked for is the one that runs, or opening fails; nothing falls back in silence. Only the bytes given
count: a part that refers to weights in another file does not load.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ls_edge.engines.integrity import has_weights_elsewhere
from ls_edge.errors import EngineError
from ls_edge.requirements import engine_advice

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_SHORT = {"cpu": CPU, "cuda": CUDA, "tensorrt": "TensorrtExecutionProvider"}


def open_session(raw: bytes, part: str, *, provider: str, threads: int | None, plain: bool = False) -> Any:
    """Make an ``InferenceSession`` of ``raw`` that really runs on ``provider``; raises :class:`EngineError`.

    ``plain`` leaves ONNX Runtime's options at their defaults (for comparison only).
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
        if _int8_saturates():
            options.add_session_config_entry("session.x64quantprecision", "1")
        if provider == CPU:
            options.add_session_config_entry("session.use_env_allocators", "1")
    providers = [provider] if provider == CPU else [provider, CPU]
    try:
        session = ort.InferenceSession(raw, options, providers=providers)
    except Exception as error:
        raise EngineError(f"{part} does not load in onnxruntime {ort.__version__}: {first_line(error)}") from error
    if provider not in session.get_providers():
        raise EngineError(
            f"{part}: {provider} did not load ({', '.join(session.get_providers())} did); see 'ls-edge doctor', or "
            "ask for cpu"
        )
    session.disable_fallback()
    # Kept by ONNX Runtime for a fall-back that is switched off here; a second copy of all weights on a small board.
    session._model_bytes = None
    return session


def choose_provider(provider: str | None, trial: bytes) -> str:
    """Return the full name of the provider to use.

    None or ``auto``: CUDA where ``trial`` (some part's bytes) loads on it, else CPU. A name (``cpu``, ``cuda``,
    ``tensorrt`` or ONNX Runtime's own): that one; whether it loads shows when a part is opened.
    """
    if provider is not None and provider != "auto":
        return _SHORT.get(provider.lower(), provider)
    if CUDA in onnxruntime_module().get_available_providers():
        try:
            open_session(trial, "the trial", provider=CUDA, threads=1)
        except EngineError:
            return CPU
        return CUDA
    return CPU


class Buffer:
    """Memory that sessions are bound to once and that is written and read by copying.

    Binding for each run costs ten times a copy of a vision transformer's tokens: its code has left the cache by
    the time that a block has run.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], device: str) -> None:
        """Zeros on ``cpu`` or ``cuda``."""
        self._array = np.zeros(shape, dtype)
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
        """The one for this role; what was in it is anybody's guess."""
        key = (role, dtype, shape, device)
        buffer = self._known.get(key)
        if buffer is None:
            buffer = self._known[key] = Buffer(dtype, shape, device)
        return buffer


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


@functools.cache
def _int8_saturates() -> bool:
    """Whether this is an x86 without VNNI and AMX, whose fast int8 products saturate.

    ONNX Runtime can avoid them there. Asked to where they are exact it does so as well, at three times the time, so
    this is decided here.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = set(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())
    return "avx2" in flags and not flags & {"avx512_vnni", "avx_vnni", "amx_int8"}


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


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
