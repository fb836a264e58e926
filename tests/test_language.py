"""One word for one thing: names that terms of the field or of ``docs/glossary.md`` have replaced do not come back."""

import ast
from pathlib import Path

import click
import pytest

from ls_edge.cli.main import cli

ROOT = Path(__file__).parents[1]
FOLDERS = ("ls_edge", "training", "export", "runtime", "benchmarks")

MODULES = {
    "alone", "answers", "costs", "curves", "deal", "dealing", "evalplan", "gate", "halves", "imagetree", "live",
    "machine", "measure", "others", "picture", "places", "sketch", "stays", "ways", "words", "yamlfile",
}  # fmt: skip
CLASSES = {
    "Average", "Bar", "Costs", "Door", "Gate", "GiveBack", "Item", "Lane", "LocalPeers", "Machine", "Mischief",
    "Pending", "Piece", "Places", "Put", "Readout", "Stay", "Stepper", "Ticket", "TrackCosts", "Way", "Weather",
    "World",
}  # fmt: skip
FUNCTIONS = {
    "alone", "came_from", "deal", "dealing", "door", "give_back", "late_tracks", "mend", "portable", "price", "say",
    "settled", "soft_loss", "stays", "structure", "taught_loss", "tell", "thinned", "together", "told",
}  # fmt: skip
PARAMETERS = {"came_from", "door", "late_tracks", "mend", "price", "tell", "ticket", "told", "way", "ways"}
FLAGS = {"late-tracks", "mend", "price", "tell", "ticket", "ways"}


def named():
    """Kind, name and place of every module, class, function and parameter; leading underscores are taken off."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            yield MODULES, path.stem.strip("_"), place
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                where = f"{place}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.ClassDef):
                    yield CLASSES, node.name.strip("_"), where
                elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield FUNCTIONS, node.name.strip("_"), where
                elif isinstance(node, ast.arg):
                    yield PARAMETERS, node.arg.strip("_"), where


def options(command):
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from options(command.get_command(context, name))
    for parameter in command.params:
        yield from (option.lstrip("-") for option in (*parameter.opts, *parameter.secondary_opts))


def test_no_name_of_the_package_is_a_replaced_one():
    assert [f"{place} {name}" for replaced, name, place in named() if name in replaced] == []


def test_no_flag_is_a_replaced_one():
    assert FLAGS & set(options(cli)) == set()


@pytest.mark.parametrize("name", ["Costs", "Lane", "Parts", "Peer", "Plan", "Record", "Settings", "Tracks", "Wave"])
def test_at_most_one_class_has_a_name_that_many_could_have(name):
    places = [place for kind, found, place in named() if kind is CLASSES and found == name]
    assert len(places) <= 1, places


@pytest.mark.parametrize(
    "name", ["Makefile", "README.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_documents_use_the_terms(name):
    words = set((ROOT / name).read_text(encoding="utf-8").replace("`", " ").split())
    assert not words & {"late_tracks", "mend", "mends", "Mischief", "GiveBack", "came_from", "imagetree", "yamlfile"}
