"""Trainings that were killed or met a full disk: resumed as if nothing had happened, or refused in one line."""

import functools
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

import ls_edge
from ls_edge.cli.main import main
from ls_edge.core.errors import RunError, TrainingStopped, UsageError
from ls_edge.training.config import to_yaml
from ls_edge.training.logs import open_log
from ls_edge.training.loop import train
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.trainings import Silent, Stops, metrics, numbered, weights

settings = functools.partial(trainings.settings, args={"drop_rate": 0.1})


RUN = """
import sys
from ls_edge.cli.main import main
main(sys.argv[1:])
"""


def start_process(folder, config, *more):
    command = [sys.executable, "-c", RUN, "train", "--out", str(folder), *more]
    if config is not None:
        command += ["--config", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.release
def test_resuming_after_a_kill_gives_the_same_run(tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text(to_yaml(settings(epochs=5)))
    train(settings(epochs=5), tmp_path / "whole", reporter=Silent())
    broken = tmp_path / "broken"
    process = start_process(broken, config)
    try:
        said = list(itertools.takewhile(lambda line: "epoch   2/5" not in line, process.stderr))
        assert process.poll() is None, said
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (broken / "resume.safetensors").exists(), "the run was over before it could be killed"
    load_run(broken)
    with (broken / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 99, "cut off')
    with pytest.raises(SystemExit) as ended:
        main(["train", "--out", str(broken), "--resume"])
    assert ended.value.code == 0
    assert weights(broken) == weights(tmp_path / "whole")
    assert metrics(broken) == metrics(tmp_path / "whole")
    assert (broken / "config.yaml").read_bytes() == (tmp_path / "whole" / "config.yaml").read_bytes()
    assert not (broken / "resume.safetensors").exists()


def test_a_start_that_was_killed_before_its_configuration_was_written_may_be_repeated(tmp_path, capsys):
    command = [
        "train",
        "--data",
        "digits",
        "--depth",
        "2",
        "--epochs",
        "1",
        "--set",
        "threads=1",
        "--batch-size",
        "256",
    ]
    out = tmp_path / "runs" / "seed-3"
    out.mkdir(parents=True)
    for name in ("model.safetensors", "resume.safetensors", ".resume.safetensors.7.part"):
        (out / name).write_bytes(b"unfinished")
    for flags in (["--out", out, "--seed", "3"], ["--out", out.parent, "--seed", "3", "--seeds", "1", "--resume"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *map(str, flags)])
        assert ended.value.code == 0, capsys.readouterr().err
        assert load_run(out).record.best_epoch == 1
        assert not {".resume.safetensors.7.part", "resume.safetensors"} & set(os.listdir(out))
        (out / "config.yaml").unlink()
        (out / "resume.safetensors").write_bytes(b"unfinished")
    (out / "resume.safetensors").unlink()
    with pytest.raises(SystemExit):  # weights from elsewhere
        main([*command, "--out", str(out)])
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["delete", "exchange", "order"])
def test_a_run_is_not_resumed_on_changed_data(tmp_path, change):
    data = numbered(tmp_path / "data", ("cat", "dog", "eel"))
    order = tmp_path / "order.txt"
    order.write_text("cat\ndog\neel\n")
    config = settings(str(data), model="vit_digits", epochs=3, batch_size=4, class_order=str(order))

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", reporter=Stops())
    if change == "delete":
        (data / "cat" / "cat-1.png").unlink()
    elif change == "order":
        order.write_text("eel\ndog\ncat\n")
    else:
        (data / "cat").rename(data / "x")
        (data / "dog").rename(data / "cat")
        (data / "x").rename(data / "dog")
    with pytest.raises(RunError, match=r"data or its split has changed since .*run was started"):
        train(config, tmp_path / "run", reporter=Silent(), resume=True)


def edit(run, old, new):
    """Edit the settings of a run by hand."""
    path = run / "config.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_start_that_was_trained_again_on_another_split_is_noticed(tmp_path):
    again = settings(init=str(tmp_path / "start"), method="anyorder")
    train(settings(epochs=0), tmp_path / "start", reporter=Silent())
    with pytest.raises(KeyboardInterrupt):
        train(again, tmp_path / "run", reporter=Stops())
    train(settings(epochs=0, changes=["data.split_seed=5"]), tmp_path / "start", reporter=Silent(), overwrite=True)
    with pytest.raises(RunError, match=r"digits or its split has changed since .*run was started"):
        train(again, tmp_path / "run", reporter=Silent(), resume=True)


@pytest.mark.parametrize("start", ["run", "run/model.safetensors"])
def test_a_start_is_not_replaced_by_its_own_training(tmp_path, start):
    train(settings(epochs=0), tmp_path / "run", reporter=Silent())
    with pytest.raises(UsageError, match=r"--out .* would replace what training starts from; name another folder"):
        train(settings(init=str(tmp_path / start)), tmp_path / "run", reporter=Silent(), overwrite=True)


def test_what_a_full_disk_leaves_of_a_start_may_be_repeated(tmp_path):
    """A folder with weights but without settings would be neither a run nor a new one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(TrainingStopped, match=r"cannot write to .*run, .*: File too large; check path and space"):
            train(settings(epochs=1), tmp_path / "run", reporter=Silent())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_an_error_where_curves_are_written(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), open_log(tmp_path, 0) as write:
            write(dict.fromkeys("abcdefgh", 1.0), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.release
def test_tensorboard_has_every_epoch_after_a_kill(tmp_path, monkeypatch):
    """An epoch that was reported but not saved is reported again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from ls_edge.training.loop import _Training

    def killed(self, metrics):
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(_Training, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings(epochs=3), out, reporter=Silent())
    train(settings(epochs=3), out, reporter=Silent(), resume=True)
    events = EventAccumulator(str(out))
    events.Reload()
    scalars = events.Scalars("val_loss")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx([line["val_loss"] for line in metrics(out)])


@pytest.mark.release
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda run: (run / "resume.safetensors").unlink(), "is missing, so the run cannot be resumed"),
        (lambda run: shutil.copy(run / "model.safetensors", run / "resume.safetensors"), "cannot use .*resume"),
        (
            lambda run: edit(run, "depth: 3", "depth: 2"),
            "cannot use .*resume.safetensors .the checkpoint has 'blocks.2",
        ),
        (
            lambda run: edit(run, "average: none", "average: ema"),
            "cannot use .*resume.safetensors .Error.s. in loading",
        ),
    ],
)
def test_an_unfinished_run_without_its_state_is_refused_in_one_line(tmp_path, harm, reason):
    with pytest.raises(KeyboardInterrupt):
        train(settings(), tmp_path / "run", reporter=Stops())
    harm(tmp_path / "run")
    with pytest.raises(RunError, match=reason) as caught:
        ls_edge.train(out=tmp_path / "run", resume=True)
    assert len(str(caught.value)) < 400  # torch lists every name that is missing
