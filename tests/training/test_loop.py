"""The training loop: reproducible, and refusing what cannot be trained."""

import functools
import re

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import ls_edge
from ls_edge.core.errors import DataError, LsEdgeError, RunError, TrainingStopped, UsageError
from ls_edge.export.writer import export_run
from ls_edge.training.loop import train
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.colors import write_colors
from tests.training.trainings import Silent, metrics, numbered, weights

settings = functools.partial(trainings.settings, args={"drop_rate": 0.1})


def test_weights_may_be_stored_in_half_precision(tmp_path):
    for kind in ("fp32", "fp16"):
        config = msgspec.structs.replace(settings(epochs=1), stored=kind)
        train(config, tmp_path / kind, reporter=Silent())
    assert len(weights(tmp_path / "fp16")) < 0.8 * len(weights(tmp_path / "fp32"))
    full, half = (load_run(tmp_path / kind).view for kind in ("fp32", "fp16"))
    images = torch.rand(4, 3, *full.image_size)
    with torch.no_grad():
        assert all(parameter.dtype == torch.float32 for parameter in half.parameters())
        assert 0 < (full(images) - half(images)).abs().max() < 5e-3 * full(images).abs().max()
    train(settings(epochs=0, init=str(tmp_path / "fp16")), tmp_path / "again", reporter=Silent())


def test_a_run_is_bit_identical_for_a_seed_and_restores_the_random_state(tmp_path):
    state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first = train(settings(), tmp_path / "a", reporter=Silent())
    assert torch.equal(state[0], torch.random.get_rng_state())
    assert np.array_equal(state[1], np.random.get_state()[1])
    np.random.seed(5)
    torch.manual_seed(5)
    train(settings(), tmp_path / "b", reporter=Silent())
    train(settings(seed=1), tmp_path / "c", reporter=Silent())
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")
    names = sorted(path.name.split(".1")[0] for path in (tmp_path / "a").iterdir())
    assert names == ["config.yaml", "events.out.tfevents", "metrics.jsonl", "model.safetensors"]
    assert (first.images + first.validation_images, first.blocks, first.skipped) == (1438, 3, 0)
    run = load_run(tmp_path / "a")
    assert run.record.best_epoch == first.best_epoch
    assert run.record.trained_on


def test_the_epoch_with_the_lowest_validation_loss_is_kept(tmp_path):
    reporter = Silent()
    # A rate this high makes the loss go up and down.
    train(settings(lr=0.5, epochs=6, method="sequential"), tmp_path / "run", reporter=reporter)
    losses = [epoch.val_loss for epoch in reporter.epochs]
    best = losses.index(min(losses)) + 1
    assert [epoch.best for epoch in reporter.epochs] == [
        loss < min(losses[:index], default=np.inf) for index, loss in enumerate(losses)
    ]
    run = load_run(tmp_path / "run")
    assert (run.record.best_epoch, run.record.val_loss) == (best, min(losses))
    assert not all(epoch.best for epoch in reporter.epochs), "the loss never rose: this test shows nothing"
    wanted = msgspec.to_builtins(settings(lr=0.5, epochs=6, method="sequential"))["optim"]
    assert msgspec.to_builtins(run.config)["optim"] == {**wanted, "average": "none"}


def test_no_epochs_write_the_initial_model(tmp_path):
    summary = train(settings(epochs=0), tmp_path / "run", reporter=Silent())
    assert summary.best_epoch is None
    run = load_run(tmp_path / "run")
    assert run.record.trained_on == ""
    train(settings(epochs=0, init=str(tmp_path / "run"), seed=3), tmp_path / "again", reporter=Silent())
    assert weights(tmp_path / "run") == weights(tmp_path / "again")


def test_the_orientation_of_photos_is_recorded_and_inherited(tmp_path):
    def image(name, **flags):
        train(settings(epochs=0, **flags), tmp_path / name, reporter=Silent())
        run = load_run(tmp_path / name)
        assert run.config.data.exif_orientation is (run.record.image.exif_orientation is True)
        return run.config.data.exif_orientation

    assert image("plain") is False
    assert image("upright", changes=["data.exif_orientation=true"]) is True
    assert image("further", init=str(tmp_path / "upright")) is True
    assert image("off", init=str(tmp_path / "upright"), changes=["data.exif_orientation=false"]) is False


def test_a_loss_that_is_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path, faulty):
    faulty.fault = staticmethod(lambda step, logits: logits * float("nan") if step == 14 else logits)
    config = settings(model="vit_faulty", epochs=3)
    with pytest.raises(TrainingStopped) as caught:
        train(config, tmp_path / "run", reporter=Silent())
    text = str(caught.value)
    assert "the loss is nan at step 13, order [" in text
    assert "learning rate" in text
    assert load_run(tmp_path / "run").record.best_epoch == 1


