"""A double of the CUDA runtime library for tests, strict where CUDA is lenient; see tests/doubles/README.md.

:data:`LIBRARY` has the functions as C functions, with the parameters of CUDA's own header (``signatures.json``).
"""

import atexit
import bisect
import ctypes
import enum
import json
import os
import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

cudaStreamNonBlocking = 1
_FREED = 0xDD
_FRESH = 0xCD


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchFailure = 719
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorUnknown = 999


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


STICKY = (700, 702, 710, 714, 715, 716, 717, 718, 719, 810, 911, 999)
"""Errors after which "any further CUDA work will return the same error" (driver_types.h of CUDA 12.6), and 999."""


class Fault(Exception):
    """An error that CUDA would report by its code, or undefined behavior."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


@dataclass
class Allocation:
    kind: str
    address: int
    size: int
    bytes: np.ndarray
    freed: bool = False


@dataclass(eq=False)
class _Handle:
    number: int

    def __int__(self):
        return self.number

    def getPtr(self):
        return self.number


class cudaStream_t(_Handle):
    pass


class cudaGraph_t(_Handle):
    pass


class cudaGraphExec_t(_Handle):
    pass


@dataclass
class Stream:
    queue: list = field(default_factory=list)
    capturing: list | None = None


class Device:
    """The one GPU, its memory and its streams."""

    def __init__(self):
        self.name, self.major, self.minor = "Double of a GPU", 8, 7
        self.memory = 1 << 30
        self.driver, self.runtime = 12060, int(os.environ.get("CUDA_DOUBLE_RUNTIME", "12060"))
        self.reset()

    def reset(self):
        self.eager = False
        self.integrated = 0
        self.refuse = {}
        """Errors to return, by function: one for all calls, or a list with one (or None) for each of the next calls."""
        self.page_cache = 0
        """Bytes that Linux would give back, which cudaMemGetInfo counts as used on an integrated GPU."""
        self.multiprocessors = 8
        self.counts = Counter()
        self.misuse = []
        """Errors that real hardware may not notice."""
        self.allocations = []
        self._addresses = []
        self.streams, self.graphs, self.execs = {}, {}, {}
        self.sticky = None
        self._next_device, self._next_handle = 1 << 52, 0x5000

    def left(self):
        """Allocations that were not freed."""
        alive = [f"{a.kind} memory of {a.size} bytes" for a in self.allocations if not a.freed]
        handles = (("stream", self.streams), ("graph", self.graphs), ("executable graph", self.execs))
        return alive + [f"{what} {number}" for what, table in handles for number in table]

    def allocate(self, kind, size):
        used = sum(a.size for a in self.allocations if a.kind == "device" and not a.freed)
        if size <= 0 or (kind == "device" and used + size > self.memory):
            raise Fault(cudaError_t.cudaErrorMemoryAllocation, "out of memory")
        if any(stream.capturing is not None for stream in self.streams.values()):
            raise Fault(
                cudaError_t.cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"
            )
        if kind == "device":
            address, memory = self._next_device, np.empty(size, np.uint8)
            self._next_device += -(-size // 512) * 512 + 4096
        else:
            room = np.empty(size + 4096, np.uint8)
            skip = -room.ctypes.data % 4096
            memory = room[skip : skip + size]
            address = memory.ctypes.data
        memory.fill(_FRESH)
        return self._add(Allocation(kind, address, size, memory))

    def _add(self, made):
        place = bisect.bisect(self._addresses, made.address)
        self._addresses.insert(place, made.address)
        self.allocations.insert(place, made)
        return made

    def free(self, kind, address):
        found = [a for a in self.allocations if a.address == address and a.kind == kind]
        if not found:
            raise Fault(cudaError_t.cudaErrorInvalidValue, f"{address:#x} is not allocated {kind} memory")
        if found[0].freed:
            raise Fault(cudaError_t.cudaErrorInvalidValue, f"{address:#x} was already freed")
        if any(stream.queue for stream in self.streams.values()):
            self.misuse.append(f"{kind} memory was freed while work was queued")
        found[0].freed = True
        found[0].bytes.fill(_FREED)

    def span(self, kind, address, size):
        """Return the bytes at an address, which must be in one allocation that is not freed."""
        place = bisect.bisect(self._addresses, address) - 1
        found = self.allocations[place] if place >= 0 else None
        if found is None or address >= found.address + found.size:
            raise Fault(cudaError_t.cudaErrorIllegalAddress, f"{address:#x} is not {kind} memory")
        if found.kind != kind:
            raise Fault(cudaError_t.cudaErrorIllegalAddress, f"{address:#x} is {found.kind} memory, not {kind}")
        if found.freed:
            raise Fault(cudaError_t.cudaErrorIllegalAddress, f"{address:#x} was freed")
        start = address - found.address
        if start + size > found.size:
            raise Fault(cudaError_t.cudaErrorIllegalAddress, f"{size} bytes at {address:#x} end beyond the allocation")
        return found.bytes[start : start + size]

    def stream(self, handle):
        found = self.streams.get(int(handle))
        if found is None:
            raise Fault(cudaError_t.cudaErrorInvalidResourceHandle, f"{int(handle)} is no stream, or was destroyed")
        return found

    def enqueue(self, handle, work):
        """Queue ``work``, or record it."""
        stream = self.stream(handle)
        if stream.capturing is not None:
            stream.capturing.append(work)
        elif self.eager:
            self._do(work)
        else:
            stream.queue.append(work)

    def synchronize(self, handle):
        stream = self.stream(handle)
        if stream.capturing is not None:
            raise Fault(
                cudaError_t.cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"
            )
        self.counts["synchronize"] += 1
        queue, stream.queue = stream.queue, []
        for work in queue:
            self._do(work)

    def _do(self, work):
        try:
            work()
        except Fault as fault:
            self.sticky = fault
            raise

    def handle(self, kind):
        self._next_handle += 0x10
        return kind(self._next_handle)


DEVICE = Device()
_THREAD = threading.local()


def last_error():
    """Return the text of the error that this thread has not taken with cudaGetLastError, or an empty string.

    "Returns the last error that has been produced by any of the runtime calls in the same instance of the CUDA Runtime
    library in the host thread and resets it to cudaSuccess" (cuda_runtime_api.h of CUDA 12.6). Libraries that launch
    kernels ask for it afterwards, so an error that another library left fails their launch.
    """
    fault = DEVICE.sticky or getattr(_THREAD, "fault", None)
    return str(fault) if fault is not None else ""


def _call(name, body):
    try:
        refused = DEVICE.refuse.get(name)
        if isinstance(refused, list):
            refused = refused.pop(0) if refused else None
        if refused is not None:
            fault = Fault(*refused)
            if fault.code in STICKY:
                DEVICE.sticky = fault
            raise fault
        if DEVICE.sticky is not None:
            raise DEVICE.sticky
        value = body()
    except Fault as fault:
        _THREAD.fault = fault
        DEVICE.last = str(fault)
        return (fault.code, None) if name in _GIVING else (fault.code,)
    return (cudaError_t.cudaSuccess, value) if name in _GIVING else (cudaError_t.cudaSuccess,)


_GIVING = {
    "cudaMalloc", "cudaHostAlloc", "cudaStreamCreateWithFlags", "cudaStreamEndCapture",
    "cudaGraphInstantiateWithFlags", "cudaGetDevice", "cudaGetDeviceCount", "cudaGetDeviceProperties",
    "cudaDeviceGetAttribute", "cudaDriverGetVersion", "cudaRuntimeGetVersion", "cudaMemGetInfo",
}  # fmt: skip


def cudaMalloc(size):
    return _call("cudaMalloc", lambda: DEVICE.allocate("device", size).address)


def cudaHostAlloc(size, flags):
    return _call("cudaHostAlloc", lambda: DEVICE.allocate("pinned", size).address)


def cudaFree(devPtr):
    return _call("cudaFree", lambda: DEVICE.free("device", devPtr) if devPtr else None)


def cudaFreeHost(ptr):
    return _call("cudaFreeHost", lambda: DEVICE.free("pinned", ptr))


def cudaMemcpyAsync(dst, src, count, kind, stream):
    def body():
        into, out_of = {
            cudaMemcpyKind.cudaMemcpyHostToDevice: ("device", "pinned"),
            cudaMemcpyKind.cudaMemcpyDeviceToHost: ("pinned", "device"),
            cudaMemcpyKind.cudaMemcpyDeviceToDevice: ("device", "device"),
        }[kind]
        DEVICE.span(into, dst, count)
        DEVICE.span(out_of, src, count)
        DEVICE.counts[cudaMemcpyKind(kind).name] += 1

        def work():
            DEVICE.span(into, dst, count)[...] = DEVICE.span(out_of, src, count)

        DEVICE.enqueue(stream, work)

    return _call("cudaMemcpyAsync", body)


def cudaStreamCreateWithFlags(flags):
    def body():
        made = DEVICE.handle(cudaStream_t)
        DEVICE.streams[int(made)] = Stream()
        return made

    return _call("cudaStreamCreateWithFlags", body)


def cudaStreamDestroy(stream):
    def body():
        if DEVICE.stream(stream).queue:
            DEVICE.misuse.append("a stream was destroyed while work was queued on it")
        del DEVICE.streams[int(stream)]

    return _call("cudaStreamDestroy", body)


def cudaStreamSynchronize(stream):
    return _call("cudaStreamSynchronize", lambda: DEVICE.synchronize(stream))


def cudaStreamBeginCapture(stream, mode):
    def body():
        DEVICE.stream(stream).capturing = []

    return _call("cudaStreamBeginCapture", body)


def cudaStreamEndCapture(stream):
    def body():
        found = DEVICE.stream(stream)
        if found.capturing is None:
            raise Fault(cudaError_t.cudaErrorInvalidValue, "the stream does not capture")
        made, work = DEVICE.handle(cudaGraph_t), found.capturing
        found.capturing = None
        DEVICE.graphs[int(made)] = work
        return made

    return _call("cudaStreamEndCapture", body)


def cudaGraphInstantiateWithFlags(graph, flags):
    def body():
        made = DEVICE.handle(cudaGraphExec_t)
        DEVICE.execs[int(made)] = list(DEVICE.graphs[int(graph)])
        return made

    return _call("cudaGraphInstantiateWithFlags", body)


def cudaGraphLaunch(graphExec, stream):
    def body():
        recorded = DEVICE.execs.get(int(graphExec))
        if recorded is None:
            raise Fault(cudaError_t.cudaErrorInvalidResourceHandle, "the graph was destroyed")
        DEVICE.counts["graph"] += 1
        for work in recorded:
            DEVICE.enqueue(stream, work)

    return _call("cudaGraphLaunch", body)


def cudaGraphDestroy(graph):
    return _call("cudaGraphDestroy", lambda: DEVICE.graphs.pop(int(graph)) and None)


def cudaGraphExecDestroy(graphExec):
    def body():
        if any(stream.queue for stream in DEVICE.streams.values()):
            DEVICE.misuse.append("a graph was destroyed while work was queued")
        DEVICE.execs.pop(int(graphExec))

    return _call("cudaGraphExecDestroy", body)


def cudaGetErrorString(error):
    return getattr(DEVICE, "last", f"error {error}").encode()


def cudaGetLastError():
    fault, _THREAD.fault = DEVICE.sticky or getattr(_THREAD, "fault", None), None
    return (cudaError_t.cudaSuccess if fault is None else fault.code,)


def cudaGetDevice():
    return _call("cudaGetDevice", lambda: 0)


def cudaGetDeviceCount():
    def body():
        if DEVICE.runtime > DEVICE.driver:  # as on a Jetson, where minor versions count too
            text = "CUDA driver version is insufficient for CUDA runtime version"
            raise Fault(cudaError_t.cudaErrorInsufficientDriver, text)
        return 1

    return _call("cudaGetDeviceCount", body)


def cudaGetDeviceProperties(device):
    return _call("cudaGetDeviceProperties", lambda: DEVICE.name.encode())


def cudaDeviceGetAttribute(attr, device):
    known = {75: DEVICE.major, 76: DEVICE.minor, 18: DEVICE.integrated, 16: DEVICE.multiprocessors}
    return _call("cudaDeviceGetAttribute", lambda: known[attr])


def cudaMemGetInfo():
    used = sum(a.size for a in DEVICE.allocations if a.kind == "device" and not a.freed)
    return _call("cudaMemGetInfo", lambda: (DEVICE.memory - used - DEVICE.page_cache, DEVICE.memory))


def cudaDriverGetVersion():
    return _call("cudaDriverGetVersion", lambda: DEVICE.driver)


def cudaRuntimeGetVersion():
    return _call("cudaRuntimeGetVersion", lambda: DEVICE.runtime)


def parameters(prototype):
    """Names and C types of the parameters in a prototype of CUDA's header, and whether they are for results."""
    found = []
    inside = re.search(r"\((.*)\)", prototype)[1].strip().removeprefix("void")
    for text in filter(None, inside.split(", ")):
        kind, name = re.fullmatch(r"(.*?)(\w+)", re.sub(r" __dv\(\w+\)", "", text)).groups()
        is_out = bool(re.search(r"\*\*|(_t|int|Prop) \*", kind))
        if "*" in kind or re.match(r"cuda(Stream|Graph|GraphExec)_t", kind):
            made = ctypes.c_void_p
        elif "unsigned long long" in kind:
            made = ctypes.c_ulonglong
        else:
            made = {"size_t": ctypes.c_size_t, "unsigned int": ctypes.c_uint}.get(kind.strip(), ctypes.c_int)
        found.append((name, kind.strip(), made, is_out))
    return found


