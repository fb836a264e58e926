"""Calls of the installed CUDA runtime library through ctypes, which releases the GIL during each call.

TensorRT, JetPack, and the CUDA packages of pip each provide ``libcudart``. The library must not be newer than the
driver supports; on a Jetson, not even by a minor version. The first candidate that works is used.

Functions and parameters are compared with the headers of CUDA 12.6, 12.9, and 13.0
(``tests/engines/cuda/test_runtime.py``). They ran on an H200 with CUDA 13.0 (``test_on_a_gpu.py``), but not on a
Jetson yet.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ls_edge.core.errors import DeviceLost, EngineError
from ls_edge.device.hardware import jetson_linux
from ls_edge.device.requirements import GPU_MEMORY_ADVICE

_POINTER, _SIZE, _ENUM = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_PROPERTIES = ctypes.c_char * 8192
"""Space for ``cudaDeviceProp``, which has different fields in each release but always begins with the name."""


class _Out:
    """Output parameter of a type."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cudaGetLastError": (),
    "cudaGetDeviceCount": (_Out(ctypes.c_int),),
    "cudaGetDevice": (_Out(ctypes.c_int),),
    "cudaGetDeviceProperties": (_Out(_PROPERTIES), ctypes.c_int),
    "cudaDeviceGetAttribute": (_Out(ctypes.c_int), _ENUM, ctypes.c_int),
    "cudaDriverGetVersion": (_Out(ctypes.c_int),),
    "cudaRuntimeGetVersion": (_Out(ctypes.c_int),),
    "cudaMemGetInfo": (_Out(_SIZE), _Out(_SIZE)),
    "cudaMalloc": (_Out(_POINTER), _SIZE),
    "cudaFree": (_POINTER,),
    "cudaHostAlloc": (_Out(_POINTER), _SIZE, ctypes.c_uint),
    "cudaFreeHost": (_POINTER,),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _ENUM, _POINTER),
    "cudaStreamCreateWithFlags": (_Out(_POINTER), ctypes.c_uint),
    "cudaStreamDestroy": (_POINTER,),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaStreamBeginCapture": (_POINTER, _ENUM),
    "cudaStreamEndCapture": (_POINTER, _Out(_POINTER)),
    "cudaGraphInstantiateWithFlags": (_Out(_POINTER), _POINTER, ctypes.c_ulonglong),
    "cudaGraphLaunch": (_POINTER, _POINTER),
    "cudaGraphExecDestroy": (_POINTER,),
    "cudaGraphDestroy": (_POINTER,),
}
"""Parameters of each function in use; all functions return an error code."""
TO_DEVICE, TO_HOST = 1, 2
"""``cudaMemcpyKind``."""
NON_BLOCKING = 1
"""``cudaStreamNonBlocking``."""
THREAD_LOCAL = 1
"""``cudaStreamCaptureModeThreadLocal``."""
CAPABILITY_MAJOR, CAPABILITY_MINOR, INTEGRATED, MULTIPROCESSORS = 75, 76, 18, 16
"""``cudaDeviceAttr``."""
DRIVER_TOO_OLD = 35
"""``cudaErrorInsufficientDriver``: the driver does not support this runtime."""
DRIVER = "libcuda.so.1"
"""The driver's library, by the name under which every runtime opens it."""
NO_DRIVER = "there is no NVIDIA driver"
OUT_OF_MEMORY = 2
"""``cudaErrorMemoryAllocation``."""
LOST = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
"""Errors after which all calls of the process fail: those for which ``driver_types.h`` of CUDA 12.6 to 13.0 says that
the process "must be terminated and relaunched", and ``cudaErrorUnknown``."""


