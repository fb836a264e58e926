"""Training in stages: who validates on what, and what of it a later evaluation knows."""

import functools
import shutil
import tarfile

import msgspec
import pytest

import ls_edge
from ls_edge.data.content import KnownImages, digests_of
from ls_edge.data.datasets import open_data
from ls_edge.training.loop import train
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.colors import write_colors
from tests.training.commands import call
from tests.training.trainings import Silent

settings = functools.partial(trainings.settings, batch_size=16, epochs=1, args={"depth": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    data = write_colors(folder / "data")
    train(settings(str(data), method="sequential"), folder / "start", reporter=Silent())
    return folder


def trained_digests(run):
    return set(KnownImages.read(load_run(run).record.trained_on).digests.tolist())


def all_digests(data):
    return set(digests_of(open_data(str(data), "train").images).tolist())


def stage(folder, out, data=None, **flags):
    reporter = Silent()
    config = settings(str(data or folder / "data"), **{"init": str(folder / "start" / flags.pop("file", "")), **flags})
    train(config, out, reporter=reporter, model_named=False)
    return trained_digests(out), [text for text in reporter.warnings if "training images of the start" in text]


@pytest.mark.parametrize(
    "flags",
    [
        {"seed": 2, "changes": ["data.validation=0.3"]},
        {"changes": ["data.split_seed=5"]},
        {"seed": 2, "file": "model.safetensors"},
    ],
    ids=["validation", "split", "file"],
)
def test_a_second_stage_does_not_validate_on_what_its_start_was_trained_on(folder, tmp_path, flags):
    known, warnings = stage(folder, tmp_path / "run", **flags)
    assert known == trained_digests(folder / "start")
    assert len(all_digests(folder / "data") - known) == 12  # of 120
    assert warnings == []


def test_every_seed_of_a_second_stage_has_the_validation_images_of_the_start(folder, tmp_path):
    more = ["--init", folder / "start", "--seeds", 3, "--epochs", 1, "--batch-size", 16, "--threads", 1]
    assert call("train", "--data", folder / "data", "--out", tmp_path / "runs", "--method", "shuffle", *more) == 0
    for seed in range(3):
        assert trained_digests(tmp_path / "runs" / f"seed-{seed}") == trained_digests(folder / "start")


def test_a_third_stage_and_a_copy_without_training_hand_the_images_down(folder, tmp_path):
    train(settings(str(folder / "data"), epochs=0, init=str(folder / "start"), seed=3), tmp_path / "copy",
          reporter=Silent(), model_named=False)  # fmt: skip
    assert trained_digests(tmp_path / "copy") == trained_digests(folder / "start")
    assert load_run(tmp_path / "copy").record.problem == ""
    again = settings(str(folder / "data"), init=str(tmp_path / "copy"), seed=4)
    train(again, tmp_path / "again", reporter=Silent(), model_named=False)
    assert trained_digests(tmp_path / "again") == trained_digests(folder / "start")


def test_other_data_with_known_images_validates_on_new_ones_or_counts_the_known(folder, tmp_path):
    more = write_colors(tmp_path / "more", 20, seed=7)
    for name in ("blue", "green", "red"):
        for path in (folder / "data" / name).iterdir():
            shutil.copy(path, more / name / f"old-{path.name}")
    known, warnings = stage(folder, tmp_path / "run", more)
    held = all_digests(more) - known
    assert (len(held) >= 15, held & trained_digests(folder / "start"), warnings) == (True, set(), [])
    assert known >= trained_digests(folder / "start")  # a later evaluation knows both
    (tmp_path / "only").mkdir()
    start = trained_digests(folder / "start")
    images = open_data(str(folder / "data"), "train")
    for image, digest in zip(images.images, digests_of(images.images).tolist(), strict=True):
        if digest in start:
            path = tmp_path / "only" / image.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image.read())
    _, [warning] = stage(folder, tmp_path / "known", tmp_path / "only")
    assert f"11 of the 11 validation images of {tmp_path / 'only'} were training images of the start" in warning


def test_copies_of_a_picture_are_noted(folder, tmp_path):
    data = shutil.copytree(folder / "data", tmp_path / "data")
    for index in range(9):
        shutil.copy(data / "red" / f"{index:03}.png", data / "red" / f"copy-{index}.png")
    notes, reporter = [], Silent()
    reporter.note = notes.append
    train(settings(str(data)), tmp_path / "run", reporter=reporter)
    assert any("9 images are copies of others" in text for text in notes)
    digests = digests_of(open_data(str(data), "train").images)
    held = set(digests.tolist()) - trained_digests(tmp_path / "run")
    assert len(held) + len(trained_digests(tmp_path / "run")) == 120


def evaluated(run, data, **flags):
    said = []
    found = ls_edge.evaluate(run, str(data), orders=2, keep=(), on_warning=said.append, **flags)
    return found, [text for text in said if "was trained on" in text]


def test_an_evaluation_knows_training_images_by_content_and_counts_them(folder, tmp_path):
    start = folder / "start"
    found, [warning] = evaluated(start, folder / "data")
    assert warning.startswith("the model was trained on 108 of the 120 different images of")
    assert (found.settings["trained_on"], found.settings["different"]) == (108, 120)
    other = write_colors(tmp_path / "other", seed=9)  # the same names
    assert evaluated(start, other)[1] == []
    less = shutil.copytree(folder / "data", tmp_path / "less")
    known = trained_digests(start)
    gone = next(p for p in sorted(less.rglob("*.png")) if digests_of(open_data(str(p), "eval").images)[0] in known)
    gone.unlink()
    for index, path in enumerate(sorted(less.rglob("*.png"))):
        path.rename(path.with_name(f"{index * 37 % 1000}-renamed.png"))
    assert "107 of the 119 different images" in evaluated(start, less)[1][0]
    both = tmp_path / "both"
    shutil.copytree(folder / "data", both / "train")
    shutil.copytree(folder / "data", both / "val")
    assert "108 of the 120 different images" in evaluated(start, both)[1][0]
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(folder / "data", "data")
    assert "108 of the 120 different images" in evaluated(start, tmp_path / "data.tar", limit=300)[1][0]


@pytest.mark.release
def test_a_bundle_and_its_card_repeat_the_warning_without_a_local_path(folder, tmp_path):
    bundle = tmp_path / "bundle"
    assert call("export", folder / "start", "--out", bundle, "--per-block") == 0
    found, [warning] = evaluated(bundle, folder / "data", limit=240)
    assert "108 of the 120 different images" in warning
    (bundle / "eval.json").write_bytes(msgspec.json.encode(found))
    ls_edge.publish(bundle, tmp_path / "published")
    card = (tmp_path / "published" / "README.md").read_text()
    assert "Top-1 on 120 different images of `data`" in card
    assert "The model was trained on 108 of these images" in card
    assert str(tmp_path) not in card + (tmp_path / "published" / "eval.json").read_text()
