"""Outputs that cannot be written: known before any work, whatever the command; numbers are printed nevertheless."""

import os
import shutil
import subprocess
import sys

import click
import pytest

from ls_edge.cli.main import cli
from ls_edge.cli.options import FILE, FOLDER
from tests.cli.test_help import commands_below

READ = {
    "--bundle", "--config", "--init", "--links", "--peers", "--secret-key", "--run", "--tls-cert",
    "--tls-key", "--token-file",
}  # fmt: skip
"""Options whose files and folders are only read."""
STORE = {"--store"}
"""Options whose folder is opened, and checked, before any work."""


def outputs():
    """Every command with each of its options that takes a file or a folder to write."""
    for words, command in commands_below(cli):
        for option in command.params:
            is_path = isinstance(option, click.Option) and option.type in (FILE, FOLDER)
            if is_path and option.opts[-1] not in READ | STORE:
                yield pytest.param(words, option.opts[-1], id=" ".join((*words, option.opts[-1])))


@pytest.fixture
def read_only(small_disk):
    """A disk that also root cannot write to."""
    return small_disk(megabytes=1, options="ro")


@pytest.mark.parametrize(("words", "flag"), list(outputs()))
def test_an_output_on_a_read_only_disk_is_refused_before_anything_else(command, read_only, words, flag):
    code, printed, errors = command(*words, "nothing", flag, read_only / "new")
    assert (code, printed) == (2, "")
    assert errors == f"ls-edge: cannot write {read_only / 'new'}: Read-only file system; give another path\n"


def test_folders_that_this_user_may_not_enter_are_named(tmp_path):
    """As another user than root: without the capability that ignores permissions."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    before = ()
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root may enter every folder, and setpriv, which takes that away, is missing")
        before = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    for words in (("report", "nothing", "--out"), ("keys", "new", "a", "--into")):
        done = subprocess.run(
            [*before, sys.executable, "-m", "ls_edge", *words, closed / "in" / "x"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        why = f"cannot write {closed / 'in' / 'x'}: Permission denied; give another path"
        assert (done.returncode, done.stderr) == (2, f"ls-edge: {why}\n")
    closed.chmod(0o700)


def test_a_mount_point_is_not_a_place_for_a_bundle(command, tiny_bundle, small_disk):
    disk = small_disk(megabytes=2)
    code, _, errors = command("export", tiny_bundle.parent / "run", "--out", disk)
    assert (code, list(disk.iterdir())) == (2, [])
    assert errors.endswith(f"{disk} is a mount point, which a bundle cannot replace; give --out a folder in it\n")


def test_engines_that_the_cache_cannot_keep_are_not_built(command, bundle, read_only, monkeypatch):
    monkeypatch.setenv("LS_EDGE_CACHE", str(read_only))
    code, _, errors = command("build", bundle)
    assert (code, errors) == (
        2, f"ls-edge: cannot write {read_only / 'engines'}: Read-only file system; give another path\n",
    )  # fmt: skip
