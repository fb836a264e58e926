"""Errors in the code for CUDA and TensorRT, made on purpose: the doubles find each of them."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from ls_edge.core.errors import EngineError
from ls_edge.engines.cuda import memory as cuda_memory
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import open_block_engines
from ls_edge.engines.tensorrt import engine as tensorrt_engine
from tests.engines.reference import ORDER, expected, tokens

WAIT = 'self.synchronize(f"running {_parts(engines)}")'
NEW = "self._new_context(batch)"
ONE = f"found = self._contexts[key] = {NEW}"
GENERATION = "self.workspace.generation"
SHARED = ONE.replace(NEW, f"_Context((next(iter(self._contexts.values()), None) or {NEW}).context, {GENERATION})")
PROFILE = "set_optimization_profile_async(self._profile_of(batch), self.workspace.stream)"


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("no synchronization", WAIT, "pass"),
        ("writes where it reads", "target.device + data", "source.device + data"),
        ("buffers for too few images", "size, doing=doing)\n\n", "size // 4, doing=doing)\n\n"),
        ("an address of the host", "first.name: source.device + data", "first.name: source._host + data"),
        ("an address of the other buffer", "first.name: source.device", "first.name: self._buffers[0].device"),
        ("pinned memory is left", 'self._cuda.attempt("cudaFreeHost", host)', "pass"),
        ("scratch memory is too small", "_aligned(max(size, 1))", "_aligned(max(size // 4, 1))"),
        ("copies in the wrong direction", "copy(TO_DEVICE,", "copy(TO_HOST,"),
        ("copies too few bytes", "data + sum(row", "data + sum(row[:0]"),
    ],
)  # fmt: skip
def test_broken_memory_management_is_found(bundle, gpu, exact, monkeypatch, what, old, new):
    broken = changed(cuda_memory, old, new).CudaWorkspace
    monkeypatch.setattr("ls_edge.engines.opening.CudaWorkspace", broken)
    assert is_found(bundle, gpu, exact), what


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("no profile", f"context.{PROFILE}", "pass"),
        ("the other profile", PROFILE, PROFILE.replace("self._profile_of(batch)", "1 - self._profile_of(batch)")),
        ("no activation memory", "context.set_device_memory(*self.workspace.scratch(self._scratch_bytes))", "pass"),
        ("no shape", "if not context.set_input_shape(tensor.name, tensor.shape(batch)):", "if False:"),
        ("one context for all graphs", ONE, SHARED),
        ("a graph is left", 'self.workspace.cuda.attempt("cudaGraphExecDestroy", found.graph)', "pass"),
        ("another stream", "execute_async_v3(self.workspace.stream)", "execute_async_v3(0)"),
    ],
)  # fmt: skip
def test_broken_calls_of_tensorrt_are_found(bundle, gpu, exact, monkeypatch, what, old, new):
    broken = changed(tensorrt_engine, old, new)
    monkeypatch.setattr("ls_edge.engines.opening.open_tensorrt", broken.open_tensorrt)
    monkeypatch.setattr("ls_edge.engines.executor.TensorRTEngine", broken.TensorRTEngine)
    assert is_found(bundle, gpu, exact), what


def changed(module, old, new):
    """The module with a piece of its source replaced."""
    source = Path(module.__file__).read_text()
    assert old in source
    made = types.ModuleType(module.__name__)
    monkey = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = made  # dataclasses look there
    try:
        exec(compile(source.replace(old, new), module.__file__, "exec"), made.__dict__)
    finally:
        sys.modules[module.__name__] = monkey
    return made


def test_unchanged_code_passes_the_same_check(bundle, gpu, exact):
    assert not is_found(bundle, gpu, exact)


def is_found(bundle, gpu, exact):
    """Whether a run of some blocks fails, gives other numbers, or leaves or misuses something."""
    engines = {}
    try:
        engines = open_block_engines(bundle, ORDER, kind="tensorrt")
        runner = Executor(engines)
        results = [(runner.run((2, 0, 1), tokens(batch)), batch) for batch in (1, 2, 1, 1, 8, 1)]
        found = any(
            not np.abs(ours - expected(exact, (2, 0, 1), tokens(batch))).max() < 1e-4 for ours, batch in results
        )
    except (EngineError, sys.modules["cudart"].Fault):
        found = True
    for engine in engines.values():
        engine.close()
    found = found or bool(gpu.left() or gpu.misuse)
    gpu.reset()
    return found
