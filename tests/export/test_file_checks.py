"""Checks of files: changed, missing and exchanged ones are all named."""

import shutil

import pytest

from ls_edge.core.errors import (
    BundleError,
)
from ls_edge.export.file_checks import check_files, checked_with, raise_problems


def problems(bundle):
    return {report.part: report.problem for report in check_files(bundle) if report.problem}


def test_changed_missing_and_exchanged_files_are_all_named(copied, exported):
    blocks = copied.folder / "blocks"
    raw = bytearray((copied.folder / "stem.onnx").read_bytes())
    raw[len(raw) // 2] ^= 1
    (copied.folder / "stem.onnx").write_bytes(raw)
    (blocks / "00.onnx").unlink()
    shutil.copy(exported.folder / "blocks/02.onnx", blocks / "01.onnx")
    found = problems(copied)
    assert found.keys() == {"stem", "block 0", "block 1"}
    assert "changed" in found["stem"]
    assert "is missing" in found["block 0"]
    assert "belongs to another bundle" in found["block 1"]
    with pytest.raises(BundleError, match="3 of 6 parts are wrong") as caught:
        raise_problems(copied, check_files(copied))
    assert all(name in str(caught.value) for name in ("stem.onnx", "00.onnx", "01.onnx"))


def test_an_unchanged_bundle_has_no_problem(exported):
    assert checked_with() == ["digests", "onnx", "onnxruntime"]
    assert problems(exported) == {}
    raise_problems(exported, check_files(exported))
