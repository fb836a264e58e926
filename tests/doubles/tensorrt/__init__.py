"""A double of ``tensorrt`` for tests: an engine is the ONNX file, run by ONNX Runtime; see tests/doubles/README.md."""

import enum
import json
import os
import signal
import sys
import weakref
from pathlib import Path

import cudart as cuda
import numpy as np
import onnxruntime

__version__ = "10.3.0"
_MAGIC = b"double of a TensorRT engine\n"
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
SCRATCH = 4096
"""Bytes of activation memory for one image."""


class _Native:
    """An object of the C++ library, which logs to the first logger that it got.

    "The logger is internally considered a singleton" (NvInferRuntimeCommon.h of 8.0); "Uses of the global logger,
    returned by nvinfer1::getLogger(), will return the existing value" (the message of 8.4 to 10 about another one).
    "The logger must be valid until all objects created are released" (NvInferRuntimeBase.h of 10.3).
    """

    _first, _alive = None, weakref.WeakSet()

    def _log_to(self, logger):
        assert logger.made
        if not _Native._alive:
            _Native._first = weakref.ref(logger)
        elif _Native._first() is not logger:
            self._log(ILogger.Severity.INFO, "The logger passed into create... differs from one already provided")
        self._kept = logger  # py::keep_alive<1, 2> of Builder and Runtime (pyCore.cpp of 10.3)
        _Native._alive.add(self)

    @staticmethod
    def _log(severity, text):
        logger = _Native._first()
        if logger is None:
            cuda.DEVICE.misuse.append(f"TensorRT used a logger that was freed: {text}")
        else:
            _call_back(logger.log, severity, text)


