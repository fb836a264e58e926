"""The paper's set-ups parse, say what the paper says, and build."""

from pathlib import Path

import pytest

from ls_edge.bands import Bands
from ls_edge.errors import UsageError
from ls_edge.training.config import RECIPES, find_recipe, read_config
from ls_edge.training.methods.base import make_method
from ls_edge.training.models.small_models import build
from ls_edge.training.optim import make_optimiser, make_schedule

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def test_all_set_ups_are_there():
    assert {"vit_b_imagenet", "deit_b_imagenet", "vit_b_cifar100", "deit_b_cifar100"} < set(NAMES)
    assert {f"vit_b_imagenet_depth{depth}" for depth in (3, 6, 9)} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_parses_and_builds(name):
    config, _ = read_config(find_recipe(Path(name)), {"data": "digits"})
    assert (config.epochs, config.batch_size) == ((100, 128) if "cifar100" in name else (20, 640))
    assert config.optim.weight_decay == 0
    assert config.model.pretrained
    method = make_method(config.method, config.method_args)
    view = build(config.model.name, {**config.model.args, "embed_dim": 24, "num_heads": 2, "img_size": 32})
    assert view.num_blocks == 12
    if config.model.depth:
        view.keep(config.model.depth)
        assert view.num_blocks == config.model.depth
    method.attach(view)
    optimiser = make_optimiser(view, config.optim)
    assert {group["weight_decay"] for group in optimiser.param_groups} == {0.0}
    schedule = make_schedule(optimiser, config.optim, 10)
    for step in range(10):
        schedule.step_update(step)
        assert [group["lr"] for group in optimiser.param_groups] == [pytest.approx(1e-4)]
    assert len(method.draw(Bands(view.num_blocks), 0, 0).order) <= view.num_blocks


def test_a_file_wins_over_a_recipe_and_unknown_names_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit_b_imagenet").write_text("epochs: 1\n")
    assert find_recipe(Path("vit_b_imagenet")) == Path("vit_b_imagenet")
    assert find_recipe(Path("vit_b_cifar100.yaml")).parent == RECIPES
    with pytest.raises(UsageError, match="no recipe 'vit_x'; the recipes are deit_b_cifar100"):
        find_recipe(Path("vit_x"))
