"""Documents name existing commands, options, files and functions."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from ls_edge.analysis import KINDS
from ls_edge.cli.main import cli
from ls_edge.runtime.routing.policies import POLICIES

ROOT = Path(__file__).parents[2]
FIRST = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "runtime/protocol/PROTOCOL.md")]
DOCUMENTS = sorted([*FIRST, *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")])


def label(path):
    return str(path.relative_to(ROOT))


LONG = {"docs/commands.md", "docs/json.md", "runtime/protocol/PROTOCOL.md", "examples/deploy/README.md"}


def fenced(text, *languages):
    return [body for language, body in re.findall(r"```(\w+)\n(.*?)```", text, re.S) if language in languages]


def commands(text):
    for body in fenced(text, "console", "bash", "sh"):
        for line in body.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").split(" > ")[0].strip()
            if line.startswith("ls-edge "):
                yield line


WITH_COMMANDS = [path for path in DOCUMENTS if any(commands(path.read_text(encoding="utf-8")))]
WITH_PYTHON = [path for path in DOCUMENTS if fenced(path.read_text(encoding="utf-8"), "python")]


def test_documents_have_examples():
    assert (len(WITH_COMMANDS) > 15, len(WITH_PYTHON) > 1) == (True, True)


@pytest.fixture
def example_plugin(monkeypatch):
    """Register the classes of examples/plugin, as if it was installed."""
    folder = ROOT / "examples" / "plugin"
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    found = {
        group: dict(re.findall(r'^([\w-]+) = "(\w[\w.]*:\w+)"', lines, re.M))
        for group, lines in re.findall(r'entry-points."ls_edge\.(\w+)"\]([^\[]*)', text)
    }
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("ls_edge.core.plugins.registered", found.__getitem__)
    yield
    POLICIES.pop("last-first", None)


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=label)
@pytest.mark.usefixtures("example_plugin")
def test_commands_and_options_exist(path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(path.parent)  # methods in a file next to the page
    if "\nexport LS_EDGE_PEERS=" in text:
        monkeypatch.setenv("LS_EDGE_PEERS", "peers.yaml")
    for line in commands(text):
        words = shlex.split(line, comments=True)[1:]
        context = click.Context(cli, info_name="ls-edge")
        command = cli
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words[0])
            assert found is not None, line
            command, words = found, words[1:]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known, line
        assert command.name != "train" or "digits" in words or used & {"--model", "--init", "--config", "--resume"}, (
            line
        )
        if not isinstance(command, click.Group):
            words = ["1" if word in ("EPOCHS", "S") else "shuffle" if word == "METHOD" else word for word in words]
            command.make_context("ls-edge", words)  # required ones are there, and every value is allowed


@pytest.mark.parametrize("path", WITH_PYTHON, ids=label)
def test_python_parses(path):
    for body in fenced(path.read_text(encoding="utf-8"), "python"):
        ast.parse(body)


@pytest.mark.parametrize("name", ["develop.md"])
def test_files_in_tables_exist(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    paths = {
        path for row in rows for path in re.findall(r"`((?:ls_edge|runtime|training|export|docs|tests)/[\w/.]*)`", row)
    }
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_each_kind_of_analysis_has_a_row():
    section = (ROOT / "docs" / "research.md").read_text(encoding="utf-8").split("\n## Analyze\n")[1]
    rows = re.findall(r"^\| (`[^|]*) \| ", section, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(\w[\w-]*)`", row)) == sorted(KINDS)


@pytest.mark.parametrize("name", ["fleet.md", "jetson.md"])
def test_pages_of_several_machines_say_where_commands_run(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    found = fenced(text, "bash", "sh")
    assert [body for body in found if not re.match(r"# on (the laptop|the board|orin-\d|a )", body)] == []
    assert found


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if label(path) not in LONG], ids=label)
def test_prose_has_short_lines(path):
    """Commands, tables and links cannot be broken into lines; everything else can."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.S)
    lines = [line for line in text.splitlines() if not line.lstrip("(").startswith(("|", "![", "["))]
    assert [line for line in lines if len(line) > 100] == []


GENERATED = {"docs/commands.md", "docs/json.md", "docs/python.md"}


def test_documents_are_short():
    """Words of the README, of the protocol, and of the README with all pages that are written by hand."""
    words = {label(path): len(path.read_text(encoding="utf-8").split()) for path in DOCUMENTS}
    assert words["README.md"] <= 750
    assert words["runtime/protocol/PROTOCOL.md"] <= 8000
    pages = [words[name] for name in words if name.startswith("docs/") and name not in GENERATED]
    assert sum(pages) + words["README.md"] <= 28_000


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if label(path) not in GENERATED], ids=label)
def test_paragraphs_are_short(path):
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.S)
    parts = (part for block in re.split(r"\n\s*\n", text) for part in re.split(r"\n(?=[-|] ?|\d+\. )", block))
    assert [part[:60] for part in parts if len(part.split()) > 90] == []
