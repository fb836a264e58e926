"""A double of ``tensorrt`` for tests: an engine is the ONNX file, run by ONNX Runtime; see tests/doubles/README.md."""

import enum
import json
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import cudart as cuda
import numpy as np
import onnxruntime

__version__ = "10.3.0"
_MAGIC = b"double of a TensorRT engine\n"
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
SCRATCH = 4096  # bytes of activation memory for one image


def _enum(name, members):
    return enum.IntEnum(name, members, start=0)


NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH STRONGLY_TYPED")
BuilderFlag = _enum("BuilderFlag", "FP16 INT8 DEBUG GPU_FALLBACK REFIT DISABLE_TIMING_CACHE TF32")
ProfilingVerbosity = _enum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED")
LayerInformationFormat = _enum("LayerInformationFormat", "ONELINE JSON")
MemoryPoolType = _enum("MemoryPoolType", "WORKSPACE")
ExecutionContextAllocationStrategy = _enum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"
)


def nptype(trt_type):
    return trt_type


class ILogger:
    Severity = _enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")

    def __init__(self):
        pass


class IProgressMonitor:
    def __init__(self):
        pass


def _fail(text, result=None):
    """Log an error as TensorRT does, and return ``result``."""
    ILogger.latest.log(ILogger.Severity.ERROR, text)
    return result


def _start(made, logger):
    """Return an object whose end crashes where CUDA does not start, as createInferRuntime of 10.16 to 11.4 does."""
    ILogger.latest = logger
    if cuda.DEVICE.memory <= 0:
        _fail("CUDA initialization failure with error: 2")
        _fail("another error")
        weakref.finalize(made, os.abort).atexit = False


def _session(raw):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])


def _tensors(args):
    shapes = [tuple(d if isinstance(d, int) else -1 for d in a.shape) for a in args]
    return [SimpleNamespace(name=a.name, shape=s, dtype=_TYPES[a.type]) for a, s in zip(args, shapes, strict=True)]


class INetworkDefinition:
    def __init__(self, flags):
        self.flags, self.raw, self.inputs, self.num_inputs = flags, None, [], 0

    def get_input(self, index):
        return self.inputs[index] if index < self.num_inputs else _fail("Error Code 3: API Usage Error (index)")


class OnnxParser:
    def __init__(self, network, logger):
        self._network, self._errors, self.num_errors = network, [], 0

    def get_error(self, index):
        return self._errors[index]

    def parse(self, model, path=None):
        raw, network = bytes(model), self._network
        if network.raw is not None:
            return _fail("Parse was called with a non-empty network definition", False)
        try:
            if b"DynamicQuantizeLinear" in raw:
                raise ValueError("No importer registered for op: DynamicQuantizeLinear")
            network.inputs = _tensors(_session(raw).get_inputs()) if raw else []
        except Exception as error:
            text = str(error)
            names = {"desc": lambda: text, "node_name": lambda: "node", "node_operator": lambda: "Operator"}
            self._errors.append(SimpleNamespace(**names))
            self.num_errors += 1
            return _fail(text, False)
        network.raw, network.num_inputs = raw or None, len(network.inputs)
        return True


class IOptimizationProfile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, input, min, opt, max):
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))


class ITimingCache:
    """Measured times, with a header that has the properties of the device."""

    def __init__(self, raw):
        self.raw = raw if raw.endswith(b".") else _properties()

    def serialize(self):
        return self.raw


def _properties():
    device = cuda.DEVICE
    return json.dumps([__version__, device.name, device.multiprocessors]).encode() + b"\n"


