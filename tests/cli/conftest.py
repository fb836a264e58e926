"""The bundles of the runtime's tests, and commands as processes of their own."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "runtime_fixtures", Path(__file__).parents[1] / "runtime" / "conftest.py"
)
_runtime = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_runtime)
tiny_bundle, other_bundle = _runtime.tiny_bundle, _runtime.other_bundle
write_peers, wait_until = _runtime.write_peers, _runtime._wait_until


def _hear_ctrl_c():
    """What a terminal's child does; a test runner in the background hands down that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Commands:
    """``ls-edge`` as a user starts it."""

    def __init__(self):
        self.started = []

    def run(self, *arguments, **options):
        """Run a command to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=options.get("timeout", 60))
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *arguments, before=(), prepare=_hear_ctrl_c, **options):
        """Start a command; ``before`` are words ahead of it, such as those of a wrapper."""
        options.pop("timeout", None)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        words = [*before, sys.executable, "-m", "ls_edge", *map(str, arguments)]
        process = subprocess.Popen(words, preexec_fn=prepare, **options)
        self.started.append(process)
        return process

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def ls_edge():
    """Run and start commands; none outlives the test."""
    commands = Commands()
    yield commands
    commands.close()


def complaints(done):
    """The lines of a command's errors and warnings, without its progress."""
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("ls-edge: ")]


@pytest.fixture(name="complaints", scope="session")
def _complaints():
    return complaints
