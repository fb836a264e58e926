"""Doctor: probes survive what they look for, and each fault has its line."""

import importlib.metadata
import re
from pathlib import Path

import numpy as np
import pytest

from ls_edge.device import diagnostics, hardware
from ls_edge.device.diagnostics import Finding, ProbeResult, probe, worst
from ls_edge.engines import diagnostics as engines


def pairs(findings):
    return {finding.what: finding for finding in findings}


def test_a_probe_hands_back_its_last_line():
    assert probe("print('noise'); print('{\"a\": 1}')").found == {"a": 1}
    assert probe("import sys, json; print(json.dumps({'got': sys.argv[1]}))", "x").found == {"got": "x"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("raise ImportError('libcuda.so.1: not found')", "ImportError: libcuda.so.1: not found"),
        ("import sys; sys.exit('no such device')", "no such device"),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("print('no json')", "ended with 0"),
    ],
)
def test_a_probe_that_fails_says_why(code, why):
    tried = probe(code)
    assert tried.found is None
    assert tried.why == why


def test_a_probe_that_hangs_is_ended():
    tried = probe("import time; time.sleep(600)", limit_s=0.3)
    assert tried.found is None
    assert "did not end within" in tried.why


def test_a_probe_does_not_import_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert "the wrong one" not in probe("import onnxruntime; print('{}')").why