class IBuilderConfig:
    progress_monitor, profiling_verbosity = None, ProfilingVerbosity.LAYER_NAMES_ONLY

    def __init__(self):
        self.flags, self.profiles, self.timing, self.limits = {BuilderFlag.TF32}, [], None, {}

    def set_memory_pool_limit(self, pool, pool_size):
        self.limits[pool] = pool_size

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def add_optimization_profile(self, profile):
        if any(not a <= b <= c for shapes in profile.shapes.values() for a, b, c in zip(*shapes, strict=True)):
            return _fail("IOptimizationProfile::isValid: Error Code 4: API Usage Error", -1)
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache):
        return ITimingCache(bytes(serialized_timing_cache))

    def set_timing_cache(self, cache, ignore_mismatch):
        """NvInfer.h of 10.3: "A failure will be reported if the CUDA device property in the provided cache is different
        from current environment"; "true if set successfully, false otherwise".
        """
        if not ignore_mismatch and not cache.raw.startswith(_properties()):
            return False
        self.timing = cache
        return True

    def get_timing_cache(self):
        """ "The timing cache used in current IBuilderConfig": none if none was set."""
        return self.timing


class Builder:
    refuse = ""  # TensorRT's message if it cannot build; set by a test

    def __init__(self, logger):
        _start(self, logger)

    def create_network(self, flags=0):
        return INetworkDefinition(flags)

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        why = self.refuse or self._problem(network, config)
        if why:
            return _fail(why)
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        if until := os.environ.get("TENSORRT_DOUBLE_WAITS"):
            Path(until).read_bytes()  # of a FIFO, when its writer has closed it
        # "the application can return false for TensorRT to exit the build early"
        done = all(monitor.step_complete("Building Engine", step) for step in range(2))
        monitor.phase_finish("Building Engine")
        if not done:
            return None
        config.timing.raw += b"."
        header = {"profiles": [p.shapes for p in config.profiles], "tf32": BuilderFlag.TF32 in config.flags}
        header["workspace"] = config.limits[MemoryPoolType.WORKSPACE]
        header["verbosity"] = int(config.profiling_verbosity)
        return _MAGIC + json.dumps(header).encode() + b"\n" + network.raw

    @staticmethod
    def _problem(network, config):
        if network.raw is None:
            return "Network must have at least one output"
        if not network.flags & 1 << int(NetworkDefinitionCreationFlag.STRONGLY_TYPED):
            return "only strongly typed networks are used here"
        if not config.profiles:
            return "Network has dynamic or shape inputs, but no optimization profile has been defined"
        for tensor in network.inputs:
            for profile in config.profiles:
                if any(tuple(shape[1:]) != tensor.shape[1:] for shape in profile.shapes[tensor.name]):
                    return f"Dimension mismatch for tensor {tensor.name} and a profile"
        return ""


class Runtime:
    def __init__(self, logger):
        _start(self, logger)

    def deserialize_cuda_engine(self, serialized_engine):
        raw = bytes(serialized_engine)
        if not raw.startswith(_MAGIC):
            return _fail("Error Code 1: Serialization (header.magicTag == kEXPECTED_MAGIC_TAG failed")
        header, onnx = raw[len(_MAGIC) :].split(b"\n", 1)
        return ICudaEngine(json.loads(header), onnx)


class ICudaEngine:
    context_bytes = 0  # memory on the GPU that a context needs, besides that for activations; set by a test

    def __init__(self, header, onnx):
        self._header, self._session, self._contexts = header, _session(onnx), 0
        inputs, self._outputs = _tensors(self._session.get_inputs()), _tensors(self._session.get_outputs())
        self._tensors = {tensor.name: tensor for tensor in inputs + self._outputs}
        header["inputs"] = {tensor.name for tensor in inputs}
        self.num_io_tensors, self.num_optimization_profiles = len(self._tensors), len(header["profiles"])
        self.device_memory_size_v2 = SCRATCH * max(s[2][0] for p in header["profiles"] for s in p.values())

    def get_tensor_name(self, index):
        return list(self._tensors)[index]

    def get_tensor_dtype(self, name):
        return self._tensors[name].dtype

    def get_tensor_shape(self, name):
        return self._tensors[name].shape

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        if self.context_bytes > cuda.DEVICE.available():
            return _fail("Error Code 2: OutOfMemory (no further information)")
        self._contexts += 1
        return IExecutionContext(self, strategy, profile=0 if self._contexts == 1 else None)

    def create_engine_inspector(self):
        text = "Layers:\nName: everything, LayerType: kgen, Outputs: [ { Name: y, Format/Datatype: Float }]\n"
        return SimpleNamespace(get_engine_information=lambda format: text)


