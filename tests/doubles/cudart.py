"""A double of the CUDA runtime library for tests, strict where CUDA is lenient; see tests/doubles/README.md.

:data:`LIBRARY` has the functions as C functions, with the parameters of CUDA's own header (``signatures.json``).
"""

import atexit
import ctypes
import itertools
import json
import os
import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# Values of ``cudaError_t``.
INVALID, NO_MEMORY, TOO_OLD, NO_HANDLE, ILLEGAL, CAPTURING = 1, 2, 35, 400, 700, 900
# Errors after which "any further CUDA work will return the same error" (driver_types.h of CUDA 12.6), and 999.
STICKY = (700, 702, 710, 714, 715, 716, 717, 718, 719, 810, 911, 999)
# Name, kind of the target, and kind of the source by ``cudaMemcpyKind``.
COPIES = {1: ("cudaMemcpyHostToDevice", "device", "pinned"), 2: ("cudaMemcpyDeviceToHost", "pinned", "device")}
ATTRIBUTES = {75: "major", 76: "minor", 18: "integrated", 16: "multiprocessors"}
_FREED, _FRESH = 0xDD, 0xCD


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


@dataclass
class Stream:
    queue: list = field(default_factory=list)
    capturing: list | None = None


class Device:
    """The one GPU, its memory and its streams."""

    def __init__(self):
        self.name, self.major, self.minor, self.memory = "Double of a GPU", 8, 7, 1 << 30
        self.driver, self.runtime = 12060, int(os.environ.get("CUDA_DOUBLE_RUNTIME", "12060"))
        self.reset()

    def reset(self):
        self.eager, self.integrated, self.multiprocessors = False, 0, 8
        self.page_cache = 0  # bytes that Linux would give back, which cudaMemGetInfo counts as used
        self.refuse, self.misuse = {}, []  # errors to return by function; errors that real hardware may not notice
        self.counts, self.allocations, self.sticky = Counter(), [], None
        self.streams, self.graphs, self.execs = {}, {}, {}
        self._next_device, self._handles = 1 << 52, itertools.count(0x5000, 0x10)

    def left(self):
        """Allocations and handles that were not freed."""
        alive = [f"{a.kind} memory of {a.size} bytes" for a in self.allocations if not a.freed]
        handles = (("stream", self.streams), ("graph", self.graphs), ("executable graph", self.execs))
        return alive + [f"{what} {number}" for what, table in handles for number in table]

    def available(self):
        return self.memory - sum(a.size for a in self.allocations if a.kind == "device" and not a.freed)

    def allocate(self, kind, size):
        if size <= 0 or (kind == "device" and size > self.available()):
            raise Fault(NO_MEMORY, "out of memory")
        if any(stream.capturing is not None for stream in self.streams.values()):
            raise Fault(CAPTURING, "operation not permitted when stream is capturing")
        room = np.full(size + 4096, _FRESH, np.uint8)
        memory = room[-room.ctypes.data % 4096 :][:size]
        address = self._next_device if kind == "device" else memory.ctypes.data
        self._next_device += -(-size // 512) * 512 + 4096
        self.allocations.append(Allocation(kind, address, size, memory))
        return address

    def free(self, kind, address):
        found = next((a for a in self.allocations if a.address == address and a.kind == kind), None)
        if found is None or found.freed:
            why = f"is not allocated {kind} memory" if found is None else "was already freed"
            raise Fault(INVALID, f"{address:#x} {why}")
        self._warn_while_queued(f"{kind} memory was freed")
        found.freed = True
        found.bytes.fill(_FREED)

    def _warn_while_queued(self, what):
        if any(stream.queue for stream in self.streams.values()):
            self.misuse.append(f"{what} while work was queued")

    def span(self, kind, address, size):
        """Return the bytes at an address, which must be in one allocation that is not freed."""
        found = next((a for a in self.allocations if a.address <= address < a.address + a.size), None)
        if found is None or found.freed or found.kind != kind:
            what = "nothing" if found is None else "freed" if found.freed else f"{found.kind} memory"
            detail = "was freed" if what == "freed" else f"is {what}, not {kind} memory"
            raise Fault(ILLEGAL, f"{address:#x} {detail}")
        start = address - found.address
        if start + size > found.size:
            raise Fault(ILLEGAL, f"{size} bytes at {address:#x} end beyond the allocation")
        return found.bytes[start : start + size]

    def values(self, dtype, shape, address):
        """Return an array in the memory of the GPU."""
        dtype = np.dtype(dtype)
        return self.span("device", address, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

    def copy(self, target, source, size, kind, stream):
        name, into, out_of = COPIES[kind]

        def work(check=False):
            to, of = self.span(into, target, size), self.span(out_of, source, size)
            if not check:
                to[...] = of

        work(check=True)
        self.counts[name] += 1
        self.enqueue(stream, work)

    def stream(self, handle):
        if handle not in self.streams:
            raise Fault(NO_HANDLE, f"{handle} is no stream, or was destroyed")
        return self.streams[handle]

    def enqueue(self, handle, work):
        """Queue ``work``, or record it."""
        stream = self.stream(handle)
        if stream.capturing is not None:
            stream.capturing.append(work)
        else:
            stream.queue.append(work)
            if self.eager:
                self._work(stream)

    def synchronize(self, handle):
        stream = self.stream(handle)
        if stream.capturing is not None:
            raise Fault(CAPTURING, "operation not permitted when stream is capturing")
        self.counts["synchronize"] += 1
        self._work(stream)

    def _work(self, stream):
        queue, stream.queue = stream.queue, []
        try:
            for work in queue:
                work()
        except Fault as fault:
            self.sticky = fault
            raise

    def handle(self, table, value):
        number = next(self._handles)
        table[number] = value
        return number

    def end_capture(self, handle):
        stream = self.stream(handle)
        if stream.capturing is None:
            raise Fault(INVALID, "the stream does not capture")
        work, stream.capturing = stream.capturing, None
        return self.handle(self.graphs, work)

    def launch(self, graph, stream):
        if graph not in self.execs:
            raise Fault(NO_HANDLE, "the graph was destroyed")
        self.counts["graph"] += 1
        for work in self.execs[graph]:
            self.enqueue(stream, work)

    def destroy(self, what, table, number):
        self._warn_while_queued(f"a {what} was destroyed")
        if number not in table:
            raise Fault(NO_HANDLE, f"{number} is no {what}, or was destroyed")
        del table[number]

    def count(self):
        if self.runtime > self.driver:  # as on a Jetson, where minor versions count too
            raise Fault(TOO_OLD, "CUDA driver version is insufficient for CUDA runtime version")
        return 1


DEVICE = d = Device()
# Functions that return their results, which C has as parameters.
FUNCTIONS = {
    "cudaMalloc": lambda size: d.allocate("device", size),
    "cudaHostAlloc": lambda size, flags: d.allocate("pinned", size),
    "cudaFree": lambda address: address and d.free("device", address),
    "cudaFreeHost": lambda address: d.free("pinned", address),
    "cudaMemcpyAsync": d.copy,
    "cudaStreamCreateWithFlags": lambda flags: d.handle(d.streams, Stream()),
    "cudaStreamDestroy": lambda stream: d.destroy("stream", d.streams, stream),
    "cudaStreamSynchronize": d.synchronize,
    "cudaStreamBeginCapture": lambda stream, mode: setattr(d.stream(stream), "capturing", []),
    "cudaStreamEndCapture": d.end_capture,
    "cudaGraphInstantiateWithFlags": lambda graph, flags: d.handle(d.execs, d.graphs[graph]),
    "cudaGraphLaunch": lambda graph, stream: d.launch(graph, stream),
    "cudaGraphDestroy": lambda graph: d.graphs.pop(graph),
    "cudaGraphExecDestroy": lambda graph: d.destroy("executable graph", d.execs, graph),
    "cudaGetDevice": lambda: 0,
    "cudaGetDeviceCount": d.count,
    "cudaGetDeviceProperties": lambda device: d.name.encode(),
    "cudaDeviceGetAttribute": lambda which, device: getattr(d, ATTRIBUTES[which]),
    "cudaMemGetInfo": lambda: (d.available() - d.page_cache, d.memory),
    "cudaDriverGetVersion": lambda: d.driver,
    "cudaRuntimeGetVersion": lambda: d.runtime,
}
_THREAD = threading.local()


def last_error():
    """Return the error that this thread has not taken with cudaGetLastError, or None.

    "Returns the last error that has been produced by any of the runtime calls in the same instance of the CUDA Runtime
    library in the host thread and resets it to cudaSuccess" (cuda_runtime_api.h of CUDA 12.6). Libraries that launch
    kernels ask for it afterwards, so an error that another library left fails their launch.
    """
    return DEVICE.sticky or getattr(_THREAD, "fault", None)


def call(name, *given):
    """Return the error code and the results of a function."""
    try:
        if name in DEVICE.refuse:
            raise Fault(*DEVICE.refuse[name])
        if DEVICE.sticky is not None:
            raise DEVICE.sticky
        results = FUNCTIONS[name](*given)
    except Fault as fault:
        if fault.code in STICKY:
            DEVICE.sticky = fault
        _THREAD.fault, DEVICE.last = fault, str(fault)
        return fault.code, ()
    return 0, results if isinstance(results, tuple) else (results,)


def tf32(values):
    """Round float32 to 10 bits, as TF32 does; other types stay."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) if values.dtype == np.float32 else values


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

    def __getattr__(self, name):
        if name not in self._prototypes:
            raise AttributeError(f"undefined symbol: {name}")
        takes, words = parameters(self._prototypes[name][0]), []

        def run(*given):
            given = [value or 0 for value in given]
            if name == "cudaGetErrorString":
                words.append(ctypes.create_string_buffer(getattr(DEVICE, "last", f"error {given[0]}").encode()))
                return ctypes.addressof(words[-1])
            if name == "cudaGetLastError":
                fault, _THREAD.fault = last_error(), None
                return 0 if fault is None else fault.code
            given = list(zip(given, takes, strict=True))
            code, values = call(name, *(value for value, (*_, is_out) in given if not is_out))
            places = [(address, kind) for address, (_, kind, _, is_out) in given if is_out]
            for value, (address, kind) in zip(values, places, strict=bool(values and places)):
                _write(address, kind, value)
            return code

        gives = ctypes.c_void_p if name == "cudaGetErrorString" else ctypes.c_int
        self.__dict__[name] = ctypes.CFUNCTYPE(gives, *(made for _, _, made, _ in takes))(run)
        return self.__dict__[name]


def _write(address, kind, value):
    """Write a result to an address, as the type of the parameter says."""
    if "Prop" in kind:
        ctypes.memmove(address, value + b"\0", len(value) + 1)
    else:
        made = ctypes.c_int if kind == "int *" else ctypes.c_size_t
        made.from_address(address).value = value


LIBRARY = Library()


@atexit.register
def _at_exit():
    """Report what a process left; ``CUDA_DOUBLE_REPORT`` names a file for the counts."""
    for what in DEVICE.left() + DEVICE.misuse:
        print(f"double of CUDA: left at exit: {what}", file=sys.stderr)
    if "CUDA_DOUBLE_REPORT" in os.environ:
        report = {"left": DEVICE.left(), "misuse": DEVICE.misuse, "counts": DEVICE.counts}
        Path(os.environ["CUDA_DOUBLE_REPORT"]).write_text(json.dumps(report))
