"""The CUDA runtime on a real GPU; skipped without one. It needs only numpy, pytest and torch.

``python -m pytest -c /dev/null --noconftest tests/engines/cuda/test_on_a_gpu.py``
"""

import contextlib
import ctypes
import subprocess
import sys

import numpy as np
import pytest

from ls_edge.core.errors import EngineError
from ls_edge.device.facts import facts
from ls_edge.engines.cuda import runtime
from ls_edge.engines.cuda.runtime import NON_BLOCKING, THREAD_LOCAL, TO_DEVICE, TO_HOST, cuda_runtime

SIZE = 1 << 20


@pytest.fixture
def cuda():
    try:
        found = cuda_runtime()
        count = found.call("cudaGetDeviceCount", doing="counting")
    except EngineError as error:
        pytest.skip(str(error))
    assert count >= 1
    return found


@pytest.fixture
def called(cuda):
    """Call a function of CUDA."""
    return lambda name, *given: cuda.call(name, *given, doing="testing")


def numbers_at(address):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (SIZE // 4,))


def test_copies_arrive_through_a_stream_and_a_graph(called):
    called("cudaFree", None)  # makes the context, which takes memory too
    free, total = called("cudaMemGetInfo")
    rng = np.random.default_rng(0)
    assert 0 < free <= total
    stream = called("cudaStreamCreateWithFlags", NON_BLOCKING)
    given, back = (called("cudaHostAlloc", SIZE, 0) for _ in range(2))
    device = called("cudaMalloc", SIZE)

    def there_and_back(source):
        called("cudaMemcpyAsync", device, source, SIZE, TO_DEVICE, stream)
        called("cudaMemcpyAsync", back, device, SIZE, TO_HOST, stream)

    @contextlib.contextmanager
    def arriving():
        values = rng.random(SIZE // 4, np.float32)
        numbers_at(given)[:] = values
        numbers_at(back)[:] = 0
        yield
        called("cudaStreamSynchronize", stream)
        np.testing.assert_array_equal(numbers_at(back), values)

    with arriving():
        there_and_back(given)
    called("cudaStreamBeginCapture", stream, THREAD_LOCAL)
    there_and_back(given)
    graph = called("cudaStreamEndCapture", stream)
    ready = called("cudaGraphInstantiateWithFlags", graph, 0)
    called("cudaGraphDestroy", graph)
    for _ in range(2):
        with arriving():
            called("cudaGraphLaunch", ready, stream)
    called("cudaGraphExecDestroy", ready)
    called("cudaFree", device)
    for host in (given, back):
        called("cudaFreeHost", host)
    called("cudaStreamDestroy", stream)
    assert abs(called("cudaMemGetInfo")[0] - free) < 64 << 20


def test_memory_that_the_gpu_lacks_is_an_error_that_leaves_nothing(cuda, called):
    with pytest.raises(EngineError, match="CUDA failed while testing: out of memory"):
        called("cudaMalloc", 1 << 50)
    assert cuda.attempt("cudaGetLastError") == 0
    called("cudaFree", called("cudaMalloc", SIZE))


def test_attributes_are_those_that_torch_reads(cuda):
    torch = pytest.importorskip("torch")
    known = torch.cuda.get_device_properties(0)
    assert cuda.attribute(runtime.MULTIPROCESSORS) == known.multi_processor_count
    capability = [cuda.attribute(which) for which in (runtime.CAPABILITY_MAJOR, runtime.CAPABILITY_MINOR)]
    assert capability == [known.major, known.minor]
    assert cuda.is_integrated() is bool(known.is_integrated)
    name = cuda.call("cudaGetDeviceProperties", 0, doing="testing")
    assert name.decode() == known.name
    assert known.name in dict(facts())["cards"]


LOSE = """
import torch
from ls_edge.core.errors import DeviceLost
from ls_edge.engines.cuda.runtime import cuda_runtime
cuda = cuda_runtime()
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
for _ in range(2):
    try:
        cuda.call("cudaStreamSynchronize", None, doing="waiting")
    except DeviceLost as error:
        print(error)
"""


def test_a_kernel_that_fails_loses_the_gpu_for_the_process(cuda):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", LOSE], capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert line.endswith("this process cannot use the GPU any more, start it again")
