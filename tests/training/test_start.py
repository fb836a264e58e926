"""A start or a teacher at chance on these images is no start: named, not imitated, and remarked in the run."""

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ls_edge.core.errors import RunError
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor
from ls_edge.training.loop import train
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.colors import COLORS, write_colors
from tests.training.trainings import Silent, Stops

settings = functools.partial(trainings.settings, batch_size=16, lr=3e-3, changes=["data.augment=none"])
REMEDY = "its answers are not used: name the order (--class-order FILE), or train a new classifier first"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that tells the colors apart, its weights as a file, and the same images under other names."""
    folder = tmp_path_factory.mktemp("starts")
    data = write_colors(folder / "data")
    train(settings(str(data), method="sequential", epochs=6), folder / "run", reporter=Silent())
    save_file(load_file(folder / "run" / "model.safetensors"), folder / "file.safetensors")
    write_colors(folder / "renamed", names=("rot", "blau", "grün"), seed=1)  # none in its alphabetical place
    return folder


def plain_top1(run, data):
    """Return the accuracy of a model in trained order, by plain torch."""
    images = open_data(str(data), "eval").images
    prepare = Preprocessor(run.record.image)
    pixels = torch.stack([torch.from_numpy(prepare(image.read(), image.name)) for image in images])
    with torch.no_grad():
        answers = run.view(pixels).argmax(1)
    return float((answers == torch.tensor([image.label for image in images])).double().mean())


def trained(folder, out, data, **flags):
    reporter = Silent()
    more = {"model": "vit_digits", "init": str(folder / "file.safetensors"), "method": None, "epochs": 2, **flags}
    result = train(settings(str(data), **more), out, reporter=reporter)
    return result, load_run(out), [text for text in reporter.warnings if "validation images of" in text]


def test_a_start_of_other_classes_is_named_and_its_answers_are_not_imitated(folder, tmp_path):
    data = "renamed"
    start = plain_top1(load_run(folder / "run"), folder / data)
    assert start < 0.4
    result, run, [warning] = trained(folder, tmp_path / "run", folder / data)
    assert warning.startswith(f"{folder / 'file.safetensors'} has a top-1 of {result.start_top1:.3f} on the validation")
    assert warning.endswith(f"{REMEDY} (--method sequential)")
    assert result.start_top1 == pytest.approx(start, abs=0.1)
    assert run.record.method == "shared"
    assert run.record.start_remark in warning
    assert run.record.problem == ""
    assert plain_top1(run, folder / data) > 0.9


def test_a_start_that_fits_is_imitated_without_a_word(folder, tmp_path):
    result, run, warnings = trained(folder, tmp_path / "run", folder / "data")
    assert result.start_top1 > 0.9
    assert (warnings, run.record.start_remark, run.config.method_args["logits"]) == ([], "", 0.5)
    (tmp_path / "order.txt").write_text("rot\nblau\ngrün\n")
    order = ["data.augment=none", f"data.class_order={tmp_path / 'order.txt'}"]
    result, _, warnings = trained(folder, tmp_path / "named", folder / "renamed", changes=order)
    assert (result.start_top1 > 0.9, warnings) == (True, [])


@pytest.mark.parametrize("role", ["init", "teacher"])
def test_a_run_is_not_resumed_with_other_answers_to_imitate(folder, tmp_path, role):
    shutil.copytree(folder / "run", tmp_path / role)
    more = {"init": {"method": "shared"}, "teacher": {}}[role]
    config = settings(str(folder / "data"), **{role: str(tmp_path / role)}, **more)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", reporter=Stops())
    path = tmp_path / role / "model.safetensors"
    save_file({name: value * 1.01 for name, value in load_file(path).items()}, tmp_path / "other")
    (tmp_path / "other").rename(path)
    with pytest.raises(RunError, match="the weights of the start or the teacher have changed since"):
        train(config, tmp_path / "run", reporter=Silent(), resume=True)


@pytest.mark.parametrize("fits", [True, False])
def test_a_teacher_is_measured_shown_and_judged(folder, tmp_path, fits):
    """A teacher that is a run is matched by the names of its classes."""
    teacher, names = shutil.copytree(folder / "run", tmp_path / "teacher"), list(COLORS)
    if not fits:
        path = teacher / "config.yaml"
        listed = "classes: [{}]".format
        assert listed(", ".join(names)) in path.read_text()
        path.write_text(path.read_text().replace(listed(", ".join(names)), listed("red, blue, green")))
    notes, reporter = [], Silent()
    reporter.note = notes.append
    result = train(settings(str(folder / "data"), teacher=str(teacher), epochs=4), tmp_path / "run", reporter=reporter)
    assert f"the teacher {teacher}: top-1 {result.teacher_top1:.3f} on the validation images" in notes
    warned = [text for text in reporter.warnings if text.startswith("the teacher ")]
    assert (len(warned), result.teacher_top1 > 0.9) == ((0, True) if fits else (1, False))
    run = load_run(tmp_path / "run")
    assert bool(run.record.start_remark) != fits
    assert plain_top1(run, folder / "data") > 0.9