_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def _call_back(function, *arguments, otherwise=None):
    """Call Python from C++: an exception of any kind is printed and lost (PyProgressMonitor, PyLogger in pyCore.cpp).

    Signals, which C++ does not see, reach Python here.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return function(*arguments)
    except BaseException as error:
        print(f"[ERROR] Exception caught in {function.__name__}(): {error!r}", file=sys.stderr)
        return otherwise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self):
        self.made = True

    def log(self, severity, msg):
        raise NotImplementedError


class Logger(ILogger):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = ILogger.Severity

    def __init__(self, min_severity=ILogger.Severity.WARNING):
        super().__init__()

    def log(self, severity, msg):
        pass


class IProgressMonitor:
    def __init__(self):
        self.made = True

    def phase_start(self, phase_name, parent_phase, num_steps):
        raise NotImplementedError

    def phase_finish(self, phase_name):
        raise NotImplementedError

    def step_complete(self, phase_name, step):
        raise NotImplementedError


class NetworkDefinitionCreationFlag(enum.IntEnum):
    EXPLICIT_BATCH, STRONGLY_TYPED = range(2)


class BuilderFlag(enum.IntEnum):
    FP16, INT8, DEBUG, GPU_FALLBACK, REFIT, DISABLE_TIMING_CACHE, TF32 = range(7)


class ProfilingVerbosity(enum.IntEnum):
    LAYER_NAMES_ONLY, NONE, DETAILED = range(3)


class LayerInformationFormat(enum.IntEnum):
    ONELINE, JSON = range(2)


class MemoryPoolType(enum.IntEnum):
    WORKSPACE = 0


class TensorIOMode(enum.IntEnum):
    NONE, INPUT, OUTPUT = range(3)


class ExecutionContextAllocationStrategy(enum.IntEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class DataType(enum.Enum):
    FLOAT, HALF, INT64 = np.float32, np.float16, np.int64


def nptype(trt_type):
    return trt_type.value


class IHostMemory:
    def __init__(self, raw):
        self._raw = raw

    def __buffer__(self, flags):
        return memoryview(self._raw)

    def __bytes__(self):
        return self._raw


class ITensor:
    def __init__(self, name, shape, dtype):
        self.name, self.shape, self.dtype = name, shape, dtype


def _tensors(args):
    return [ITensor(a.name, tuple(d if isinstance(d, int) else -1 for d in a.shape), _TYPES[a.type]) for a in args]


def _session(raw):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])


class INetworkDefinition:
    def __init__(self, flags):
        self.flags, self.raw, self.inputs = flags, None, []

    @property
    def num_inputs(self):
        return len(self.inputs)

    def get_input(self, index):
        return self.inputs[index]


class ParserError:
    def __init__(self, text):
        self._text = text

    def desc(self):
        return self._text

    def node_name(self):
        return "node"

    def node_operator(self):
        return "Operator"


class OnnxParser:
    def __init__(self, network, logger):
        self._network, self._errors = network, []
        assert logger.made

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return self._errors[index]

    def parse(self, model, path=None):
        model = bytes(model)
        if b"DynamicQuantizeLinear" in model:
            self._errors.append(ParserError("No importer registered for op: DynamicQuantizeLinear"))
            return False
        try:
            session = _session(model)
        except Exception as error:
            self._errors.append(ParserError(str(error)))
            return False
        self._network.raw, self._network.inputs = model, _tensors(session.get_inputs())
        for tensor in self._network.inputs:
            if tensor.dtype == np.int64:  # ModelImporter.cpp of 10.0, as NVIDIA/TensorRT issue 3894 shows it
                _Native._log(ILogger.Severity.WARNING, f"Make sure input {tensor.name} has Int64 binding.")
        return True


class IOptimizationProfile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, input, min, opt, max):
        if not all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
            raise ValueError(f"the profile of {input} does not grow: {min} {opt} {max}")
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))


class ITimingCache:
    """Measured times, with a header that has the properties of the device."""

    def __init__(self, raw):
        self._raw = raw or _properties()

    def serialize(self):
        return IHostMemory(self._raw)

    def add(self, raw):
        self._raw += raw


def _properties():
    device = cuda.DEVICE
    return json.dumps([__version__, device.name, device.multiprocessors]).encode() + b"\n"


class IBuilderConfig:
    def __init__(self):
        self.flags, self.profiles, self.timing, self.limits = {BuilderFlag.TF32}, [], None, {}
        self.progress_monitor = None
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def set_memory_pool_limit(self, pool, pool_size):
        self.limits[pool] = pool_size

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache):
        return ITimingCache(bytes(serialized_timing_cache))

    def set_timing_cache(self, cache, ignore_mismatch):
        """NvInfer.h of 10.3: "A failure will be reported if the CUDA device property in the provided cache is different
        from current environment"; "true if set successfully, false otherwise".
        """
        if not isinstance(cache, ITimingCache):
            raise TypeError("set_timing_cache(): incompatible function arguments")
        if not ignore_mismatch and not cache._raw.startswith(_properties()):
            _Native._log(ILogger.Severity.WARNING, "the timing cache is of another device")
            return False
        self.timing = cache
        return True

    def get_timing_cache(self):
        """ "The timing cache used in current IBuilderConfig": none if none was set."""
        return self.timing


class Builder(_Native):
    refuse = ""
    """TensorRT's message if it cannot build; set by a test."""

    def __init__(self, logger):
        self._log_to(logger)
        _start(self)

    def create_network(self, flags=0):
        return INetworkDefinition(flags)

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return self._build(network, config)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _build(self, network, config):
        why = self.refuse or self._problem(network, config)
        if why:
            self._log(ILogger.Severity.ERROR, why)
            return None
        monitor = config.progress_monitor
        if monitor is not None:
            _call_back(monitor.phase_start, "Building Engine", None, 2)
            if until := os.environ.get("TENSORRT_DOUBLE_WAITS"):
                Path(until).read_bytes()  # of a FIFO, when its writer has closed it
            # "the application can return false for TensorRT to exit the build early"; an exception counts as false
            done = all(_call_back(monitor.step_complete, "Building Engine", step, otherwise=False) for step in range(2))
            _call_back(monitor.phase_finish, "Building Engine")
            if not done:
                return None
        (config.timing or ITimingCache(b"")).add(b".")
        header = {"profiles": [p.shapes for p in config.profiles], "tf32": BuilderFlag.TF32 in config.flags}
        header["workspace"] = config.limits[MemoryPoolType.WORKSPACE]
        header["verbosity"] = int(config.profiling_verbosity)
        return IHostMemory(_MAGIC + json.dumps(header).encode() + b"\n" + network.raw)

    @staticmethod
    def _problem(network, config):
        if network.raw is None:
            return "the network has no outputs"
        if not network.flags & 1 << int(NetworkDefinitionCreationFlag.STRONGLY_TYPED):
            return "only strongly typed networks are used here"
        for tensor in network.inputs:
            for profile in config.profiles or [IOptimizationProfile()]:
                shapes = profile.shapes.get(tensor.name)
                if shapes is None:
                    return f"{tensor.name} has a dynamic shape and no profile"
                if any(len(s) != len(tensor.shape) or tuple(s[1:]) != tensor.shape[1:] for s in shapes):
                    return f"the profile of {tensor.name} is {shapes}, the network has {tensor.shape}"
        return ""


