"""Optimizer, learning rates and averaged weights."""

import functools

import msgspec
import pytest
import torch

from ls_edge.training.config import OptimConfig
from ls_edge.training.loop import train
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.small_models import build, create
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import averages_step, default_rate, make_averaged_model, make_optimizer, make_schedule
from tests.training import trainings
from tests.training.trainings import SMALL, Silent, logits

settings = functools.partial(trainings.settings, epochs=1, lr=1e-3)


def learning_rates(config, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = make_schedule(optimizer, config, steps)
    rates = []
    for step in range(steps):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_learning_rate_rises_and_falls():
    config = settings(lr=1.0).optim
    rates = learning_rates(config, 100)
    top = rates.index(max(rates))
    assert 9 <= top <= 11
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] < 0.15
    assert rates[-1] < 0.012
    assert learning_rates(config, 1) == [1.0]


def test_learning_rate_falls_in_a_straight_line():
    config = msgspec.structs.replace(settings(lr=1.0).optim, schedule="linear", warmup=0.0, final=0.0)
    assert learning_rates(config, 8) == pytest.approx([1 - step / 8 for step in range(8)])
    warmed = learning_rates(msgspec.structs.replace(config, warmup=0.2), 10)
    assert warmed[:2] == sorted(warmed[:2])
    assert warmed[2:] == pytest.approx([1 - step / 8 for step in range(8)])


def test_decay_spares_vectors_and_positions():

    view = BlockView(create("vit_cifar", embed_dim=24, depth=2, num_heads=2, class_token=True))
    spared, decayed = make_optimizer(view, settings(lr=1e-3).optim).param_groups
    names = {id(parameter): name for name, parameter in view.model.named_parameters()}
    assert {"pos_embed", "cls_token"} <= {names[id(p)] for p in spared["params"]}
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert spared["weight_decay"] == 0
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_averages_are_exponential_or_plain_means():
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
        def finished(self, metrics, epochs):
            if metrics.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", reporter=Stops())
    train(config, tmp_path / "broken", reporter=Silent(), resume=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


def test_weights_that_are_fitted_to_a_start_learn_slowly():
    shared, anyorder = make_method("shared", {}), make_method("anyorder", {})
    assert default_rate("vit_small_patch16_224", shared, from_weights=True) == 4e-5
    assert default_rate("vit_small_patch16_224", anyorder, from_weights=True) == 1e-4
    assert default_rate("vit_digits", shared, from_weights=True) == default_rate(
        "vit_digits", anyorder, from_weights=True
    )
