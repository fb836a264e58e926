"""Commands to install something name packages on PyPI, and the right build for the machine."""

import re
from pathlib import Path

import pytest

from ls_edge.device import hardware, requirements

ROOT = Path(__file__).parents[2]


def all_but(*names):
    """Versions of all requirements but some."""
    every = (item.name for group in requirements.requirements().values() for item in group)
    return {name: "99.0" for name in every if name not in names}


def test_missing_packages_are_named_and_never_the_project(install_only):
    install_only(all_but("torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu"))
    assert re.fullmatch(r"pip install 'torch>=[\d.]+' 'timm>=[\d.]+'", requirements.install_command("train"))
    assert re.fullmatch(
        r"pip install 'torch>=[\d.]+' 'timm>=[\d.]+' 'onnx>=[\d.]+'", requirements.install_command("train", "export")
    )
    assert "ls-edge" not in requirements.install_command("train", "export", "cpu")


def test_all_packages_of_an_extra_are_named_if_none_is_missing(install_only):
    install_only(all_but())
    command = requirements.install_command("train")
    assert command.startswith("pip install 'torch>=")
    assert "safetensors" in command


def test_a_package_that_is_too_old_counts_as_missing(install_only):
    install_only({**all_but(), "timm": "0.9.1"})
    assert re.fullmatch(r"pip install 'timm>=[\d.]+'", requirements.install_command("train"))


@pytest.mark.parametrize(
    ("nvidia", "processor", "advice"),
    [
        (False, "x86_64", "pip install onnxruntime"),
        (False, "aarch64", "pip install onnxruntime"),
        (True, "x86_64", "pip install 'onnxruntime-gpu[cuda,cudnn]'"),
        (True, "aarch64", "install the onnxruntime-gpu wheel that NVIDIA provides for this board's JetPack"),
    ],
)
def test_the_build_of_onnxruntime_fits_the_machine(monkeypatch, install_only, nvidia, processor, advice):
    monkeypatch.setattr(hardware, "has_nvidia", lambda: nvidia)
    monkeypatch.setattr(requirements.platform, "machine", lambda: processor)
    install_only(all_but(*requirements.ORT_BUILDS))
    assert requirements.engine_advice().startswith(advice)
    assert requirements.install_command("cpu") == requirements.engine_advice()
    monkeypatch.setattr(requirements, "jetpack_problem", lambda: "JetPack 5 is not supported")  # its GPU is of no use
    assert requirements.engine_advice() == "pip install onnxruntime"


def test_an_installed_build_of_onnxruntime_is_kept(install_only):
    install_only(all_but("onnxruntime", "onnx"))
    assert re.fullmatch(r"pip install 'onnx>=[\d.]+'", requirements.install_command("export", "cpu"))


def test_bounds_are_read_for_an_extra_with_a_hyphen(install_only):
    """The index's tools write the upper bound first."""
    found = requirements.requirements()
    assert all(item.name not in ("nvidia-cuda-runtime-cu12", "tensorrt-cu12") for item in found[""])
    (tensorrt, runtime) = found["tensorrt-cu12"]
    assert (tensorrt.name, str(tensorrt.specifier)) == ("tensorrt-cu12", "<12,>=10.3")
    assert str(runtime) == "nvidia-cuda-runtime-cu12<13,>=12.6"
    install_only({"nvidia-cuda-runtime-cu12": "13.0.1"})
    assert not requirements.satisfied(runtime)
    install_only({"nvidia-cuda-runtime-cu12": "12.9.79"})
    assert requirements.satisfied(runtime)


def test_a_build_for_a_board_counts_as_its_release(install_only):
    """NVIDIA's wheels for a Jetson have versions such as 2.5.0a0+872d972e41.nv24.8."""
    (torch,) = (item for item in requirements.requirements()["train"] if item.name == "torch")
    least = str(torch.specifier).removeprefix(">=")
    install_only({"torch": f"{least}.0a0+872d972e41.nv24.8"})
    assert requirements.satisfied(torch)


def test_an_extra_has_the_requirements_of_those_it_includes():
    known = requirements.requirements()
    assert set(known["train"]) < set(known["export"]) < set(known["dev"])
    assert "click" in {item.name for item in known[""]}


def test_no_message_and_no_document_installs_the_project_by_name():
    """It is not on the index; ``pip install ".[cpu]"`` in a clone or a wheel's file are what works."""
    folders = [ROOT / name for name in ("ls_edge", "runtime", "training", "export", "docs", "examples")]
    texts = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    assert len(texts) > 100
    for path in [*texts, ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install (-\S+ )*['\"]?ls-edge(\[[\w,]+\])?(?! @)['\"\s]", text), path


def test_a_missing_compiler_or_header_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert requirements.compiler_problem() == "there is no C compiler (apt install gcc)"
    compiler = tmp_path / "clang"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(requirements.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert requirements.compiler_problem() == f"there is no {tmp_path}/Python.h (apt install python3-dev)"
    (tmp_path / "Python.h").touch()
    assert requirements.compiler_problem() == ""