def _start(made):
    """Return an object whose end crashes where CUDA does not start, as createInferRuntime of 10.16 to 11.4 does."""
    if cuda.DEVICE.memory <= 0:
        _Native._log(ILogger.Severity.ERROR, "CUDA initialization failure with error: 2")
        _Native._log(ILogger.Severity.ERROR, "another error")
        weakref.finalize(made, os.abort).atexit = False


class Runtime(_Native):
    def __init__(self, logger):
        self._log_to(logger)
        _start(self)

    def deserialize_cuda_engine(self, serialized_engine):
        raw = bytes(serialized_engine)
        if not raw.startswith(_MAGIC):
            self._log(ILogger.Severity.ERROR, "Error Code 1: Serialization (assertion kEXPECTED_MAGIC_TAG failed)")
            return None
        header, onnx = raw[len(_MAGIC) :].split(b"\n", 1)
        return ICudaEngine(json.loads(header), onnx, self)


class ICudaEngine(_Native):
    context_bytes = 0
    """Memory on the GPU that each context takes, besides that for activations; set by a test."""

    def __init__(self, header, onnx, runtime):
        self._header, self._session, self._runtime = header, _session(onnx), runtime
        _Native._alive.add(self)
        self._inputs, self._outputs = _tensors(self._session.get_inputs()), _tensors(self._session.get_outputs())
        self._tensors = self._inputs + self._outputs
        self._contexts = 0
        self.num_optimization_profiles = len(header["profiles"])
        self.device_memory_size_v2 = SCRATCH * max(s[2][0] for p in header["profiles"] for s in p.values())

    @property
    def num_io_tensors(self):
        return len(self._tensors)

    def get_tensor_name(self, index):
        return self._tensors[index].name

    def _tensor(self, name):
        return next(t for t in self._tensors if t.name == name)

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if self._tensor(name) in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return DataType(self._tensor(name).dtype)

    def get_tensor_shape(self, name):
        return self._tensor(name).shape

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        memory = None
        if self.context_bytes:
            code, memory = cuda.cudaMalloc(self.context_bytes)
            if code:
                self._log(ILogger.Severity.ERROR, "Error Code 2: OutOfMemory (no further information)")
                return None
        self._contexts += 1
        made = IExecutionContext(self, strategy, profile=0 if self._contexts == 1 else None)
        if memory is not None:
            weakref.finalize(made, cuda.DEVICE.free, "device", memory)
        return made

    def create_engine_inspector(self):
        return EngineInspector(self)


class EngineInspector:
    def __init__(self, engine):
        self._engine = engine

    def get_engine_information(self, format):
        return f"Layers:\n{len(self._engine._tensors)} tensors, verbosity {self._engine._header['verbosity']}\n"


