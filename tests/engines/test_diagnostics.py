"""Each engine library is tried in a process of its own, and each fault has its line."""

import os
import re
import sys

import pytest

from ls_edge.engines import diagnostics as engines
from tests.engines.conftest import DOUBLES


def pairs(findings):
    return {finding.what: finding for finding in findings}


def test_engines_that_load_are_found():
    pytest.importorskip("onnxruntime")
    found = pairs(engines.check_engines())
    assert found["engine CPUExecutionProvider"].status == "ok"
    if "engine TensorRT" not in found and "engine CUDAExecutionProvider" not in found:
        auto = "takes CPUExecutionProvider (not TensorRT: not installed; not CUDAExecutionProvider: not installed)"
        assert found["engine auto"].detail == auto


ONNX_RUNTIME = """
import os, sys
sys.path.remove({folder!r})
del sys.modules["onnxruntime"]
import numpy, onnxruntime_cuda

class OnnxRuntime(onnxruntime_cuda.OnnxRuntimeWithCuda):
    def InferenceSession(self, *arguments, **options):
        session = super().InferenceSession(*arguments, **options)
        {fault}
        return session

sys.modules["onnxruntime"] = OnnxRuntime()
"""


@pytest.fixture
def install_onnxruntime(tmp_path, monkeypatch):
    """Return a function that installs the double of onnxruntime-gpu for probes, whose sessions have a fault."""

    def install(fault):
        (tmp_path / "onnxruntime.py").write_text(ONNX_RUNTIME.format(folder=str(tmp_path), fault=fault))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{DOUBLES}")

    return install


def test_providers_that_are_listed_but_do_not_load_are_named(install_onnxruntime):
    install_onnxruntime("os.abort()")
    found = pairs(engines.check_onnxruntime("onnxruntime-gpu"))
    assert found["engine CUDAExecutionProvider"].status == "warn"
    assert "SIGABRT" in found["engine CUDAExecutionProvider"].detail
    assert found["engine CUDAExecutionProvider"].fix.startswith("ignore this")  # no library was named
    assert found["engine CPUExecutionProvider"].status == "bad"
    assert found["engine CPUExecutionProvider"].fix == "pip install --force-reinstall onnxruntime-gpu"


def test_a_provider_that_rounds_float32_is_named(install_onnxruntime):
    install_onnxruntime("session.run = lambda *a, run=session.run: [y.astype(numpy.float16) for y in run(*a)]")
    found = pairs(engines.check_onnxruntime("onnxruntime-gpu"))["engine CUDAExecutionProvider"]
    assert found.status == "warn"
    assert "rounds float32" in found.detail


@pytest.fixture
def hide(monkeypatch):
    """Return a function that makes modules appear not installed."""
    return lambda *names: [monkeypatch.setitem(sys.modules, name, None) for name in names]


def test_without_an_engine_library_there_is_one_warning(hide, install_only):
    hide("onnxruntime", "tensorrt", "tensorrt_rtx_bindings")
    install_only({})
    (found,) = engines.check_engines()
    assert (found.status, found.what) == ("warn", "engines")