def test_data_with_too_few_images_is_refused(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (16, 16), (index, 0, 0)).save(tmp_path / "few" / name / f"{index}.png")
    with pytest.raises(DataError, match="leaves 6 images to train on"):
        train(settings(str(tmp_path / "few")), tmp_path / "run", reporter=Silent())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((TrainingStopped, RunError), match="cannot write"):
        train(settings(epochs=0), tmp_path / "file" / "run", reporter=Silent())


def test_a_second_training_into_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"

    refusals = []

    class Intruder(Silent):
        def finished(self, metrics, epochs):
            for flags in ({}, {"overwrite": True}, {"resume": True}):
                with pytest.raises(LsEdgeError) as caught:
                    train(settings(epochs=1), out, reporter=Silent(), **flags)
                refusals.append(str(caught.value))

    train(settings(epochs=1), out, reporter=Intruder())
    started, overwriting, resuming = refusals
    assert started.endswith(
        "already holds a run; continue it with --resume, replace it with --overwrite, or name another"
    )
    assert overwriting == resuming
    assert overwriting == f"another process uses {out}; wait until it ends, or choose another folder"
    assert load_run(out).record.best_epoch == 1


def test_data_that_does_not_fit_the_settings_leaves_no_run_and_replaces_none(tmp_path):
    out = tmp_path / "run"
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(DataError, match="lower --batch-size"):
            train(settings(epochs=1, batch_size=9999), out, reporter=Silent(), **flags)
        assert not out.exists()
    train(settings(epochs=1), out, reporter=Silent())
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(DataError, match="lower --batch-size"):
        train(settings(epochs=1, batch_size=9999), out, reporter=Silent(), overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_run_inside_its_data_is_refused(tmp_path, monkeypatch):
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (16, 16), (index, 0, 0)).save(tmp_path / "data" / name / f"{index}.png")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    before = sorted((tmp_path / "data").rglob("*"))
    for out in (tmp_path / "data", tmp_path / "data" / "run", tmp_path / "link" / "runs" / "a"):
        with pytest.raises(UsageError, match=r"is inside the data .*; use a folder outside it"):
            train(settings(str(tmp_path / "data"), epochs=0), out, reporter=Silent())
    assert sorted((tmp_path / "data").rglob("*")) == before
    train(settings(str(tmp_path / "data"), epochs=0), tmp_path / "data-run", reporter=Silent())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # which the embedded images are not
    train(settings("digits", epochs=0), "digits/run", reporter=Silent())


def test_a_learning_rate_far_too_high_leaves_a_run_with_the_reason(tmp_path):
    reporter = Silent()
    with pytest.raises(TrainingStopped, match=r"lower --lr; .*run keeps the initial model"):
        train(settings(epochs=2, lr=1e6), tmp_path / "run", reporter=reporter)
    run = load_run(tmp_path / "run")
    assert run.record.problem == "training did not finish one epoch, so the weights are the initial ones"
    with pytest.raises(RunError, match=r"the initial ones; continue with .*--resume.* lower --lr") as caught:
        export_run(run, tmp_path / "bundle")
    assert len(str(caught.value)) < 400  # torch lists every name that is missing
    assert not (tmp_path / "bundle").exists()
    with pytest.warns(UserWarning, match="run: training did not finish one epoch, so the weights are the initial ones"):
        ls_edge.evaluate(tmp_path / "run", "digits", orders=1, limit=10)


def test_a_run_at_chance_level_is_marked(tmp_path):
    reporter = Silent()
    train(settings(epochs=1, lr=0.5, seed=2), tmp_path / "run", reporter=reporter)
    run = load_run(tmp_path / "run")
    assert run.record.best_epoch == 1
    assert "no better than guessing (validation cross-entropy" in run.record.remark
    assert "guessing has 2.3; top-1" in run.record.remark
    assert run.record.remark.endswith("with --lr 0.5 and 1 epoch")
    assert any(run.record.remark in text for text in reporter.warnings)
    good = Silent()
    train(settings(epochs=3, lr=3e-3), tmp_path / "good", reporter=good)
    assert load_run(tmp_path / "good").record.problem == ""
    assert good.warnings == []