@pytest.mark.parametrize(
    ("ours", "operator", "rows"), [(engines.PRODUCT_MODEL, "MatMul", 4), (engines.LAYER_MODEL, "Add", "B")]
)
def test_the_models_of_probes_are_those_that_onnx_writes(ours, operator, rows):
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [rows, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x", "x"], ["y"])], "square", [x], [y])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    onnx.checker.check_model(model, full_check=True)
    assert bytes.fromhex(ours) == model.SerializeToString(deterministic=True)


def test_the_model_of_products_multiplies():
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(bytes.fromhex(engines.PRODUCT_MODEL), providers=["CPUExecutionProvider"])
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert np.array_equal(session.run(None, {"x": x})[0], x @ x)


def test_engines_that_load_are_found():
    pytest.importorskip("onnxruntime")
    found = pairs(engines.check_engines())
    assert found["engine CPUExecutionProvider"].status == "ok"
    if "engine TensorRT" not in found and "engine CUDAExecutionProvider" not in found:
        auto = "takes CPUExecutionProvider (not TensorRT: not installed; not CUDAExecutionProvider: not installed)"
        assert found["engine auto"].detail == auto


def test_providers_that_are_listed_but_do_not_load(monkeypatch):
    def fake(code, *arguments, **kwargs):
        if "get_available_providers" in code:
            return ProbeResult({"version": "9", "all": ["CUDAExecutionProvider", "CPUExecutionProvider"]})
        return ProbeResult(None, "crashed with SIGSEGV")

    monkeypatch.setattr(engines, "probe", fake)
    found = pairs(engines.check_onnxruntime("onnxruntime-gpu"))
    assert found["engine CUDAExecutionProvider"].status == "warn"
    assert "SIGSEGV" in found["engine CUDAExecutionProvider"].detail
    assert found["engine CPUExecutionProvider"].status == "bad"
    assert found["engine CPUExecutionProvider"].fix == "pip install --force-reinstall onnxruntime-gpu"


def test_nothing_to_run_engines_with(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    (found,) = engines.check_engines()
    assert (found.status, found.what) == ("warn", "engines")


def with_versions(monkeypatch, **versions):
    """Pretend that exactly these distributions are installed, besides what the core needs."""
    core = ("click", "msgspec", "numpy", "pillow", "pyyaml", "pyzmq", "rich")
    versions = {**dict.fromkeys(core, "99.0"), **{name.replace("_", "-"): value for name, value in versions.items()}}
    monkeypatch.setattr(diagnostics, "installed", versions.get)


def test_a_board_without_extras_is_well(monkeypatch):
    with_versions(monkeypatch, onnxruntime="1.20.1")
    found = pairs(diagnostics.check_packages())
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "needed to train" in found["train"].detail
    assert found["train"].fix.startswith("pip install 'torch>=")
    assert found["onnxruntime"].detail == "1.20.1"


def test_two_builds_of_onnxruntime(monkeypatch):
    with_versions(monkeypatch, onnxruntime="1.20.1", onnxruntime_gpu="1.20.1")
    monkeypatch.setattr(hardware, "has_nvidia", lambda: True)
    found = pairs(diagnostics.check_packages())["ONNX Runtime"]
    assert found.status == "bad"
    assert found.detail == "onnxruntime and onnxruntime-gpu are installed and overwrite each other's files"
    assert found.fix == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime-gpu[cuda,cudnn]'"
    monkeypatch.setattr(hardware, "has_nvidia", lambda: False)
    assert pairs(diagnostics.check_packages())["ONNX Runtime"].fix.endswith("&& pip install onnxruntime")


def test_packages_that_are_missing_or_old(monkeypatch):
    with_versions(monkeypatch, torch="2.15.0+cu130", timm="0.9.1", pyzmq="25.1")
    found = pairs(diagnostics.check_packages())
    assert (found["pyzmq"].status, found["pyzmq"].detail) == ("bad", "25.1, older than 26.0")
    assert (found["torch"].status, found["torch"].detail) == ("ok", "2.15.0+cu130")
    assert found["timm"].status == "warn"
    assert found["train"].status == "warn"
    assert "safetensors" in found["train"].fix
    monkeypatch.setattr(diagnostics, "installed", lambda name: None)
    assert worst(list(diagnostics.check_packages())) == "bad"


def test_the_core_list_is_that_of_the_package():
    required = {line.split(">")[0].lower() for line in importlib.metadata.requires("ls-edge") if "extra" not in line}
    assert required <= set(pairs(diagnostics.check_packages()))


def test_worst():
    assert worst([]) == "ok"
    assert worst([Finding("ok", "", ""), Finding("bad", "", ""), Finding("warn", "", "")]) == "bad"
    assert worst([Finding("warn", "", ""), Finding("ok", "", "")]) == "warn"


def test_libzmq_without_curve(monkeypatch):
    monkeypatch.setattr(diagnostics, "probe", lambda code: ProbeResult({"version": "4.3.5", "curve": False}))
    (found,) = diagnostics.check_zmq()
    assert found.status == "warn"
    assert "without CURVE" in found.detail


def test_cores_that_the_control_group_does_not_grant(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    assert hardware.cpu_quota(tmp_path / "root", own) is None
    (tmp_path / "root/a/b/cpu.max").write_text("max 100000\n")
    (tmp_path / "root/a/cpu.max").write_text("150000 100000\n")
    assert hardware.cpu_quota(tmp_path / "root", own) == 1.5
    (tmp_path / "root/cpu").mkdir()
    (tmp_path / "root/cpu/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "root/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert hardware.cpu_quota(tmp_path / "root", own) == 0.5
    monkeypatch.setattr(hardware, "cpu_quota", lambda: 0.5)
    found = pairs(diagnostics.check_hardware())["cores"]
    assert found.status == "warn"
    assert "limit the threads of all peers together to 1" in found.fix


DOUBLES = Path(__file__).parents[1] / "doubles"


def test_tensorrt_builds_and_runs_a_layer(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: name)
    (found,) = engines.check_tensorrt()
    assert (found.status, found.fix) == ("ok", None)
    assert found.detail == "TensorRT 10.3.0 on Double of a GPU, builds and runs a layer"
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.py").write_text("raise ImportError('libnvinfer.so.10: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = engines.check_tensorrt()
    assert (found.status, found.fix) == ("warn", "use --engine onnx")
    assert "libnvinfer.so.10: cannot open" in found.detail


@pytest.mark.parametrize(("python", "words"), [("python3.10", "made for python3.10 while this is"), ("python3", "")])
def test_tensorrt_that_the_environment_hides(monkeypatch, tmp_path, python, words):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(engines.sys, "version_info", (3, 11, 2))
    assert list(engines.check_tensorrt(tmp_path)) == []
    (tmp_path / python / "dist-packages" / "tensorrt").mkdir(parents=True)
    (found,) = engines.check_tensorrt(tmp_path)
    wanted = "python3.10" if words else "python3.11"
    assert found.fix == f"make the environment again with: {wanted} -m venv --system-site-packages .venv"
    assert "which this environment does not see" in found.detail
    assert words in found.detail


def test_a_cuda_runtime_newer_than_the_driver_is_explained(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))  # its driver supports CUDA 12.6
    monkeypatch.setattr(engines, "installed", lambda name: "1.31.1")
    (found,) = engines.check_cuda()
    assert (found.status, found.fix) == ("ok", None)
    assert re.fullmatch(r"12\.6 in \S*libcudart\S*; the driver supports 12\.6", found.detail)
    monkeypatch.setenv("CUDA_DOUBLE_RUNTIME", "12080")
    (found,) = engines.check_cuda()
    assert found.status == "warn"
    assert "CUDA 12.8 is newer than the driver supports (12.6, error 35)" in found.detail
    assert "use --engine onnx" in found.fix


def test_a_wheel_made_for_numpy_1(monkeypatch, tmp_path):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(
        "import sys\nsys.stderr.write('A module that was compiled using NumPy 1.x cannot be run in NumPy 2.1.0')\n"
        "raise ImportError('numpy.core.multiarray failed to import')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = engines.check_onnxruntime("onnxruntime-gpu")
    assert found.status == "bad"
    assert found.fix.startswith("pip install 'numpy<2'")


def test_a_provider_that_rounds_float32_is_named(monkeypatch):
    def fake(code, *arguments, **kwargs):
        if "get_available_providers" in code:
            return ProbeResult({"version": "9", "all": ["CUDAExecutionProvider"]})
        return ProbeResult({"right": True, "exact": False})

    monkeypatch.setattr(engines, "probe", fake)
    (found,) = engines.check_onnxruntime("onnxruntime-gpu")
    assert found.status == "warn"
    assert "rounds float32" in found.detail
