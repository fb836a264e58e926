"""The command line without the heavy packages: help, version, and what a wrong command gets."""

import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from docs.reference import reference
from ls_edge.cli.main import COMMANDS, GROUPS, cli
from ls_edge.version import __version__

HEAVY = ("torch", "torchvision", "timm", "onnx", "onnxscript", "sklearn", "onnxruntime", "tensorrt", "safetensors")
OF_SERVE = ("aiohttp", "yarl", "multidict")
"""What only `ls-edge serve` needs."""
ROOT = Path(__file__).parents[2]

BLOCK = """
import sys
class Block:
    names = set({names!r})
    def find_spec(self, name, path=None, target=None):
        if name in self.names or name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Block())
"""


def python(code, *arguments, blocked=(), **kwargs):
    """Run code in a fresh interpreter in which some packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=tuple(blocked)) + code, *arguments],
        capture_output=True, text=True, timeout=120, check=False, **kwargs,
    )  # fmt: skip


def run(*arguments, blocked=(), **kwargs):
    return python("from ls_edge.cli.main import main; main(sys.argv[1:])", *arguments, blocked=blocked, **kwargs)


def modules(*, without=()):
    """Names of all modules of the rooms, but for those below the packages ``without``."""
    found = {"ls_edge"}
    for room in ("ls_edge", "ls_edge.runtime", "ls_edge.training", "ls_edge.export"):  # an editable install maps them
        path = importlib.import_module(room).__path__
        found |= {room, *(module.name for module in pkgutil.walk_packages(path, room + "."))}
    return sorted(
        name
        for name in found
        if not name.endswith("__main__") and not f"{name}.".startswith(tuple(w + "." for w in without))
    )


IMPORT_ALL = """
import importlib, json
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def test_help_works_without_the_heavy_packages():
    done = run("--help", blocked=(*HEAVY, *OF_SERVE))
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


EACH_HELP = """
import contextlib, io, json
from ls_edge.cli.main import main
said = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(arguments)
    said.append(out.getvalue())
print(json.dumps(said))
"""


def test_help_of_each_command_works_without_the_heavy_packages():
    asked = [[command, flag] for command in COMMANDS for flag in ("--help", "-h")]
    done = python(EACH_HELP, json.dumps(asked), blocked=(*HEAVY, *OF_SERVE))
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    for command, full, short in zip(COMMANDS, said[::2], said[1::2], strict=True):
        assert full.startswith(f"Usage: ls-edge {command} ")
        assert short == full


def test_core_and_runtime_import_without_the_heavy_packages():
    names = modules(without=("ls_edge.training", "ls_edge.export"))
    assert {"ls_edge.runtime", "ls_edge.data.preprocess", "ls_edge.cli.commands.keys", "ls_edge.core.bundle"} <= set(
        names
    )
    done = python(IMPORT_ALL, *names, blocked=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_peer_with_metrics_needs_nothing_of_the_server():
    names = ("cli.commands.peer", "runtime.peer.peer", "cli.metrics_listener", "runtime.serve.metrics")
    done = python(IMPORT_ALL, *(f"ls_edge.{name}" for name in names), blocked=OF_SERVE)
    assert (done.returncode, done.stderr) == (0, "")


def test_core_and_runtime_leave_the_heavy_packages_alone_where_they_are():
    names = modules(without=("ls_edge.training", "ls_edge.export"))
    done = python(IMPORT_ALL, *names)
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout)) & set(HEAVY)


def test_the_core_needs_nothing_of_the_other_rooms():
    rooms = ("ls_edge.runtime", "ls_edge.training", "ls_edge.export")
    names = modules(without=(*rooms, "ls_edge.analysis", "ls_edge.api", "ls_edge.cli", "ls_edge.data"))
    assert {"ls_edge.core.bundle", "ls_edge.engines", "ls_edge.report"} <= set(names)
    done = python(IMPORT_ALL, *names, blocked=(*HEAVY, "zmq", "PIL", *rooms))
    assert (done.returncode, done.stderr) == (0, "")


LOADED = """
import contextlib, io, json
from ls_edge.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(json.dumps([name for name in sys.modules if name.startswith("ls_edge.runtime.")]))
"""


@pytest.mark.parametrize(("name", "allowed"), [("train", ""), ("export", ""), ("eval", ""), ("keys", "transport.keys")])
def test_commands_that_open_no_link_load_nothing_of_wire_and_routing(name, allowed):
    done = python(LOADED, name, *(["new"] if name == "keys" else []), "--help")
    assert set(json.loads(done.stdout)) == {f"ls_edge.runtime.{each}" for each in ("transport", allowed) if allowed}


def test_the_import_block_of_these_tests_works():
    done = python("import torch", blocked=HEAVY)
    assert done.returncode == 1
    assert "(blocked)" in done.stderr


def test_the_version_is_printed():
    for done in (run("--version"), subprocess_module("--version")):
        assert (done.returncode, done.stdout, done.stderr) == (0, f"ls-edge, version {__version__}\n", "")