class IExecutionContext:
    def __init__(self, engine, strategy, profile):
        self._engine, self._strategy, self._profile = engine, strategy, profile
        self._shapes, self._addresses, self._memory = {}, {}, None
        self._flushed = None
        self._state = 0

    def _fail(self, text):
        self._engine._log(ILogger.Severity.ERROR, text)
        return False

    def set_optimization_profile_async(self, profile_index, stream_handle):
        cuda.DEVICE.stream(stream_handle)
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            self._fail(f"there is no profile {profile_index}")
            raise RuntimeError("Error in set optimization profile async.")  # pyCore.cpp of 10.3, 10.16 and 11.1
        self._profile = profile_index
        self._state += 1
        return True

    def set_device_memory(self, memory, size):
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            raise RuntimeError("this context has its own memory")
        self._memory = (memory, size)
        self._state += 1

    def set_input_shape(self, name, shape):
        if self._profile is None:
            return self._fail("no optimization profile was set")
        tensor = self._engine._tensor(name)
        least, _, most = self._engine._header["profiles"][self._profile][name]
        if tensor not in self._engine._inputs or len(shape) != len(least):
            return self._fail(f"{name} is no input of {len(shape)} dimensions")
        if not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            return self._fail(f"{tuple(shape)} of {name} is outside the profile {least} to {most}")
        if self._shapes.get(name) != tuple(shape):
            self._shapes[name] = tuple(shape)
            self._state += 1
        return True

    def set_tensor_address(self, name, memory):
        if name not in [t.name for t in self._engine._tensors]:
            return self._fail(f"{name} is no input or output")
        if memory % 256:
            return self._fail(f"{memory:#x} is not aligned to 256 bytes")
        if self._addresses.get(name) != memory:
            self._addresses[name] = memory
            self._state += 1
        return True

    def execute_async_v3(self, stream_handle):
        engine, device = self._engine, cuda.DEVICE
        stream = device.stream(stream_handle)
        if self._profile is None or cuda.last_error():
            return self._fail(f"Error Code 1: Cuda Runtime ({cuda.last_error() or 'no optimization profile was set'})")
        missing = [t.name for t in engine._inputs if t.name not in self._shapes]
        missing += [t.name for t in engine._tensors if t.name not in self._addresses]
        if missing:
            return self._fail(f"{', '.join(missing)} was not set")
        need = engine.device_memory_size_v2
        own = self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED
        if not own and (self._memory is None or self._memory[1] < need):
            return self._fail(f"the context needs {need} bytes of memory, has {self._memory}")
        if stream.capturing is not None and self._flushed != self._state:
            return self._fail("the context has to run once before it is captured")
        batch = self._shapes[engine._inputs[0].name][0]
        if any(shape[0] != batch for shape in self._shapes.values()):
            return self._fail(f"batches differ: {self._shapes}")
        spans = {t.name: self._span(t, batch) for t in engine._tensors}
        inputs = [spans[t.name] for t in engine._inputs]
        outputs = [spans[t.name] for t in engine._outputs]
        if any(a < c + m and c < a + n for a, n in inputs for c, m in outputs):
            return self._fail("input and output overlap")
        self._flushed = self._state
        device.counts["execute"] += 1
        device.profile = self._profile
        context, state, captured = weakref.ref(self), self._state, stream.capturing is not None
        addresses, memory = dict(self._addresses), self._memory

        def work():
            alive = context()
            if alive is None:
                device.misuse.append("a context was destroyed while its work was queued")
            elif captured and alive._state != state:
                device.misuse.append("a context changed after it was captured")
            for address, size in (*inputs, *outputs):
                device.span("device", address, size)
            if memory is not None:
                device.span("device", *memory).fill(0xEE)
            given = {}
            for tensor in engine._inputs:
                address, size = spans[tensor.name]
                assert addresses[tensor.name] == address
                values = device.span("device", address, size).view(tensor.dtype)
                given[tensor.name] = values.reshape(batch, *tensor.shape[1:]).copy()
            for tensor, values in zip(engine._outputs, engine._session.run(None, given), strict=True):
                if engine._header["tf32"] and values.dtype == np.float32:
                    values = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
                address, size = spans[tensor.name]
                device.span("device", address, size)[...] = np.ascontiguousarray(values).view(np.uint8).ravel()

        device.enqueue(stream_handle, work)
        return True

    def _span(self, tensor, batch):
        size = batch * int(np.prod(tensor.shape[1:], dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
        return self._addresses[tensor.name], size
