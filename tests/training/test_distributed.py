"""Training with several processes, parts of a batch, checkpointed blocks and averaged weights."""

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
from ls_edge.training.config import DataConfig, OptimConfig, TeacherConfig, read_config, to_yaml
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.loop import train
from ls_edge.training.methods.registry import expected_cost, make_method
from ls_edge.training.models.small_models import build
from ls_edge.training.optim import averages_step, make_averaged_model
from ls_edge.training.runs.checkpoint import load_run

torch.set_num_threads(1)
SMALL = {"embed_dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 2.0}


class Silent:
    def __getattr__(self, name):
        return lambda *args: None


def settings(**changes):
    flags = {
        "data": "digits",
        "batch_size": 128,
        "epochs": 1,
        "threads": 1,
        "device": "cpu",
        "lr": 1e-3,
        "method": "shuffle",
    }
    config, _ = read_config(None, {**flags, **{k: v for k, v in changes.items() if k not in ("optim", "args")}})
    model = msgspec.structs.replace(config.model, args={**SMALL, **changes.get("args", {})})
    optim = msgspec.structs.replace(config.optim, **changes.get("optim", {}))
    return msgspec.structs.replace(config, model=model, optim=optim, precision="fp32")


def logits(folder):
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return load_run(folder).view(images, [2, 0, 1])


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


def test_one_of_two_processes_reports(trained_by_two):
    _, (first, second) = trained_by_two
    assert first.count('"seconds"') == len(RUNS)
    assert second == ""


def test_a_process_without_images_in_a_step_does_not_leave_the_other_alone(trained_by_two):
    folder, _ = trained_by_two
    lines = [json.loads(line) for line in (folder / "spoilt-two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_torchrun_as_it_is_documented(tmp_path):
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


def test_one_process_goes_first_and_the_others_wait():
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


def test_a_batch_has_to_divide():
    assert DistributedContext(1, 4).local_batch_size(128) == 32
    with pytest.raises(UsageError, match="batch size 10 does not divide among 4 processes"):
        DistributedContext(0, 4).local_batch_size(10)


@pytest.mark.parametrize("method", ["shuffle", "anyorder"])
def test_less_memory_is_the_same_training(tmp_path, method):
    plain = settings(batch_size=120, method=method)
    train(plain, tmp_path / "plain", reporter=Silent())
    for name, changes in (("parts", {"accumulate": 3}), ("again", {"checkpointing": True})):
        train(msgspec.structs.replace(plain, **changes), tmp_path / name, reporter=Silent())
        torch.testing.assert_close(logits(tmp_path / name), logits(tmp_path / "plain"), rtol=1e-4, atol=1e-4)


def test_checkpointing_gives_the_same_gradients_and_runs_blocks_twice():
    torch.manual_seed(0)
    view = build("vit_digits", {**SMALL, "drop_rate": 0.1, "proj_drop_rate": 0.1}).train()
    make_method("position", {}).attach(view)
    images, runs = torch.randn(2, 3, 16, 16), []
    view.blocks[1].register_forward_pre_hook(lambda *_: runs.append(1))
    found = []
    for view.checkpointing in (False, True):
        view.zero_grad()
        torch.manual_seed(1)
        view(images, [1, 0, 2]).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in view.parameters()])
    assert len(runs) == 3
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)


def test_an_exponential_mean_and_a_plain_one():
    view = build("vit_digits", {**SMALL, "depth": 1})
    ema, swa = (
        make_averaged_model(view, OptimConfig(average=kind, average_decay=0.5, average_from=0.5))
        for kind in ("ema", "swa")
    )
    values = [1.0, 2.0, 4.0, 8.0]
    mean = values[0]
    for step, value in enumerate(values):
        with torch.no_grad():
            view.model.head.bias.fill_(value)
        ema.update_parameters(view)
        if averages_step(OptimConfig(average="swa", average_from=0.5), step, 4):
            swa.update_parameters(view)
        mean += max(1 - 0.5, 9 / (10 + step)) * (value - mean)
    assert ema.module.model.head.bias[0].item() == pytest.approx(mean)
    assert swa.module.model.head.bias[0].item() == pytest.approx(6.0)
    assert view.model.head.bias[0].item() == 8.0


def test_averaged_weights_are_kept_and_resumed(tmp_path, monkeypatch):
    config = settings(epochs=3, optim={"average": "ema", "average_decay": 0.9})
    train(config, tmp_path / "whole", reporter=Silent())
    train(settings(epochs=3), tmp_path / "plain", reporter=Silent())
    assert not torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "plain"))

    class Stops(Silent):
        def finished(self, metrics):
            if metrics.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", reporter=Stops())
    train(config, tmp_path / "broken", reporter=Silent(), resume=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A run in trained order."""
    folder = tmp_path_factory.mktemp("start") / "run"
    train(settings(method="sequential"), folder, reporter=Silent())
    return folder


@pytest.mark.parametrize("method", ["position", "predict", "layerdrop", "layerdrop+shuffle", "anyorder"])
def test_every_method_trains_and_is_read_again(start, tmp_path, method):
    teacher = TeacherConfig(model=str(start), kind="soft") if method == "anyorder" else TeacherConfig()
    model = msgspec.structs.replace(settings().model, args={}, init=str(start))
    config = msgspec.structs.replace(settings(method=method), teacher=teacher, model=model)
    summary = train(config, tmp_path / "run", reporter=Silent(), model_named=False)
    run = load_run(tmp_path / "run")
    assert run.record.method == method
    assert run.config.method_args.keys() == set(make_method(method, {}).settings.__struct_fields__)
    assert run.view.needs_slot == (method == "position")
    per_image = expected_cost(make_method(method, {}), run.view.work) + (1 if method == "anyorder" else 0)
    assert summary.cost / (summary.images // 128 * 128) == pytest.approx(per_image, rel=0.25)
    again = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, init=str(tmp_path / "run")),
                                    epochs=0)  # fmt: skip
    train(again, tmp_path / "again", reporter=Silent(), model_named=False)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert files[0] == files[1]
