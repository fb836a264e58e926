"""Probes survive what they look for, and each fault of packages and hardware has its line."""

import importlib.metadata

import pytest

from ls_edge.device import diagnostics, hardware
from ls_edge.device.diagnostics import Finding, probe, worst


def pairs(findings):
    return {finding.what: finding for finding in findings}


@pytest.mark.processes
def test_a_probe_hands_back_its_last_line():
    assert probe("print('noise'); print('{\"a\": 1}')").found == {"a": 1}
    assert probe("import sys, json; print(json.dumps({'got': sys.argv[1]}))", "x").found == {"got": "x"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("raise ImportError('libcuda.so.1: not found')", "ImportError: libcuda.so.1: not found"),
        ("import sys; sys.exit('no such device')", "no such device"),
        (
            "raise SystemExit(\"CUDA failed; see 'ls-edge doctor', or run with --engine onnx\")",
            "CUDA failed; run with --engine onnx",
        ),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("print('no json')", "ended with 0"),
    ],
)
def test_a_probe_that_fails_says_why(code, why):
    tried = probe(code)
    assert tried.found is None
    assert tried.why == why


@pytest.mark.processes
def test_a_probe_that_hangs_is_ended():
    tried = probe("import signal; signal.pause()", limit_s=0.3)
    assert tried.found is None
    assert "did not end within" in tried.why


@pytest.mark.processes
def test_a_probe_does_not_import_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert "the wrong one" not in probe("import onnxruntime; print('{}')").why


CORE = dict.fromkeys(("click", "msgspec", "numpy", "packaging", "pillow", "pyyaml", "pyzmq", "rich"), "99.0")


def test_a_board_without_extras_is_well(install_only):
    install_only({**CORE, "onnxruntime": "1.20.1"})
    found = pairs(diagnostics.check_packages())
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "needed to train" in found["train"].detail
    assert found["train"].fix.startswith("pip install 'torch>=")
    assert found["onnxruntime"].detail == "1.20.1"


def test_the_onnxruntime_build_for_the_machine_is_kept(install_only, monkeypatch):
    install_only({**CORE, "onnxruntime": "1.20.1", "onnxruntime-gpu": "1.20.1"})
    monkeypatch.setattr(hardware, "has_nvidia", lambda: True)
    found = pairs(diagnostics.check_packages())["ONNX Runtime"]
    assert found.status == "bad"
    assert found.detail == "onnxruntime and onnxruntime-gpu are installed and overwrite each other's files"
    assert found.fix == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime-gpu[cuda,cudnn]'"
    monkeypatch.setattr(hardware, "has_nvidia", lambda: False)
    assert pairs(diagnostics.check_packages())["ONNX Runtime"].fix.endswith("&& pip install onnxruntime")


def test_packages_that_are_missing_or_old_are_named_with_the_fix(install_only):
    install_only({**CORE, "torch": "2.15.0+cu130", "timm": "0.9.1", "pyzmq": "25.1"})
    found = pairs(diagnostics.check_packages())
    assert (found["pyzmq"].status, found["pyzmq"].detail) == ("bad", "25.1; >=26.0 is required")
    assert (found["torch"].status, found["torch"].detail) == ("ok", "2.15.0+cu130")
    assert found["timm"].status == "warn"
    assert found["train"].status == "warn"
    assert "safetensors" in found["train"].fix
    install_only({})
    assert worst(list(diagnostics.check_packages())) == "bad"


def test_every_requirement_of_the_core_is_checked():
    required = {line.split(">")[0].lower() for line in importlib.metadata.requires("ls-edge") if "extra" not in line}
    assert required <= set(pairs(diagnostics.check_packages()))


def test_the_worst_status_counts():
    assert worst([]) == "ok"
    assert worst([Finding("ok", "", ""), Finding("bad", "", ""), Finding("warn", "", "")]) == "bad"
    assert worst([Finding("warn", "", ""), Finding("ok", "", "")]) == "warn"