class Library:
    """Result of ``ctypes.CDLL`` for the library: C functions that call those of this module."""

    def __init__(self):
        recorded = json.loads(Path(__file__).with_name("signatures.json").read_text())
        self._prototypes = next(value for key, value in recorded.items() if key.startswith("cuda "))
        self._words = []

    def __getattr__(self, name):
        if name not in self._prototypes or name not in globals():
            raise AttributeError(f"undefined symbol: {name}")
        takes = parameters(self._prototypes[name][0])

        def run(*given):
            given = [value or 0 for value in given]
            if name == "cudaGetErrorString":
                self._words.append(ctypes.create_string_buffer(cudaGetErrorString(*given)))
                return ctypes.addressof(self._words[-1])
            inputs = [value for value, (*_, is_out) in zip(given, takes, strict=True) if not is_out]
            code, *values = globals()[name](*inputs)
            if code == cudaError_t.cudaSuccess:
                values = values[0] if values and isinstance(values[0], tuple) else values
                places = [(address, kind) for address, (_, kind, _, is_out) in zip(given, takes, strict=True) if is_out]
                for value, (address, kind) in zip(values, places, strict=True):
                    _write(address, kind, value)
            return int(code)

        gives = ctypes.c_void_p if name == "cudaGetErrorString" else ctypes.c_int
        function = ctypes.CFUNCTYPE(gives, *(made for _, _, made, _ in takes))(run)
        self.__dict__[name] = function
        return function


def _write(address, kind, value):
    """Write a result to an address, as the type of the parameter says."""
    if "Prop" in kind:
        ctypes.memmove(address, value + b"\0", len(value) + 1)
    else:
        made = ctypes.c_int if kind == "int *" else ctypes.c_size_t
        made.from_address(address).value = int(value)


LIBRARY = Library()


@atexit.register
def _at_exit():
    """Report what a process left; ``CUDA_DOUBLE_REPORT`` names a file for the counts."""
    for what in DEVICE.left() + DEVICE.misuse:
        print(f"double of CUDA: left at exit: {what}", file=sys.stderr)
    if "CUDA_DOUBLE_REPORT" in os.environ:
        with open(os.environ["CUDA_DOUBLE_REPORT"], "w") as stream:
            json.dump({"left": DEVICE.left(), "misuse": DEVICE.misuse, "counts": DEVICE.counts}, stream)