def test_tensorrt_builds_and_runs_a_layer(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
    monkeypatch.syspath_prepend(DOUBLES)
    (found,) = engines.check_tensorrt()
    assert (found.status, found.fix) == ("ok", None)
    assert found.detail == "TensorRT 10.3.0 on Double of a GPU, builds and runs a layer"
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.py").write_text("raise ImportError('libnvinfer.so.10: cannot open')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{DOUBLES}")
    (found,) = engines.check_tensorrt()
    assert (found.status, found.fix) == ("warn", "run with --engine onnx")
    assert "libnvinfer.so.10: cannot open" in found.detail
    assert found.fix not in found.detail


OURS = f"python3.{sys.version_info.minor}"
OTHER = f"python3.{sys.version_info.minor - 1}"


@pytest.mark.parametrize(
    ("python", "words", "wanted"), [(OTHER, f"made for {OTHER} while this is {OURS}", OTHER), ("python3", "", OURS)]
)
def test_tensorrt_that_the_environment_hides_is_found(hide, tmp_path, python, words, wanted):
    hide("tensorrt", "tensorrt_rtx_bindings")
    assert list(engines.check_tensorrt(tmp_path)) == []
    (tmp_path / "usr/lib" / python / "dist-packages" / "tensorrt").mkdir(parents=True)
    (found,) = engines.check_tensorrt(tmp_path)
    assert found.fix == f"recreate the environment with: {wanted} -m venv --system-site-packages .venv"
    assert "which this environment does not see" in found.detail
    assert words in found.detail


@pytest.mark.parametrize(
    ("release", "fix"),
    [
        ("36.4.3", "sudo apt install nvidia-jetpack"),
        ("35.4.1", "install JetPack 6.1 or newer (Orin and Thor only)"),
    ],
)
def test_a_jetson_without_a_tensorrt_that_it_can_use_gets_a_warning(hide, make_jetson, release, fix):
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        hide(name)
    root = make_jetson(release)
    if release == "35.4.1":  # made for Python 3.8, so a new environment would not help
        (root / "usr/lib/python3.8/dist-packages/tensorrt").mkdir(parents=True)
    (found,) = engines.check_tensorrt(root)
    assert (found.status, found.what, found.detail) == ("warn", "engine TensorRT", "not installed")
    assert found.fix.startswith(fix)


def test_a_foreign_tensorrt_that_shadows_the_one_of_jetpack_is_named(monkeypatch, make_jetson):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
    monkeypatch.syspath_prepend(DOUBLES)
    root = make_jetson("36.4.3")
    (root / "usr/lib/python3.10/dist-packages/tensorrt").mkdir(parents=True)
    shadows, works = engines.check_tensorrt(root)
    assert (shadows.status, works.status) == ("warn", "ok")
    assert f"{DOUBLES}" in shadows.detail
    assert f"shadows JetPack's in {root}/usr/lib/python3.10/dist-packages/tensorrt" in shadows.detail


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        (
            "tensorrt does not load (libnvinfer.so.10: cannot open)",
            "apt install --reinstall tensorrt python3-libnvinfer",
        ),
        ("tensorrt does not load (libnvdla_compiler.so: cannot open)", "apt install nvidia-l4t-dla-compiler"),
        ("CUDA failed while making a stream: out of memory", "swap does not help it"),
        ("CUDA failed while looking for a GPU: no CUDA-capable device is detected", "usermod -aG video,render"),
    ],
)
def test_known_errors_of_a_jetson_have_their_fix(monkeypatch, make_jetson, tmp_path, why, fix):
    (tmp_path / "tensorrt.py").write_text(f"raise ImportError({why!r})")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{DOUBLES}")  # whose driver works
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = engines.check_tensorrt(make_jetson("36.4.7"))
    assert found.status == "warn"
    assert fix in found.fix


def test_a_cuda_runtime_newer_than_the_driver_is_explained(monkeypatch, install_only):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))  # its driver supports CUDA 12.6
    install_only({"onnxruntime-gpu": "1.31.1"})
    (found,) = engines.check_cuda()
    assert (found.status, found.fix) == ("ok", None)
    assert re.fullmatch(r"12\.6 in \S*libcudart\S*; the driver supports 12\.6", found.detail)
    monkeypatch.setenv("CUDA_DOUBLE_RUNTIME", "12080")
    (found,) = engines.check_cuda()
    assert found.status == "warn"
    assert "CUDA 12.8 is newer than the driver supports (12.6, error 35)" in found.detail
    assert "run with --engine onnx" in found.fix


def test_a_wheel_made_for_numpy_1_is_explained(monkeypatch, tmp_path):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(
        "import sys\nsys.stderr.write('A module that was compiled using NumPy 1.x cannot be run in NumPy 2.1.0')\n"
        "raise ImportError('numpy.core.multiarray failed to import')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = engines.check_onnxruntime("onnxruntime-gpu")
    assert found.status == "bad"
    assert found.fix.startswith("pip install 'numpy<2'")
