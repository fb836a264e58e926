"""Writing bundles: atomically, with the same bytes every time, without losing an older bundle."""

import dataclasses
import json
import os
import shutil

import msgspec
import numpy as np
import onnx
import pytest
import torch

from ls_edge.core.bundle import MANIFEST, Bundle, ImageSpec, bundle_id_of, write_manifest
from ls_edge.core.errors import DigestMismatch, EngineError, RunError, UsageError, VerificationError
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.settings import ExportSettings
from ls_edge.export.writer import _draft as draft_manifest
from ls_edge.export.writer import check_target, export_run, parts_of, steps_of
from ls_edge.training.models.slots import SlotEmbedding
from ls_edge.training.models.view import BlockView
from ls_edge.training.runs.checkpoint import load_run
from tests.arrangements import arrangement_of

IMAGES = np.random.default_rng(1).standard_normal((2, 3, 16, 16), dtype=np.float32)


def test_a_manifest_describes_the_model(exported, loaded):
    manifest = Bundle.open(exported.folder).manifest
    assert (manifest.model, manifest.method, manifest.precision) == ("vit_17x32_depth3", "shuffle", "fp32")
    assert manifest.classes == tuple("0123456789")
    assert (manifest.tokens.count, manifest.tokens.dim, manifest.opset) == (17, 32, 17)
    assert manifest.image == loaded.record.image
    assert [part.file for part in manifest.parts.blocks] == ["blocks/00.onnx", "blocks/01.onnx", "blocks/02.onnx"]
    assert manifest.parts.whole is not None
    assert 0 < manifest.verified["max_rel_error"] <= 1e-5
    assert manifest.verified["parts"].keys() == {"stem", "block 0", "block 1", "block 2", "head", "whole"}
    assert manifest.verified["chain"].keys() == {"trained", "shuffled"}
    assert manifest.verified["reference"].startswith("pytorch ")


def test_files_have_metadata_that_identify_them(exported):
    manifest = exported.manifest
    for part, _ in manifest.part_names():
        model = onnx.load_model_from_string(exported.read(part))
        assert model.graph.name == f"ls-edge-{manifest.model_id[:16]}-{part.replace(' ', '-')}"
        said = {item.key.removeprefix("ls_edge."): item.value for item in model.metadata_props}
        classes = json.loads(said.pop("classes")) if part in ("head", "whole") else None
        assert said == {"model_id": manifest.model_id, "part": part, "precision": "fp32", "slot": "none"}
        assert classes in (None, list(manifest.classes))


def test_the_orientation_of_photos_is_in_the_manifest_if_it_is_on(exported, loaded, tmp_path):
    plain = msgspec.to_builtins(exported.manifest.image)
    off = msgspec.convert({**plain, "exif_orientation": False}, ImageSpec)
    assert off == exported.manifest.image
    assert "exif_orientation" not in json.loads((exported.folder / MANIFEST).read_bytes())["image"]
    record = msgspec.structs.replace(
        loaded.record, image=msgspec.structs.replace(loaded.record.image, exif_orientation=True)
    )
    upright = draft_manifest(dataclasses.replace(loaded, record=record), parts_of(loaded), ExportSettings())
    assert upright.model_id != exported.manifest.model_id
    copied = tmp_path / "bundle"
    shutil.copytree(exported.folder, copied)
    manifest = msgspec.structs.replace(upright, parts=exported.manifest.parts)
    bundle_id = bundle_id_of(Bundle(copied, manifest).interface, manifest.precision, manifest.parts)
    write_manifest(copied, msgspec.structs.replace(manifest, bundle_id=bundle_id))
    assert Bundle.open(copied).manifest.image.exif_orientation is True
    path = copied / MANIFEST
    path.write_text(path.read_text().replace('"exif_orientation": true', '"exif_orientation": false'))
    with pytest.raises(DigestMismatch, match="was changed"):
        Bundle.open(copied)


