"""Curves of a training in TensorBoard, MLflow, and Weights & Biases, by the libraries themselves."""

import importlib.util
import json
import sys

import pytest

import ls_edge
from ls_edge.core.errors import UsageError

TRAIN = ("train", "--data", "digits", "--epochs", 1, "--depth", 2)
CURVES = {"order/trained", "order/random_mean", "order/random_worst", "kept_1/trained", "kept_1/random",
          "slot_0/random", "slot_1/random"}  # fmt: skip


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: {event.step: event.value for event in found.Scalars(name)} for name in found.Tags()["scalars"]}


def test_tensorboard_gets_curves_by_order_blocks_kept_and_slot(tmp_path):
    plain = ls_edge.train("digits", tmp_path / "plain", epochs=1, depth=2, method="predict")
    logged = ls_edge.train("digits", tmp_path / "logged", epochs=1, depth=2, method="predict", log="tensorboard")
    assert logged.val_loss == plain.val_loss  # the curves do not change the training
    assert CURVES.isdisjoint(events(tmp_path / "plain"))
    found = events(tmp_path / "logged")
    assert set(found) >= CURVES | {"train_loss", "val_loss", "val_top1"}
    assert found["order/trained"].keys() == {1}
    assert found["slot_1/random"][1] == pytest.approx(found["order/random_mean"][1])  # after the last slot
    own = [found[f"slot_{slot}/own_slot"][1] for slot in range(2)]
    assert sum(own) / 2 == pytest.approx(found["order/own_slot"][1])
    assert logged.log == f"tensorboard --logdir {tmp_path / 'logged'}"
    assert str(logged).splitlines()[-1] == f"curves: {logged.log}"


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_gets_the_curves(tmp_path, process):
    place = (tmp_path / "mlruns").as_uri()
    env = {"MLFLOW_TRACKING_URI": place, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = process(*TRAIN, "--out", tmp_path / "run", "--log", "mlflow", "--json", timeout=120, **env)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["log"].startswith("mlflow: experiment ls-edge")
    written = {path.relative_to(path.parents[1]).as_posix() for path in (tmp_path / "mlruns").rglob("*/metrics/*/*")}
    assert {"order/trained", "kept_1/random", "slot_1/random"} <= written


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_gets_the_curves(tmp_path, process):
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = process(*TRAIN, "--out", tmp_path / "run", "--log", "wandb", timeout=120, **env)
    assert done.returncode == 0, done.stderr.decode()
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"order/trained" in written.read_bytes()
    assert b"wandb sync" in done.stdout


def test_a_library_that_does_not_load_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"^--log wandb needs wandb \(extra wandb\); to install: pip install 'wandb>="):
        ls_edge.train("digits", tmp_path / "run", epochs=1, log="wandb")
    (tmp_path / "mlflow.py").write_text("from json import nothing_such\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    why = r"mlflow, which is installed but does not load \(cannot import name 'nothing_such' from 'json'"
    with pytest.raises(UsageError, match=f"^--log mlflow needs {why}"):
        ls_edge.train("digits", tmp_path / "other", epochs=1, log="mlflow")
    with pytest.raises(UsageError, match="log"):
        ls_edge.train("digits", tmp_path / "run", epochs=1, log="paper")
    assert not (tmp_path / "run").exists()