class IExecutionContext:
    def __init__(self, engine, strategy, profile):
        self._engine, self._profile, self._shapes, self._addresses = engine, profile, {}, {}
        self._owns_memory = strategy != ExecutionContextAllocationStrategy.USER_MANAGED
        self._memory, self._flushed = (None, 0), None

    @property
    def _state(self):
        return (self._profile, self._memory, *self._shapes.items(), *self._addresses.items())

    def set_optimization_profile_async(self, profile_index, stream_handle):
        cuda.DEVICE.stream(stream_handle)
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            _fail(f"there is no profile {profile_index}")
            raise RuntimeError("Error in set optimization profile async.")  # pyCore.cpp of 10.3, 10.16 and 11.1
        self._profile = profile_index
        return True

    def set_device_memory(self, memory, size):
        if self._owns_memory:
            raise RuntimeError("this context has its own memory")
        self._memory = (memory, size)

    def set_input_shape(self, name, shape):
        if self._profile is None:
            return _fail("no optimization profile was set", False)
        least, _, most = self._engine._header["profiles"][self._profile][name]
        if not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            return _fail(f"{tuple(shape)} of {name} is outside the profile {least} to {most}", False)
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, memory):
        if name not in self._engine._tensors or memory % 256:
            return _fail(f"{name} is no input or output, or {memory:#x} is not aligned to 256 bytes", False)
        self._addresses[name] = memory
        return True

    def _problem(self, is_capturing):
        """Return why the context cannot run."""
        engine = self._engine
        missing = (engine._tensors.keys() - self._addresses.keys()) | (engine._header["inputs"] - self._shapes.keys())
        need, batches = engine.device_memory_size_v2, {shape[0] for shape in self._shapes.values()}
        checks = {
            f"Error Code 1: Cuda Runtime ({cuda.last_error()})": cuda.last_error() is not None,
            f"{', '.join(missing)} or the profile was not set": missing or self._profile is None,
            f"{need} bytes of memory are needed, there is {self._memory}": not self._owns_memory
            and self._memory[1] < need,
            "the context has to run once before it is captured": is_capturing and self._flushed != self._state,
            f"batches differ: {self._shapes}": len(batches) > 1,
        }
        return next((text for text, is_wrong in checks.items() if is_wrong), "")

    def execute_async_v3(self, stream_handle):
        engine, device = self._engine, cuda.DEVICE
        captured = device.stream(stream_handle).capturing is not None
        problem = self._problem(captured)
        if problem:
            return _fail(problem, False)
        (batch,) = {shape[0] for shape in self._shapes.values()}
        places = {
            name: (tensor.dtype, (batch, *tensor.shape[1:]), self._addresses[name])
            for name, tensor in engine._tensors.items()
        }
        self._flushed, device.profile = self._state, self._profile
        device.counts["execute"] += 1
        context, state, memory = weakref.ref(self), self._state, self._memory

        def work():
            alive = context()
            if alive is None or (captured and alive._state != state):
                device.misuse.append("a context was destroyed while its work was queued, or changed after its capture")
            arrays = {name: device.values(*place) for name, place in places.items()}
            if memory[1]:
                device.span("device", *memory).fill(0xEE)
            inputs = {name: arrays[name] for name in engine._header["inputs"]}
            for tensor, values in zip(engine._outputs, engine._session.run(None, inputs), strict=True):
                if any(np.shares_memory(arrays[tensor.name], array) for array in inputs.values()):
                    device.misuse.append("input and output overlap")
                arrays[tensor.name][...] = cuda.tf32(values) if engine._header["tf32"] else values

        device.enqueue(stream_handle, work)
        return True
