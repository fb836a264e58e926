"""``ls-edge export``, ``verify`` and ``bench`` from the command line."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ls_edge.cli.main import main
from ls_edge.core.bundle import Bundle
from ls_edge.report.bundle import speed_here


@pytest.fixture
def call(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def test_a_run_is_exported_verified_and_timed(call, run_folder, tmp_path):
    out = tmp_path / "bundle"
    code, text, _ = call("export", run_folder, "--out", out, "--per-block", "--calibrate", "digits", "--json")
    assert code == 0
    document = json.loads(text)
    manifest = Bundle.open(out).manifest
    assert document["bundle_id"] == manifest.bundle_id
    assert document["verified"]["images"] == "digits"
    assert document["bytes"].keys() == {"stem", "block 0", "block 1", "block 2", "head"}

    code, text, _ = call("verify", out, "--run", run_folder, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["ok"] is True
    assert document["numbers"]["max_rel_error"] <= 1e-5

    code, text, _ = call("bench", out, "--threads", 1, "--duration", 0.05, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["monolith"] == "merged from the parts"
    assert document["chain_over_monolith"] == pytest.approx(
        document["chain_ms"]["p50"] / document["monolith_ms"]["p50"], abs=1e-3
    )


def test_verify_and_bench_print_tables(call, exported):
    code, text, _ = call("verify", exported.folder)
    assert code == 0
    assert "6 of 6 valid" in text
    code, text, _ = call("bench", exported.folder, "--threads", 1, "--duration", 0.05)
    assert code == 0
    assert "chain / monolith" in text
    assert "block 2" in text


@pytest.mark.release
def test_the_output_names_the_fast_precision_of_this_machine(call, run_folder, tmp_path):
    for precision, said in (
        ("fp32", "no precision is faster|int8 is faster|GPU"),
        ("fp16", "not faster than fp32|the GPU"),
    ):
        code, text, _ = call("export", run_folder, "--out", tmp_path / precision, "--precision", precision)
        assert code == 0
        (line,) = [line for line in text.splitlines() if line.startswith("this machine")]
        assert re.search(said, line), line


@pytest.mark.parametrize(
    ("precision", "has_gpu", "features", "said"),
    [
        ("fp16", True, [], "fast on the GPU"),
        ("fp16", False, ["avx2"], "fp16 is not faster than fp32; no precision is faster than fp32 on the CPU"),
        ("fp16", False, ["avx2", "avx_vnni"], "fp16 is not faster than fp32; int8 is faster on the CPU"),
        ("int8", False, ["avx512_vnni"], "fast on the CPU (avx512_vnni)"),
        ("int8", False, ["avx2"], "the CPU has neither VNNI nor AMX"),
        ("fp32", True, ["asimddp"], "fp16 is faster on the GPU; int8 is faster on the CPU (asimddp)"),
        ("fp32", False, [], "no precision is faster than fp32 on the CPU"),
    ],
)
def test_fp16_is_for_gpus_and_int8_for_cpus(precision, has_gpu, features, said):
    assert speed_here(precision, has_gpu=has_gpu, features=features).startswith(said)


def test_help_and_document_agree_about_precision(call):
    root = Path(__file__).parents[2]
    assert "fp16 for GPUs and int8 for CPUs" in (root / "docs" / "export.md").read_text(encoding="utf-8")
    _, text, _ = call("export", "--help")
    assert "fp16 for GPUs, int8 for CPUs" in " ".join(text.split())


def test_verify_names_the_damaged_part_and_fails(call, exported, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(exported.folder, bundle)
    (bundle / "blocks/01.onnx").unlink()
    code, text, err = call("verify", bundle, "--json")
    assert code == 1
    assert [part["part"] for part in json.loads(text)["parts"] if not part["ok"]] == ["block 1"]
    assert err.count("\n") == 1
    assert "01.onnx (block 1) is missing" in err
    assert call("verify", bundle)[0] == 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--precision", "int8", "--engine", "tensorrt"], 2, "needs ranges of activations; give images with --cal"),
        (["--precision", "fp8"], 2, "fp8"),
        (["--calibrate", "/nowhere/at/all"], 1, "/nowhere/at/all"),
    ],
)
def test_exports_that_are_impossible_are_refused_in_one_line(call, run_folder, tmp_path, flags, code, words):
    found, text, err = call("export", run_folder, "--out", tmp_path / "bundle", *flags)
    assert (found, text) == (code, "")
    assert words in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_runs_or_bundles_are_refused_in_one_line(call, tmp_path):
    for words in (["export", tmp_path, "--out", tmp_path / "b"], ["verify", tmp_path], ["bench", tmp_path]):
        code, text, err = call(*words)
        assert (code, text) == (1, "")
        assert err.count("\n") == 1
        assert str(tmp_path) in err