@pytest.mark.processes
def test_libzmq_without_curve_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "zmq.py").write_text("zmq_version = lambda: '4.3.5'\nhas = lambda feature: False\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = diagnostics.check_zmq()
    assert found.status == "warn"
    assert "without CURVE" in found.detail


@pytest.mark.processes
@pytest.mark.parametrize(("release", "fix"), [(None, "see https://pytorch.org"), ("36.4.7", "a peer needs none")])
def test_a_torch_that_cannot_use_the_gpu_is_a_warning(install_only, tmp_path, monkeypatch, release, fix):
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = lambda: False\nclass version:\n    cuda = '13.0'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(hardware, "has_nvidia", lambda: True)
    monkeypatch.setattr(hardware, "jetson_linux", lambda: release)
    install_only({"torch": "2.11"})
    (found,) = diagnostics.check_torch()
    assert found.status == "warn"
    assert fix in found.fix


ORIN, THOR = "NVIDIA Jetson Orin Nano Developer Kit", "NVIDIA Jetson AGX Thor Developer Kit"


@pytest.mark.parametrize(
    ("release", "model", "nodes", "expected"),
    [
        ("36.4.7", ORIN, ["nvmap", "nvgpu/igpu0/ctrl"], [("JetPack", "ok", "6.2.1", "")]),
        ("38.4.0", THOR, ["nvidia0"], [("JetPack", "ok", "7.1", "")]),
        (  # as its owner published: only the node for power is there
            "39.2.0", ORIN, ["nvmap", "nvgpu/igpu0/power", "nvhost-power-gpu"],
            [("JetPack", "ok", "7.2", ""), ("GPU", "warn", "/dev/nvgpu/igpu0/ctrl missing", "7.2: /etc/firmware")],
        ),
        (
            "39.2.0", THOR, [],
            [("JetPack", "ok", "7.2", ""), ("GPU", "warn", "/dev/nvidia0 missing", "sudo dmesg | grep")],
        ),
        (
            "36.3.0", ORIN, ["nvmap", "nvhost-ctrl-gpu"],
            [("JetPack", "warn", "JetPack 6.0 is not supported: its TensorRT", "install JetPack 6.1 or newer")],
        ),
        (
            "35.4.1", "NVIDIA Jetson Xavier NX Developer Kit", ["nvmap", "nvhost-ctrl-gpu"],
            [("JetPack", "warn", "its Python is 3.8, ls-edge needs 3.10", "older boards serve on their CPU")],
        ),
        (
            "32.7.6", "NVIDIA Jetson Nano Developer Kit", ["nvmap", "nvhost-ctrl-gpu"],
            [("JetPack", "warn", "its Python is 3.6, ls-edge needs 3.10", "older boards serve on their CPU")],
        ),
    ],
)  # fmt: skip
def test_a_jetsons_release_and_gpu_are_checked(make_jetson, release, model, nodes, expected):
    found = list(diagnostics.check_jetson(make_jetson(release, model, nodes)))
    assert [(finding.what, finding.status) for finding in found] == [one[:2] for one in expected]
    for finding, (_, _, detail, fix) in zip(found, expected, strict=True):
        assert detail in finding.detail
        assert fix in (finding.fix or "")


def test_a_pc_has_no_line_of_a_jetson(tmp_path):
    assert list(diagnostics.check_jetson(tmp_path)) == []


@pytest.mark.parametrize(("release", "share"), [(None, 0.8), ("36.4.7", 0.6)])
def test_blocks_have_the_room_that_plan_gives_them(monkeypatch, release, share):
    monkeypatch.setattr(hardware, "jetson_linux", lambda *_: release)
    monkeypatch.setattr(hardware, "memory_gib", lambda: (8.0, (1000 + diagnostics.PEER_MIB) / 1024))
    assert f"room for blocks of {1000 * share:,.0f} MiB" in pairs(diagnostics.check_hardware())["memory"].detail


def test_cores_that_the_control_group_does_not_grant_are_a_warning(tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    assert hardware.cpu_quota(tmp_path / "root", own) is None
    (tmp_path / "root/a/b/cpu.max").write_text("max 100000\n")
    (tmp_path / "root/a/cpu.max").write_text("150000 100000\n")
    assert hardware.cpu_quota(tmp_path / "root", own) == 1.5
    monkeypatch.setattr(hardware, "cpu_quota", lambda: 0.5)
    found = pairs(diagnostics.check_hardware())["cores"]
    assert found.status == "warn"
    assert "limit the threads of all peers together to 1" in found.fix
