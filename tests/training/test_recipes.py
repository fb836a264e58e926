"""The paper's recipes parse, match docs/research.md, and build."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.config import RECIPES, find_recipe, read_config
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.families import evenly_spaced
from ls_edge.training.models.small_models import build
from ls_edge.training.optim import make_optimizer, make_schedule

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
OWN = {"vit_b_imagenet_anyorder"}
PAPER = Path(__file__).parents[2] / "docs" / "research.md"


def table(heading):
    """Return the rows below a heading of docs/research.md whose first cell is code, without backticks."""
    section = PAPER.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first = re.search(r"(?:^\|.*\n)+", section, re.M)
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in first[0].splitlines()]
    return [[cell.strip("`") for cell in row] for row in rows if row[0].startswith("`")]


def settings_of(name):
    return read_config(find_recipe(Path(name)), {"data": "digits"})[0]


def test_the_document_lists_every_recipe():
    text = PAPER.read_text(encoding="utf-8").split("\n## Recipes\n")[1].split("\n## ")[0]
    stems, suffixes = [row[0] for row in table("Recipes")], re.findall(r"`(_\w+)`", text.split("\nEach exists")[1])
    assert {name for name in NAMES if name in stems} == set(stems)
    assert {name.removeprefix(stem) for stem in stems for name in NAMES if name.startswith(stem)} == {"", *suffixes}


@pytest.mark.parametrize("row", table("Recipes"), ids=lambda row: row[0])
def test_recipes_match_the_document(row):
    stem, batch, epochs, baseline = row
    for name in [name for name in NAMES if name.startswith(stem)]:
        config = settings_of(name)
        assert config.batch_size == int(batch)
        assert config.epochs == int(baseline if name.endswith("_sequential") else epochs)
        assert config.model.pretrained


def test_the_settings_of_all_recipes_match_the_document():
    rows = {row[0]: yaml.safe_load(row[3]) for row in table("Settings")}
    assert {"optim.schedule", "optim.clip", "data.augment", "data.crop_pct"} < set(rows)
    for name in set(NAMES) - OWN:
        plain = msgspec.to_builtins(settings_of(name))
        for setting, wanted in rows.items():
            value = plain
            for step in setting.split("."):
                value = value[step]
            assert (list(value) if isinstance(value, tuple) else value) == wanted, (name, setting)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("vit_b_cifar100")])
def test_a_recipe_builds_and_its_rate_falls_in_a_straight_line(name):
    config = settings_of(name)
    method = make_method(config.method, config.method_args)
    view = build(config.model.name, {**config.model.args, "embed_dim": 24, "num_heads": 2, "img_size": 32})
    assert view.num_blocks == 12
    if config.model.depth:
        view.keep_blocks(evenly_spaced(view.num_blocks, config.model.depth))
        assert view.num_blocks == config.model.depth
    method.attach(view)
    optimizer = make_optimizer(view, config.optim)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    schedule = make_schedule(optimizer, config.optim, 10)
    for step in range(10):
        schedule.step_update(step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(1e-4 * (1 - step / 10))
    assert len(method.draw(Bands(view.num_blocks), 0, 0).groups[0].order) <= view.num_blocks


def test_a_file_wins_over_a_recipe_and_unknown_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit_b_imagenet").write_text("epochs: 1\n")
    assert find_recipe(Path("vit_b_imagenet")) == Path("vit_b_imagenet")
    assert find_recipe(Path("vit_b_cifar100.yaml")).parent == RECIPES
    with pytest.raises(UsageError, match="no recipe 'vit_x'; the recipes are deit_b_cifar100"):
        find_recipe(Path("vit_x"))