@pytest.mark.release
def test_the_same_run_gives_the_same_digests_from_any_folder(run_folder, exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = []
    run = load_run(os.path.relpath(run_folder))
    doubtful = dataclasses.replace(run, record=msgspec.structs.replace(run.record, remark="guessing", best_epoch=1))
    again = export_run(doubtful, "deep/down/other name", on_step=steps.append)
    assert again.warnings == (f"{run.folder}: guessing",)
    ours, theirs = exported.manifest, again.bundle.manifest
    without_whole = msgspec.structs.replace(ours.parts, whole=None)
    assert bundle_id_of(exported.interface, "fp32", without_whole) == theirs.bundle_id != ours.bundle_id
    assert ours.model_id == theirs.model_id
    assert ours.parts.blocks == theirs.parts.blocks
    assert (ours.parts.stem, ours.parts.head) == (theirs.parts.stem, theirs.parts.head)
    assert len(steps) == steps_of(3)
    assert sorted(p.name for p in (tmp_path / "deep/down").iterdir()) == ["other name"]


@pytest.mark.release
def test_an_older_bundle_is_replaced_when_the_new_one_was_verified(make_run, exported, tmp_path):
    def spoil(view):
        view.blocks[1].mlp.fc1.bias.fill_(3e38)  # finite, but sums of it are not

    out = tmp_path / "bundle"
    shutil.copytree(exported.folder, out)
    with pytest.raises(VerificationError, match=r"^block 1: PyTorch itself"):
        export_run(load_run(make_run(tmp_path / "bad", change=spoil)), out)
    assert Bundle.open(out).manifest == exported.manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "bundle"]

    new = export_run(load_run(make_run(tmp_path / "good", seed=2)), out).bundle.manifest
    assert Bundle.open(out).manifest == new
    assert new.model_id != exported.manifest.model_id
    assert not (out / "whole.onnx").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "bundle", "good"]


def test_a_folder_that_holds_something_else_is_refused(tmp_path, monkeypatch):
    for name in ("empty", "notes", "models"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes/diary.txt").write_text("dear diary")
    (tmp_path / "models/other.onnx").write_bytes(b"")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("empty", "new"):
        check_target(tmp_path / name)
    monkeypatch.chdir(tmp_path / "empty")
    for name, words in (
        ("notes", r"diary\.txt"),
        ("models", "not a bundle"),
        ("file", "is not a folder"),
        ("link", "is not a folder"),
        ("empty", "is or holds the working folder"),
    ):
        with pytest.raises(UsageError, match=words):
            check_target(tmp_path / name)


def test_classes_that_do_not_fit_the_logits_are_refused(loaded, tmp_path):
    fewer = dataclasses.replace(loaded, record=_with_classes(loaded.record, ("cat", "dog")))
    with pytest.raises(RunError, match="10 logits and the run 2 class names"):
        export_run(fewer, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def _with_classes(record, classes):
    import msgspec

    return msgspec.structs.replace(record, classes=classes)


@pytest.mark.parametrize("per_block", [pytest.param(False, marks=pytest.mark.release), True])
def test_blocks_with_a_slot_compute_the_same_as_pytorch(loaded, tmp_path, per_block):
    torch.manual_seed(0)
    view = BlockView(loaded.view.model)
    view.slots = SlotEmbedding(view.num_blocks, view.token_spec.dim, per_block=per_block)
    for table in view.slots.embed if per_block else [view.slots.embed]:
        torch.nn.init.normal_(table.weight)  # as after a training: it starts at zero
    view.eval()
    bundle = export_run(dataclasses.replace(loaded, view=view), tmp_path / "bundle", ExportSettings(whole=True)).bundle
    assert bundle.manifest.needs_slot
    tracks = arrangement_of([[[2], [0, 1]]])
    with torch.no_grad(), Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        for arrangement in (None, (2, 0, 1), (1,), tracks):
            expected = view(torch.from_numpy(IMAGES), arrangement).numpy()
            np.testing.assert_allclose(chain.forward(IMAGES, arrangement), expected, rtol=0, atol=1e-5)
        shifted = chain.block(1, chain.stem(IMAGES), 2)
        assert np.abs(shifted - chain.block(1, chain.stem(IMAGES), 0)).max() > 0.01
        for bad in (-1, 3, np.array([0, -1])):  # the file itself would wrap a negative one round
            with pytest.raises(EngineError, match=r"^block 1: slot is .*, must be 0 to 2"):
                chain.block(1, chain.stem(IMAGES), bad)
    import onnxruntime

    whole = onnxruntime.InferenceSession(bundle.read("whole")).run(None, {"images": IMAGES})[0]
    with torch.no_grad():
        np.testing.assert_allclose(whole, view(torch.from_numpy(IMAGES)).numpy(), rtol=0, atol=1e-5)
