"""The CUDA runtime through ctypes: prototypes of CUDA's headers, the double, and the real library where it is."""

import ctypes
import json
from pathlib import Path

import pytest

from ls_edge.core.errors import EngineError
from ls_edge.engines.cuda import runtime as module
from ls_edge.engines.cuda.runtime import FUNCTIONS, CudaRuntime, cuda_runtime

SIGNATURES = json.loads((Path(__file__).parents[2] / "doubles/signatures.json").read_text())
HEADERS = [version for version in SIGNATURES if version.startswith("cuda ")]


@pytest.mark.parametrize("version", HEADERS)
def test_functions_and_constants_match_the_headers_of_cuda(gpu, version):
    import cudart

    known = SIGNATURES[version]
    for name, kinds in FUNCTIONS.items():
        theirs = cudart.parameters(known[name][0])
        assert [isinstance(kind, module._Out) for kind in kinds] == [is_out for *_, is_out in theirs], name
        ours = [ctypes.c_void_p if isinstance(kind, module._Out) else kind for kind in kinds]
        assert ours == [made for _, _, made, _ in theirs], name
    numbers = {
        "cudaMemcpyHostToDevice": module.TO_DEVICE,
        "cudaMemcpyDeviceToHost": module.TO_HOST,
        "cudaErrorInsufficientDriver": module.DRIVER_TOO_OLD,
        "cudaStreamCaptureModeThreadLocal": module.THREAD_LOCAL,
        "cudaDevAttrComputeCapabilityMajor": module.CAPABILITY_MAJOR,
        "cudaDevAttrComputeCapabilityMinor": module.CAPABILITY_MINOR,
        "cudaDevAttrIntegrated": module.INTEGRATED,
        "cudaDevAttrMultiProcessorCount": module.MULTIPROCESSORS,
    }
    lost = map(int, known["errors after which the process must be started again"])
    assert set(lost) <= module.LOST
    assert {name: [str(number)] for name, number in numbers.items()} == {name: known[name] for name in numbers}


def test_the_record_has_a_jetsons_release_and_the_newest_one():
    assert {version.split()[1].rsplit(".", 1)[0] for version in HEADERS} == {"12.6", "12.9", "13.0"}


def test_a_runtime_that_is_newer_than_the_driver_is_rejected(gpu, monkeypatch):
    import cudart

    class Newer(cudart.Library):
        def __getattr__(self, name):
            if name == "cudaGetDeviceCount":
                return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: module.DRIVER_TOO_OLD)
            return super().__getattr__(name)

    opened = {"new": Newer(), "old": cudart.LIBRARY, module.DRIVER: None}
    monkeypatch.setattr(ctypes, "CDLL", opened.__getitem__)
    monkeypatch.setattr(module, "_candidates", lambda: ["new", "old"])
    assert cuda_runtime().path == "old"
    cuda_runtime.cache_clear()
    monkeypatch.setattr(module, "_candidates", lambda: ["new"])
    with pytest.raises(EngineError, match=r"CUDA 12.6 is newer than the driver supports \(12.6, error 35\): new;"):
        cuda_runtime()


def test_calls_return_their_outputs_or_raise(gpu):
    cuda = cuda_runtime()
    free, total = cuda.call("cudaMemGetInfo", doing="measuring")
    address = cuda.call("cudaMalloc", 1000, doing="making memory")
    assert cuda.call("cudaMemGetInfo", doing="measuring") == [free - 1000, total]
    assert cuda.call("cudaFree", address, doing="freeing") is None
    assert cuda.attempt("cudaFree", address) == 1
    with pytest.raises(EngineError, match=r"CUDA failed while freeing: .* was already freed; see 'ls-edge doctor'"):
        cuda.call("cudaFree", address, doing="freeing")


def test_a_missing_library_is_named(gpu, monkeypatch):
    monkeypatch.setattr(module, "_candidates", lambda: ["not-there.so.12"])
    with pytest.raises(EngineError, match=r"cannot be used: not-there\.so\.12: .*; install the one for"):
        cuda_runtime()
    monkeypatch.setattr(module, "DRIVER", "not-there.so.1")
    with pytest.raises(EngineError, match=r"cannot be used: there is no NVIDIA driver; install NVIDIA's driver"):
        cuda_runtime()


def test_the_real_library_has_every_function_and_lets_other_threads_run():
    """Needs no GPU: without a driver each function returns an error. Skipped where no CUDA runtime is installed."""
    found = []
    for path in module._candidates():
        try:
            found.append(CudaRuntime(ctypes.CDLL(path), path))
        except OSError:
            continue
    if not found:
        pytest.skip("no CUDA runtime is installed")
    for cuda in found:
        assert cuda.release_of("Runtime") >= "12.0"
        assert cuda._words(module.DRIVER_TOO_OLD) == b"CUDA driver version is insufficient for CUDA runtime version"
        for function in cuda._functions.values():
            assert not type(function)._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # which would keep the GIL
