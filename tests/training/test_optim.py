"""Optimizer, learning rates and averaged weights."""

import functools

import msgspec
import pytest
import torch

from ls_edge.training.config import OptimConfig
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.small_models import build, create
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import default_rate, make_averaged_model, make_optimizer, make_schedule
from tests.training import trainings
from tests.training.trainings import SMALL

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


def test_averages_are_exponential_and_warm_up():
    view = build("vit_digits", {**SMALL, "depth": 1})
    ema = make_averaged_model(view, OptimConfig(average="ema", average_decay=0.5))
    values = [1.0, 2.0, 4.0, 8.0]
    mean = values[0]
    for step, value in enumerate(values):
        with torch.no_grad():
            view.model.head.bias.fill_(value)
        ema.update_parameters(view)
        mean += max(1 - 0.5, 9 / (10 + step)) * (value - mean)
    assert ema.module.model.head.bias[0].item() == pytest.approx(mean)
    assert view.model.head.bias[0].item() == 8.0


def test_weights_that_are_fitted_to_a_start_learn_slowly():
    shared, anyorder = make_method("shared", {}), make_method("anyorder", {})
    assert default_rate("vit_small_patch16_224", shared, from_weights=True) == 4e-5
    assert default_rate("vit_small_patch16_224", anyorder, from_weights=True) == 1e-4
    assert default_rate("vit_digits", shared, from_weights=True) == default_rate(
        "vit_digits", anyorder, from_weights=True
    )