def subprocess_module(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ls_edge", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["trian"], "unknown command 'trian'"),
        (["--jason"], "unknown option '--jason'"),
        (["keys", "old"], "unknown command 'old'; known here: new, -h, --help; see 'ls-edge keys --help'"),
        (["keys", "new"], "Missing argument 'NAME'; see 'ls-edge keys new --help'"),
        (["keys", "new", "a/b"], "name 'a/b': use 1 to 63 letters"),
        *[([command, "--no-such-flag"], f"; see 'ls-edge {command} --help'") for command in COMMANDS],
    ],
)
def test_wrong_usage_is_one_line(command, arguments, what):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ls-edge: ")
    assert err.count("\n") == 1
    assert what.split(" '--")[0] in err


def test_debug_shows_the_traceback():
    plain, debug = run("keys", "new", "a/b"), run("keys", "new", "a/b", "--debug")
    assert debug.returncode == plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr
    assert "UsageError" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)


@pytest.mark.parametrize("arguments", [[], ["keys"]])
def test_no_command_shows_the_help(arguments):
    done = run(*arguments)
    assert done.returncode in (0, 2)  # click before 8.2 takes it for a success
    assert "Usage: ls-edge" in done.stdout + done.stderr
    assert ("Commands:\n" if arguments else "Research:\n") in done.stdout + done.stderr


def test_the_reference_is_up_to_date():
    path = ROOT / "docs" / "commands.md"
    assert path.read_text(encoding="utf-8") == reference(), "out of date: run 'make docs'"
    assert "None" not in reference()  # an option of which click shows a range without ends


def test_the_reference_does_not_depend_on_earlier_help():
    """In an interpreter of its own: click keeps the help option of a command that it made first."""
    code = (
        "import sys, click; from ls_edge.cli.main import cli; from docs.reference import reference; "
        "found = [cli, *(cli.get_command(None, name) for name in cli.list_commands(None))]; "
        "found += cli.get_command(None, 'keys').commands.values(); "
        "[one.get_help(click.Context(one)) for one in found]; sys.stdout.write(reference())"
    )
    done = python(code, blocked=HEAVY)
    assert done.stderr == ""
    assert done.stdout == reference()


@pytest.mark.release
def test_the_reference_does_not_depend_on_the_terminal():
    code = "import runpy; runpy.run_module('docs.reference', run_name='__main__')"
    texts = [
        python(code, blocked=HEAVY, env={**os.environ, "COLUMNS": columns, "FORCE_COLOR": "1"}).stdout
        for columns in ("40", "200")
    ]
    assert texts[0] == texts[1] == reference()
    assert "\x1b" not in texts[0]
    for command in COMMANDS:
        assert f"\n## ls-edge {command}\n" in texts[0]
    assert "\n## ls-edge keys new\n" in texts[0]


def commands_below(command, words=()):
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands_below(command.get_command(context, name), (*words, name))
    else:
        yield words, command


@pytest.mark.parametrize(
    ("words", "command"),
    list(commands_below(cli)),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_examples_of_a_help_can_be_typed(words, command):
    assert command.examples, f"{words} shows no example"
    shown = command.get_help(click.Context(command, info_name=" ".join(("ls-edge", *words)), terminal_width=40))
    for example in command.examples:
        assert f"\n  {example}\n" in f"{shown}\n"
        assert len(example) <= 78
        typed = shlex.split(example)
        assert tuple(typed[: len(words) + 1]) == ("ls-edge", *words)
        command.make_context(words[-1], typed[len(words) + 1 :])  # raises where it does not parse


def test_the_groups_are_those_of_the_contract():
    assert list(GROUPS) == ["Start", "Model", "Fleet", "Use", "Plan", "Research"]
    assert len(COMMANDS) == 21


@pytest.mark.parametrize(("words", "command"), list(commands_below(cli)), ids=lambda value: str(value)[:20])
def test_help_shows_what_most_people_set_and_fits_a_terminal(words, command):
    context = click.Context(command, info_name=" ".join(("ls-edge", *words)), terminal_width=80)
    short, full = command.get_help(context), command.full_help(context)
    assert max(map(len, full.splitlines())) <= 80
    assert re.search(r"^Also: .*--debug, --help, --help-all$", short, re.M)
    assert "  --debug" not in short
    assert "  --debug" in full
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.opts[-1] in full
            assert parameter.opts[-1] in short or not parameter.required
    for end in re.findall(r"x<=?([\d.]+)", full):
        assert float(end) <= 1000


def test_help_all_prints_every_option(command):
    code, out, _ = command("run", "--help-all")
    assert code == 0
    assert "--strict-bundle" in out
    assert "--strict-bundle" not in command("run", "--help")[1]


@pytest.mark.release
def test_the_shell_completes_commands_options_and_choices():
    def completed(words, last):
        done = subprocess.run(
            [sys.executable, "-c", "from ls_edge.__main__ import main; main()"],
            capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "_LS_EDGE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(last)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("ls-edge ", 1) >= set(COMMANDS)
    assert completed("ls-edge ru", 1) == {"run"}
    assert "--max-skips" in completed("ls-edge run --max", 2)
    assert completed("ls-edge run --policy fas", 3) == {"fastest"}