class CudaRuntime:
    """A loaded CUDA runtime library."""

    def __init__(self, library: Any, path: str) -> None:
        """Declare the functions of ``library``; raise AttributeError if one is missing."""
        self.path = path
        library.cudaGetErrorString.restype, library.cudaGetErrorString.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        self._words = library.cudaGetErrorString
        self._functions = {name: getattr(library, name) for name in FUNCTIONS}
        for name, function in self._functions.items():
            kinds = FUNCTIONS[name]
            function.argtypes = [ctypes.POINTER(kind.kind) if isinstance(kind, _Out) else kind for kind in kinds]
            function.restype = ctypes.c_int

    def call(self, name: str, *given: Any, doing: str) -> Any:
        """Call a function; return its output, a list of several outputs, or None.

        Raise :class:`EngineError`, or :class:`DeviceLost` if only a new process can use the GPU again.
        """
        code, outputs = self._call(name, given)
        if code:
            words = f"CUDA failed while {doing}: {self._words(code).decode(errors='replace')}"
            if code in LOST:
                raise DeviceLost(f"{words} (error {code}); this process cannot use the GPU any more, start it again")
            advice = GPU_MEMORY_ADVICE if code == OUT_OF_MEMORY and jetson_linux() else "see 'ls-edge doctor'"
            raise EngineError(f"{words}; {advice}, or run with --engine onnx")
        values = [output.value or 0 if isinstance(output, _POINTER) else output.value for output in outputs]
        return values if len(values) > 1 else values[0] if values else None

    def attempt(self, name: str, *given: Any) -> int:
        """Call a function that may fail, such as freeing memory; return the error code."""
        return self._call(name, given)[0]

    def _call(self, name: str, given: tuple[Any, ...]) -> tuple[int, list[Any]]:
        inputs, outputs, arguments = iter(given), [], []
        for kind in FUNCTIONS[name]:
            if isinstance(kind, _Out):
                outputs.append(kind.kind())
                arguments.append(ctypes.byref(outputs[-1]))
            else:
                arguments.append(next(inputs))
        code = int(self._functions[name](*arguments))
        if code:  # otherwise, other libraries would report it as their own error after a launch
            self._functions["cudaGetLastError"]()
        return code, outputs

    def is_integrated(self) -> bool:
        """Return whether the GPU shares the host's memory, as on a Jetson."""
        return bool(self.attribute(INTEGRATED))

    def attribute(self, which: int) -> int:
        """Return an attribute of the current GPU."""
        number = self.call("cudaGetDevice", doing="looking for a GPU")
        return int(self.call("cudaDeviceGetAttribute", which, number, doing="looking at the GPU"))

    def release_of(self, which: str) -> str:
        """Return the CUDA release of the ``Driver`` or the ``Runtime``, such as ``12.6``."""
        number = int(self.call(f"cuda{which}GetVersion", doing="asking for versions"))
        return f"{number // 1000}.{number % 1000 // 10}"


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """Return the first installed CUDA runtime that the driver supports; raise :class:`EngineError` if there is none."""
    unusable, problems = "the CUDA runtime cannot be used", list[str]()
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        raise EngineError(f"{unusable}: {NO_DRIVER}; install NVIDIA's driver, or run with --engine onnx") from None
    for path in _candidates():
        try:
            found = CudaRuntime(ctypes.CDLL(path), path)
        except (OSError, AttributeError) as error:
            problems.append(f"{path}: {error}")
            continue
        code = found.attempt("cudaGetDeviceCount")
        if code != DRIVER_TOO_OLD:
            return found
        runtime, driver = found.release_of("Runtime"), found.release_of("Driver")
        problems.insert(0, f"CUDA {runtime} is newer than the driver supports ({driver}, error 35): {path}")
    why = problems[0] if problems else "libcudart is not installed"
    raise EngineError(f"{unusable}: {why}; install the one for this driver's CUDA release, or run with --engine onnx")


def _candidates() -> Iterator[str]:
    """Yield the system's CUDA runtimes, which match its driver best, then those from pip, newest first."""
    for folder in sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True):
        yield from sorted(map(str, folder.glob("libcudart.so.[0-9]*")), key=len)[:1]
    yield from ("libcudart.so.13", "libcudart.so.12")
    packages = importlib.util.find_spec("nvidia")
    for place in (packages and packages.submodule_search_locations) or ():
        yield from sorted(map(str, Path(place).glob("*/lib/libcudart.so.[0-9]*")), reverse=True)