def test_a_freedom_that_costs_much_accuracy_is_named_with_remedies(tmp_path):
    reporter = Silent()
    train(settings(method="sequential", epochs=6, optim={"lr": 4e-3}), tmp_path / "start", reporter=reporter)
    assert not reporter.warnings
    short = settings(init=str(tmp_path / "start"), epochs=1, optim={"lr": 1e-6})
    train(short, tmp_path / "run", reporter=reporter, model_named=False)
    [warning] = reporter.warnings
    start = reporter.epochs[-2].val_top1
    (reference,) = re.findall(r"against ([\d.]+) in trained order", warning)
    assert float(reference) == pytest.approx(start, abs=0.02)
    assert f"a top-1 of {reporter.epochs[-1].val_top1:.3f} in the orders of 0-2" in warning
    assert "; train longer, or let the blocks share their weights (--method shared), which" in warning


def test_the_default_method_follows_what_the_start_has_learned(tmp_path):
    def method(name, **flags):
        reporter = Silent()
        train(settings(method=None, epochs=1, **flags), tmp_path / name, reporter=reporter, model_named=False)
        return load_run(tmp_path / name), reporter.warnings

    train(settings(method="sequential", epochs=1), tmp_path / "start", reporter=Silent())
    start = {"init": str(tmp_path / "start"), "optim": {"lr": 1e-6}}
    shared, _ = method("shared", **start)
    assert (shared.record.method, shared.config.method, shared.view.shares_weights) == ("shared", "shared", True)
    again, _ = method("again", init=str(tmp_path / "shared"), optim={"lr": 1e-6})
    assert (again.record.method, again.view.shares_weights) == ("shared", True)
    assert method("banded", bands="0/1-2", **start)[0].record.method == "anyorder"
    assert method("scratch")[0].record.method == "anyorder"
    view = load_run(tmp_path / "start").view
    fresh = {name: value[:3] if name in view.classifier else value for name, value in view.weights().items()}
    save_file(fresh, tmp_path / "elsewhere.safetensors")
    new_head, warnings = method("new-head", model="vit_digits", init=str(tmp_path / "elsewhere.safetensors"))
    assert new_head.record.method == "anyorder"
    assert any("train with --method sequential first" in text for text in warnings)


def test_a_start_that_was_written_without_training_is_what_its_weights_are(tmp_path):
    """Trained in one order, and without its classifier."""
    made = {"model": "vit_digits", "args": {"depth": 4}}
    train(settings(method="sequential", epochs=1, **made), tmp_path / "trained", reporter=Silent())
    view = load_run(tmp_path / "trained").view
    kept = {name: value for name, value in view.weights().items() if name not in view.classifier}
    save_file(kept, tmp_path / "elsewhere.safetensors")
    first, then = Silent(), Silent()
    start = settings(method=None, epochs=0, init=str(tmp_path / "elsewhere.safetensors"), **made)
    train(start, tmp_path / "start", reporter=first)
    record, config = load_run(tmp_path / "start").record, load_run(tmp_path / "start").config
    assert (record.method, config.bands) == ("sequential", None)
    assert any("the classifier is new and was not trained; train it" in text for text in first.warnings)
    again = settings(method=None, epochs=1, init=str(tmp_path / "start"), args={"depth": 4}, optim={"lr": 1e-6})
    train(again, tmp_path / "run", reporter=then, model_named=False)
    assert load_run(tmp_path / "run").record.method == "anyorder"
    assert any("train with --method sequential first" in text for text in then.warnings)
    with pytest.raises(UsageError, match="method shared needs a trained start"):
        train(
            msgspec.structs.replace(again, method="shared"), tmp_path / "shared", reporter=Silent(), model_named=False
        )


def test_weights_without_names_of_classes_ask_for_the_order(tmp_path):
    """timm sorts class folders by number; a file with weights does not say whether timm wrote it."""
    data = numbered(tmp_path / "data")
    ours = train(settings(str(data), model="vit_digits", epochs=0), tmp_path / "run", reporter=Silent())
    assert load_run(tmp_path / "run").record.classes == ("1", "10", "2")
    foreign = str(tmp_path / "run" / "model.safetensors")
    for given in ({"init": foreign}, {"teacher": "vit_digits", "changes": [f"teacher.weights={foreign}"]}):
        with pytest.raises(
            UsageError, match=r"class 1 of .* is '2' in timm's order \(--class-order natural\) and '10'"
        ):
            train(settings(str(data), model="vit_digits", epochs=0, **given), tmp_path / "asks", reporter=Silent())
        for order, names in (("plain", ("1", "10", "2")), ("natural", ("1", "2", "10"))):
            out = tmp_path / f"{order} {len(given)}"
            changes = [f"data.class_order={order}", *given.get("changes", [])]
            chosen = settings(str(data), model="vit_digits", epochs=0, **{**given, "changes": changes})
            train(chosen, out, reporter=Silent())
            assert load_run(out).record.classes == names
    named = settings(str(data), model="vit_digits", epochs=0, init=str(tmp_path / "natural 1"))
    train(named, tmp_path / "named", reporter=Silent())
    assert load_run(tmp_path / "named").record.classes == ("1", "2", "10")  # of the run, whose classifier is kept
    assert load_run(tmp_path / "named").weights_sha256 == load_run(tmp_path / "natural 1").weights_sha256
    assert ours.account["classes"] == ["1", "10", "2"]
    assert ours.account["images"] == 12


