"""Training in parts and with several processes gives the result of one, or is refused."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from ls_edge.core.errors import UsageError
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.loop import train
from ls_edge.training.runs.checkpoint import load_run
from tests.training import trainings
from tests.training.parts import TABLE, trained
from tests.training.trainings import Silent

settings = functools.partial(trainings.settings, epochs=1, lr=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with images of two classes, and the same with every third one broken."""
    folder, rng = tmp_path_factory.mktemp("parts"), np.random.default_rng(0)
    for kind in ("cached", "broken"):
        for name in ("cat", "dog"):
            (folder / kind / name).mkdir(parents=True)
            for index in range(16):
                path = folder / kind / name / f"{index:02}.png"
                Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
                if kind == "broken" and index % 3 == 0:
                    path.write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def in_one_part(folder):
    """The function that returns the result of a method on a model and data, in one part and process."""
    return functools.cache(lambda *row: trained(folder, *row, 1))


def assert_same(found, wanted):
    assert int(found["seen"]) == int(wanted["seen"]) > 10
    for name in ("logits", "loss"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def is_refused(row, shape, accumulate, processes):
    return max(accumulate, processes) > 1 and (shape == "norm" or row == "position")


@pytest.mark.parametrize(("row", "shape", "data", "accumulate"), [row for row in TABLE if row[-1] > 1])
def test_parts_train_what_one_part_trains_or_are_refused(folder, in_one_part, row, shape, data, accumulate):
    found = trained(folder, row, shape, data, accumulate)
    if is_refused(row, shape, accumulate, 1):
        why = "BatchNorm2d normalizes by the images of a batch" if shape == "norm" else "Dropout draws random numbers"
        assert why in found["refused"]
        assert f"so {accumulate} parts in 1 process would not give the result of one" in found["refused"]
    else:
        assert_same(found, in_one_part(row, shape, data))


@pytest.mark.release
@pytest.mark.processes
def test_two_processes_train_what_one_trains_or_are_refused(folder, in_one_part):
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.parts", str(rank), str(folder)], text=True, stderr=subprocess.PIPE,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=170)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], errors
    tensors = safetensors.torch.load_file(folder / "results.safetensors")
    refused = json.loads((folder / "refused.json").read_text())
    for number, (row, shape, data, accumulate) in enumerate(TABLE):
        if is_refused(row, shape, accumulate, 2):
            assert "in 2 processes would not give the result of one" in refused[str(number)]
        else:
            found = {name: tensors[f"{number} {name}"] for name in ("logits", "loss", "seen")}
            assert_same(found, in_one_part(row, shape, data))


@pytest.mark.release
def test_training_with_torchrun_works_as_documented(tmp_path):
    """The pair divides training and validation, and only the first process reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "ls_edge", "train",
               "--data", "digits", "--set", "model.args={embed_dim: 16, depth: 2, num_heads: 2}", "--threads", "1",
               "--device", "cpu", "--epochs", "1", "--batch-size", "128", "--precision", "fp32",
               "--out", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("million parameters") == 1
    args = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
    train(settings(method="anyorder", args=args, lr=None), tmp_path / "one", reporter=Silent())
    one, two = (load_run(tmp_path / name).record for name in ("one", "run"))
    assert (two.best_epoch, two.trained_on) == (1, one.trained_on)
    assert two.val_loss == pytest.approx(one.val_loss, rel=1e-5)


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


def test_a_batch_that_does_not_divide_is_refused():
    assert DistributedContext(1, 4).local_batch_size(128) == 32
    with pytest.raises(UsageError, match="batch size 10 does not divide among 4 processes"):
        DistributedContext(0, 4).local_batch_size(10)
