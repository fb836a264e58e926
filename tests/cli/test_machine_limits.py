"""Limits of a machine end a command with one line: threads, no home folder, no folder for temporary files."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

PIDS = Path("/sys/fs/cgroup/pids")
COMMAND = (sys.executable, "-m", "ls_edge")


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, timeout=60, **options)
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("ls-edge: ")], done


@pytest.fixture
def limited():
    """Run a command that can have ``most`` threads."""
    group = PIDS / f"ls-edge-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs to create control groups of version 1")

    def start(most, *words, **options):
        (group / "pids.max").write_text(f"{most}\n")
        return run("sh", "-c", 'echo $$ > "$0"; exec "$@"', group / "cgroup.procs", *COMMAND, *words, **options)

    yield start
    with contextlib.suppress(OSError):
        group.rmdir()


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("name", ["predict", "peer", "run", "bench"])
def test_a_limit_of_threads_is_one_line(limited, most, name):
    code, lines, done = limited(most, name)
    assert (code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == lines
    assert lines[0].startswith("ls-edge: no more threads can be started; raise the limit (docker --pids-limit")


def test_engines_with_too_many_threads_are_one_line(limited, tiny_bundle, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    words = ["predict", "--bundle", tiny_bundle, tmp_path / "a.png", "--threads"]
    code, lines, _ = limited(16 + (os.cpu_count() or 1), *words, 9)
    assert (code, len(lines)) == (1, 1)
    assert "no more threads can be started" in lines[0]


@pytest.mark.skipif(shutil.which("unshare") is None or os.getuid() != 0, reason="needs unshare, and root")
def test_a_user_without_a_home_is_told_what_to_set(tiny_bundle):
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "LS_EDGE_CACHE")}
    user = ["unshare", "--user", "--map-user=54321", *COMMAND]
    code, lines, _ = run(*user, "build", tiny_bundle, env=kept)
    assert (code, lines) == (
        2, ["ls-edge: this user has no home folder for caches; set HOME, or LS_EDGE_CACHE=FOLDER"]
    )  # fmt: skip


NO_TEMPORARY = 'for d in /tmp /var/tmp; do mount -t tmpfs -o ro none $d; done; cd /proc; exec "$0" -c "$1"'
FINDINGS = """
from ls_edge.device import diagnostics
for check in (diagnostics.check_torch, diagnostics.check_hardware):
    for found in check():
        if found.status != "ok": print(found.what, found.fix, sep=": ")
"""


@pytest.mark.skipif(shutil.which("unshare") is None or os.getuid() != 0, reason="needs unshare, and root")
def test_doctor_advises_about_temporary_files():
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    _, _, done = run(
        "unshare", "--mount", "sh", "-c", NO_TEMPORARY, sys.executable, FINDINGS, env={**kept, "PYTHONPATH": path}
    )
    assert "temporary files: mount a folder for them, such as docker --tmpfs /tmp, or set TMPDIR\n" in done.stdout
    assert "torch" not in done.stdout, done