def test_a_list_of_classes_numbers_them_and_keeps_the_classifier_of_a_file(tmp_path):
    """The file has weights of four classes in an order of its own, of which the data has three."""
    data, names = numbered(tmp_path / "data"), ("10", "elk", "1", "2")
    train(settings(str(numbered(tmp_path / "four", names)), epochs=0), tmp_path / "four-run", reporter=Silent())
    foreign, listed = str(tmp_path / "four-run" / "model.safetensors"), tmp_path / "classes.txt"
    listed.write_text("\n".join(names))
    config = settings(str(data), model="vit_digits", epochs=0, init=foreign, changes=[f"data.class_order={listed}"])
    train(config, tmp_path / "run", reporter=Silent())
    run = load_run(tmp_path / "run")
    assert run.record.classes == names
    assert torch.equal(run.view.model.head.weight, load_run(tmp_path / "four-run").view.model.head.weight)
    listed.write_text("10\n1")
    with pytest.raises(UsageError, match=r"data.class_order .*classes.txt does not list '2', a class of"):
        train(config, tmp_path / "other", reporter=Silent())


def test_a_checkpoint_with_less_accuracy_than_the_last_one_is_diagnosed_as_such(tmp_path, monkeypatch):
    """Not as the price of orders, which ``sequential`` does not have."""
    from ls_edge.evaluation.classes import ClassCounts
    from ls_edge.training.task import TrainingTask
    from ls_edge.training.validation import Validation

    results = iter([(0.5, 62), (0.6, 69)])

    def validate(self, batches):
        loss, right = next(results)
        rest = (0,) * 8
        counts = ClassCounts((60, 40, *rest), (right - 10.0, 10.0, *rest), (50.0, 50.0, *rest))
        return Validation(loss, counts, right / 100)

    monkeypatch.setattr(TrainingTask, "validate", validate)
    reporter = Silent()
    train(settings(method="sequential"), tmp_path / "run", reporter=reporter)
    [warning] = reporter.warnings
    assert warning.startswith("the checkpoint chosen by cross-entropy (epoch 1) has 7 points less top-1 than the last")
    assert "0.620 instead of 0.690" in warning


def test_a_class_without_a_correct_answer_is_named_and_one_answer_is_a_guess(tmp_path):
    """With 63 good and 12 defect, always answering good has 0.84, which is no better than guessing."""
    data = write_colors(tmp_path / "data", (63, 12), names=("good", "defect"), noise=250)
    reporter = Silent()
    wide = settings(str(data), epochs=3, batch_size=16, method="sequential", lr=3e-3, changes=["data.validation=0.4"])
    result = train(wide, tmp_path / "run", reporter=reporter)
    assert (result.val_top1, result.balanced_top1) == (pytest.approx(25 / 30), 0.5)
    assert result.top1_by_class == {"defect": 0.0, "good": 1.0}
    assert any("no correct answer for 1 class ('defect') in 30 images" in text for text in reporter.warnings)
    assert "no better than guessing" in load_run(tmp_path / "run").record.remark
    found = ls_edge.evaluate(tmp_path / "run", str(data), orders=2, keep=(), bands="0/1/2", on_warning=print)
    assert (found.chance, found.sequential.top1, found.balanced_top1) == (0.84, 0.84, 0.5)
    assert found.top1_by_class == found.arbitrary_by_class == {"defect": 0.0, "good": 1.0}
    assert "no correct answer for 1 class ('defect') in 75 images, in trained order" in str(found)
    assert "no better than guessing: always answering the largest class has 84.0 %" in str(found)


def test_images_that_are_left_out_are_not_counted_with_the_others(tmp_path):
    data = write_colors(tmp_path / "data", 30)
    for path in list(data.rglob("*5.png")):
        path.write_bytes(b"no image")
    result = train(settings(str(data), epochs=2, batch_size=16), tmp_path / "run", reporter=Silent())
    assert (result.images + result.validation_images, result.skipped, result.account["unreadable"]) == (81, 9, 9)
