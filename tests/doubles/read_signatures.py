"""Write ``signatures.json``: what TensorRT's Python bindings and CUDA's headers say of the names that we use.

    python tests/doubles/read_signatures.py WHEEL... > tests/doubles/signatures.json

Each wheel is one of ``tensorrt-cu12-bindings``, ``tensorrt-cu13-bindings`` for the Python that runs this, or
``nvidia-cuda-runtime``, ``nvidia-cuda-runtime-cu12`` (``pip download --no-deps``), of any number of versions. CUDA's
prototypes are in the headers of its wheels. TensorRT's own libraries are not in those of its bindings: libraries whose
functions do nothing are compiled in their place (a C compiler is needed), which is enough to load the module and to
read its docstrings. Nothing of TensorRT or CUDA runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TENSORRT = """
Logger ILogger ILogger.log ILogger.Severity.INTERNAL_ERROR ILogger.Severity.ERROR ILogger.Severity.WARNING
IProgressMonitor IProgressMonitor.phase_start IProgressMonitor.phase_finish IProgressMonitor.step_complete
Builder Builder.create_network Builder.create_builder_config Builder.create_optimization_profile
Builder.build_serialized_network NetworkDefinitionCreationFlag.STRONGLY_TYPED INetworkDefinition.num_inputs
INetworkDefinition.get_input ITensor.shape ITensor.name OnnxParser OnnxParser.parse OnnxParser.num_errors
OnnxParser.get_error ParserError.desc ParserError.node_name ParserError.node_operator
IBuilderConfig.add_optimization_profile
IBuilderConfig.set_memory_pool_limit IBuilderConfig.clear_flag IBuilderConfig.create_timing_cache
IBuilderConfig.set_timing_cache IBuilderConfig.get_timing_cache IBuilderConfig.progress_monitor
ITimingCache.serialize MemoryPoolType.WORKSPACE BuilderFlag.TF32 IOptimizationProfile.set_shape Runtime
Runtime.deserialize_cuda_engine ICudaEngine.create_execution_context ICudaEngine.num_io_tensors
ICudaEngine.get_tensor_name ICudaEngine.get_tensor_dtype
ICudaEngine.get_tensor_shape ICudaEngine.device_memory_size_v2 ICudaEngine.num_optimization_profiles
ExecutionContextAllocationStrategy.USER_MANAGED ExecutionContextAllocationStrategy.STATIC
IExecutionContext.set_input_shape IExecutionContext.set_tensor_address
IExecutionContext.execute_async_v3 IExecutionContext.set_device_memory
IExecutionContext.set_optimization_profile_async nptype IBuilderConfig.profiling_verbosity ProfilingVerbosity.DETAILED
ICudaEngine.create_engine_inspector EngineInspector.get_engine_information LayerInformationFormat.ONELINE
""".split()
CUDA = """
cudaGetErrorString cudaGetLastError cudaGetDeviceCount cudaGetDevice cudaGetDeviceProperties
cudaDeviceGetAttribute
cudaDriverGetVersion cudaRuntimeGetVersion cudaMemGetInfo cudaMalloc cudaFree cudaHostAlloc
cudaFreeHost cudaMemcpyAsync cudaStreamCreateWithFlags cudaStreamDestroy cudaStreamSynchronize cudaStreamBeginCapture
cudaStreamEndCapture cudaGraphInstantiateWithFlags cudaGraphLaunch cudaGraphExecDestroy cudaGraphDestroy
""".split()
VALUES = """
cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaErrorInsufficientDriver cudaStreamCaptureModeThreadLocal
cudaDevAttrComputeCapabilityMajor cudaDevAttrComputeCapabilityMinor cudaDevAttrIntegrated
cudaDevAttrMultiProcessorCount cudaErrorMemoryAllocation
""".split()

_PROGRAM = """
import importlib, inspect, json, sys
module = importlib.import_module(sys.argv[1])
def of(name):
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    if isinstance(found, type):
        lines = (getattr(found.__init__, "__doc__", "") or "").splitlines()
        return [line.strip() for line in lines if "__init__(" in line] or ["class"]
    if isinstance(found, property) or inspect.isgetsetdescriptor(found):
        return ["property"]
    if callable(found) and not isinstance(found, int):
        lines = [line.strip() for line in (found.__doc__ or "").splitlines()]
        here = [line for line in lines if line.lstrip("0123456789. ").startswith(name.split(".")[-1] + "(")]
        return here or [name.split(".")[-1] + str(inspect.signature(found))]
    return ["value"]
def plain(lines):
    kept = [line for line in lines or () if not line.endswith("*args, **kwargs)")]
    return lines and [line.replace("tensorrt_bindings.tensorrt.", "") for line in kept]
print(json.dumps({name: plain(of(name)) for name in sys.argv[2:]}))
"""


def main(wheels: list[str]) -> None:
    """Print the document."""
    document: dict[str, dict[str, object]] = {}
    for wheel in sorted(wheels, key=lambda path: Path(path).name):
        package, version = Path(wheel).name.split("-")[:2]
        with tempfile.TemporaryDirectory() as folder:
            zipfile.ZipFile(wheel).extractall(folder)
            if package.startswith("nvidia_cuda_runtime"):
                document[f"cuda {version}"] = _of_headers(Path(folder))
                continue
            env = {**os.environ, "PYTHONPATH": folder, "LD_LIBRARY_PATH": _empty_libraries(Path(folder))}
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, "tensorrt_bindings", *TENSORRT],
                env=env, check=True, capture_output=True, text=True,
            )  # fmt: skip
        document[f"tensorrt {version}"] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(document, indent=1))


def _of_headers(folder: Path) -> dict[str, object]:
    """Return the prototype of each function and the number behind each name, from the headers in a wheel."""
    api, types = (next(folder.rglob(name)).read_text() for name in ("cuda_runtime_api.h", "driver_types.h"))
    calls = {name: re.search(rf"(const char\*|cudaError_t) CUDARTAPI {name}\([^;]*\)(?=;)", api) for name in CUDA}
    values = {name: re.search(rf"\b{name}\s*=?\s*(0x[0-9a-f]+|\d+)", types) for name in VALUES}
    lost = r"/\*\*((?:(?!\*/).)*terminated[ *\n]+and relaunched(?:(?!\*/).)*)\*/\s*cudaError\w+\s*=\s*(\d+)"
    return {
        **{name: [match[0].replace("CUDARTAPI ", "")] if match else [] for name, match in calls.items()},
        **{name: [str(int(match[1], 0))] if match else [] for name, match in values.items()},
        "errors after which the process must be started again": [
            match[2] for match in re.finditer(lost, types, re.DOTALL)
        ],
    }


def _empty_libraries(folder: Path) -> str:
    """Compile a library whose functions do nothing for each of TensorRT's that the bindings name."""
    module = next(folder.glob("tensorrt_bindings/tensorrt*.so"))
    listed = subprocess.run(["readelf", "-d", module], check=True, capture_output=True, text=True).stdout
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", module], check=True, capture_output=True, text=True
    ).stdout
    wanted = re.findall(r" U ((?:create|get|init)(?:Infer|Nv|Builder|Plugin|Lib)\w*)$", symbols, re.MULTILINE)
    source = folder / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in wanted))
    for name in re.findall(r"\[(libnv[\w.]+)\]", listed):
        subprocess.run(["cc", "-shared", "-o", folder / name, source, f"-Wl,-soname,{name}"], check=True)
    return str(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
