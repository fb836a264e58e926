"""Run folders: written, read, and refused if damaged; checkpoints of other origin."""

import argparse
import os
import types

import msgspec
import pytest
import torch

from ls_edge.core.errors import RunError
from ls_edge.training.models.small_models import image_spec_of
from ls_edge.training.runs.checkpoint import CONFIG, WEIGHTS, load_run, shown_model
from ls_edge.training.runs.foreign_checkpoint import read_foreign
from tests.training.runs.starts import CLASSES, TINY, same, save, start


def test_a_run_is_read_as_it_was_saved(tmp_path, monkeypatch):
    made, synced = start(depth=2), set()
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    run = load_run(save(tmp_path / "run", made))
    assert {(path.stat().st_mode, path.stat().st_ino in synced) for path in run.folder.iterdir()} == {
        ((run.folder / CONFIG).stat().st_mode, True)
    }
    assert same(run.view.weights(), made.view.weights())
    assert (
        run.record.model,
        run.record.method,
        run.record.classes,
        run.record.best_epoch,
        run.record.kept,
    ) == (
        "vit_digits",
        "shuffle",
        CLASSES,
        1,
        (0, 3),
    )
    assert (run.record.image, made.image, run.view.training) == (*[image_spec_of(made.view)] * 2, False)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(run.view(images, [1, 0]), made.view.eval()(images, [1, 0]))


def test_a_model_of_another_size_has_its_own_name(tmp_path):
    usual = save(tmp_path / "usual", start(args={}))
    own = save(tmp_path / "own", start(name="vit_tiny_patch16_224", args={
        "img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 2, "num_heads": 4,
    }))  # fmt: skip
    shown = [shown_model(run.record, run.view) for run in map(load_run, (usual, own))]
    assert shown == ["vit_digits", "vit_65x128_depth2"]
    larger = load_run(save(tmp_path / "larger", start(args={"img_size": 32})))
    assert shown_model(larger.record, larger.view) == "vit_digits.32px"
    named = start(name="vit_small_patch14_dinov2", args={"img_size": 70}, classes=("a", "b"))
    assert shown_model(
        msgspec.structs.replace(larger.record, model=named.model, model_args=named.args), named.view
    ) == ("vit_small_patch14_dinov2.70px")


def test_a_run_keeps_every_name_of_a_class(tmp_path):
    names = (
        "1e3", "12e04", "0e0", "1.e+2", ".5E-1", "0x10", "1_000", "010", "0b1", "1:30", "2026-11-25", "true", "No", "~",
        "null", "", ".inf", "-.NaN", "99999999999999999999", "=", "<<", "- a", "a: b", "#a", "'", '"', "*a", "&a", "!a",
        "%a", "@a", "`a", "{a", "[a", " a", "a ", "a\nb", "a\tb", "a\x07b", "a\\b", "a\x85b", "a\u2028b", "cafe\u0301",
        "caf\u00e9", "\u732b", "\U0001f408", "\ufeffa", "a" * 255,
    )  # fmt: skip
    run = load_run(save(tmp_path / "run", start(classes=names), classes=names))
    assert run.record.classes == names


def test_files_that_are_not_checkpoints_of_tensors_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, ("raise SystemExit(9)",))

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    namespace = {"model": {"a": torch.zeros(1)}, "args": types.SimpleNamespace(lr=1)}
    torch.save(namespace, tmp_path / "namespace.pth")
    torch.save({"model": {"a": torch.zeros(1)}, "args": argparse.Namespace(lr=Evil())}, tmp_path / "inside.pth")
    (tmp_path / "pickle.pth").write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "namespace.pth").read_bytes()[:300])
    for name, why in (
        ("evil", "it holds Python objects, such as exec"), ("namespace", "such as types.SimpleNamespace"),
        ("inside", "Python objects, such as exec"),
        ("pickle", "it is truncated or holds something else"), ("cut", "it is truncated or holds something else"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=f"not a checkpoint of plain tensors .*{why}") as caught:
            read_foreign(tmp_path / f"{name}.pth")
        assert "weights_only" not in str(caught.value)
        assert "trust" not in str(caught.value)
        assert "\n" not in str(caught.value)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(RunError, match=r"neither a safetensors file nor one of torch.*begins with 'junk'"):
        start(init=str(tmp_path / "junk.safetensors"))
    with pytest.raises(RunError, match="neither a run folder nor a file"):
        start(init=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"it has no config\.yaml"):
        start(init=str(tmp_path / "empty"))


def test_damaged_runs_are_refused(tmp_path):
    run = save(tmp_path / "run", start())
    with pytest.raises(RunError, match=r"is not a run: it has no config\.yaml"):
        load_run(tmp_path / "nowhere")
    (run / WEIGHTS).write_bytes((run / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(RunError, match="is not a safetensors file"):
        load_run(run)
    (run / WEIGHTS).unlink()
    with pytest.raises(RunError, match=r"model.safetensors is missing"):
        load_run(run)
    save(run, start(args={**TINY, "embed_dim": 32}))
    config = (run / "config.yaml").read_text().replace("embed_dim: 32", "embed_dim: 16")
    (run / "config.yaml").write_text(config)
    with pytest.raises(RunError, match="this model needs"):
        load_run(run)
    (run / "config.yaml").write_text("epochs: 3\n")
    with pytest.raises(RunError, match="no section 'run'"):
        load_run(run)
