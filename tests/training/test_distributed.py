"""Training with several processes, parts of a batch, checkpointed blocks and averaged weights."""

import functools
import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from ls_edge.core.errors import UsageError
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.training.config import DataConfig, to_yaml
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.loop import train
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.trainings import Silent, logits

settings = functools.partial(trainings.settings, epochs=1, lr=1e-3)

torch.set_num_threads(1)


RANK = """
import os, sys
from ls_edge.cli.main import main

for argument in sys.argv[2:]:
    method, os.environ["MASTER_PORT"] = argument.split(":")
    try:
        main(["train", "--config", f"{sys.argv[1]}/{method}.yaml", "--out", f"{sys.argv[1]}/{method}-two", "--json"])
    except SystemExit as ended:
        if ended.code:
            raise
"""
METHODS = {"shuffle": {}, "anyorder": {"accumulate": 2}}
"""Methods that two processes train, with settings that differ from those of the single process."""


RUNS = (*METHODS, "spoilt")
"""Trainings of the pair of processes; most images of ``spoilt`` cannot be decoded."""


def spoilt_images(folder):
    """Write two classes of 24 images, every other one and the first ten broken, so that some batches have no image."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(24):
            path = folder / name / f"{index:02d}.png"
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
            if index % 2 or index < 10:
                path.write_bytes(path.read_bytes()[:60])


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory):
    """Return the folder in which a pair of processes trained each method, and their outputs."""
    folder = tmp_path_factory.mktemp("two")
    for method, changes in METHODS.items():
        config = msgspec.structs.replace(settings(epochs=2, method=method), **changes)
        (folder / f"{method}.yaml").write_text(to_yaml(config))
    spoilt_images(folder / "spoilt-data")
    data = DataConfig(str(folder / "spoilt-data"), cache_mb=0, validation=0.3)
    spoilt = msgspec.structs.replace(settings(epochs=2, batch_size=4), data=data)
    (folder / "spoilt.yaml").write_text(to_yaml(spoilt))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    trainings = [f"{method}:{port}" for method, port in zip(RUNS, free_ports(len(RUNS)), strict=True)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), *trainings], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return folder, [output for output, _ in outputs]


@pytest.mark.release
def test_only_the_first_process_reports(trained_by_two):
    _, (first, second) = trained_by_two
    assert first.count('"seconds"') == len(RUNS)
    assert second == ""


@pytest.mark.release
def test_a_process_without_images_in_a_step_does_not_leave_the_other_alone(trained_by_two):
    folder, _ = trained_by_two
    lines = [json.loads(line) for line in (folder / "spoilt-two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]


@pytest.mark.release
def test_training_with_torchrun_works_as_documented(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "-m",
        "ls_edge",
        "train",
        "--data",
        "digits",
    ]
    small = ["--set", "model.args={embed_dim: 16, depth: 2, num_heads: 2}", "--threads", "1", "--device", "cpu"]
    command += ["--data", "digits", "--epochs", "1", "--batch-size", "128", "--out", str(tmp_path / "run"), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("million parameters") == 1
    assert load_run(tmp_path / "run").record.best_epoch == 1


class Ranked(DistributedContext):
    def barrier(self):
        ORDER.append(f"{self.local_rank} waits")


ORDER = []


def test_one_process_runs_first_and_the_others_wait():
    ORDER.clear()
    for rank in (0, 1):
        with Ranked(rank, 2, rank).one_first():
            ORDER.append(f"{rank} downloads")
    assert ORDER == ["0 downloads", "0 waits", "1 waits", "1 downloads"]
    with pytest.raises(RuntimeError), Ranked(0, 2, 0).one_first():  # the others are let go all the same
        raise RuntimeError("no network")
    assert ORDER[-1] == "0 waits"


def test_the_gpu_is_chosen_before_anything_touches_one(monkeypatch, tmp_path):
    calls = []

    class Touched(Exception):
        pass

    def touch():
        calls.append("touch")
        raise Touched

    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(f"set {index}"))
    monkeypatch.setattr(torch.cuda, "current_device", touch)
    with pytest.raises(Touched):
        train(settings(device="cuda"), tmp_path / "run", reporter=Silent())
    assert calls == ["set 1", "touch"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="process 2 has no GPU: this machine has 2"):
        train(settings(device="cuda"), tmp_path / "run", reporter=Silent())


@pytest.mark.release
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_match_one(trained_by_two, tmp_path, method):
    folder, _ = trained_by_two
    train(settings(epochs=2, method=method), tmp_path / "one", reporter=Silent())
    one, two = load_run(tmp_path / "one"), load_run(folder / f"{method}-two")
    assert one.record.val_loss == pytest.approx(two.record.val_loss, rel=1e-5)
    torch.testing.assert_close(logits(folder / f"{method}-two"), logits(tmp_path / "one"), rtol=1e-5, atol=1e-5)
    for name, value in one.view.weights().items():
        if not name.endswith("qkv.bias"):  # the keys' part has no gradient but rounding, which Adam blows up
            torch.testing.assert_close(two.view.weights()[name], value, rtol=1e-5, atol=1e-5)


def test_a_batch_that_does_not_divide_is_refused():
    assert DistributedContext(1, 4).local_batch_size(128) == 32
    with pytest.raises(UsageError, match="batch size 10 does not divide among 4 processes"):
        DistributedContext(0, 4).local_batch_size(10)
