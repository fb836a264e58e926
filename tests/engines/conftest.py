"""The doubles of CUDA and TensorRT for tests of the engines; see tests/doubles/README.md."""

import ctypes
import gc
import importlib
import sys
from pathlib import Path

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.engines.cuda.runtime import cuda_runtime
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import open_block_engines
from ls_edge.engines.pipeline import Pipeline
from tests.engines.reference import ORDER

DOUBLES = Path(__file__).parents[1] / "doubles"
NAMES = ("tensorrt", "cudart", "onnxruntime_cuda", "sitecustomize")


@pytest.fixture
def doubles(monkeypatch, tmp_path):
    """Import the doubles instead of CUDA and TensorRT; memory that is left or misused fails the test."""
    saved = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    monkeypatch.syspath_prepend(str(DOUBLES))
    monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path / "cache"))
    cudart = importlib.import_module("cudart")
    monkeypatch.setattr(ctypes, "CDLL", ctypes.CDLL)  # restored at the end; the next line replaces it
    importlib.import_module("sitecustomize")
    cuda_runtime.cache_clear()
    yield importlib.import_module("tensorrt")
    cuda_runtime.cache_clear()
    device = cudart.DEVICE
    if device.left():
        gc.collect()
    left = device.left() + device.misuse
    device.reset()  # which the end of the process would report again
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(saved)
    assert left == []


@pytest.fixture
def gpu(doubles):
    """The double of the GPU."""
    return sys.modules["cudart"].DEVICE


@pytest.fixture(params=["late", "early"])
def any_gpu(gpu, request):
    """A double whose queued work runs late, when it is waited for, or early."""
    gpu.eager = request.param == "early"
    return gpu


@pytest.fixture
def ort(any_gpu, monkeypatch):
    """The double of onnxruntime-gpu, as the module ``onnxruntime``."""
    made = importlib.import_module("onnxruntime_cuda").OnnxRuntimeWithCuda()
    monkeypatch.setitem(sys.modules, "onnxruntime", made)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    return made


@pytest.fixture
def runner(bundle, any_gpu):
    """An executor of all blocks of ``bundle`` with TensorRT."""
    opened = Executor(open_block_engines(bundle, ORDER, kind="tensorrt", max_batch=2))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def bundle(tiny_bundle):
    """The tiny bundle, opened."""
    return Bundle.open(tiny_bundle)


@pytest.fixture(scope="module")
def exact(tiny_bundle):
    """The pipeline of the tiny bundle on the CPU, with exact results."""
    with Pipeline.open(Bundle.open(tiny_bundle), threads=1, provider="cpu") as pipeline:
        yield pipeline


@pytest.fixture(scope="session")
def slot_bundle(tiny_bundle, made_once):
    """The folder of a bundle like ``tiny_bundle`` whose blocks take a slot."""

    def export(folder):
        import dataclasses

        import torch

        from ls_edge.export.writer import export_run
        from ls_edge.training.methods.registry import make_method
        from ls_edge.training.runs.checkpoint import load_run

        loaded = load_run(tiny_bundle.parent / "run")
        torch.manual_seed(0)
        make_method("position", {}).attach(loaded.view)
        for parameter in loaded.view.slots.parameters():  # untrained, slots make no difference
            torch.nn.init.normal_(parameter, std=0.3)
        loaded.view.eval()
        export_run(dataclasses.replace(loaded, view=loaded.view), folder)

    return made_once("slots", export)
