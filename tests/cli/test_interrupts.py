"""Ctrl-C and SIGTERM: one line, the right exit code, from the first import of a command on."""

import json
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import hear_ctrl_c

# Sends a signal to this very process while MODULE is being imported, and swallows what it raises, as an extension
# module does that is just being initialized.
AT_IMPORT = """
import os, signal, sys
class AtImport:
    sent = False
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and not AtImport.sent:
            AtImport.sent = True
            try:
                os.kill(os.getpid(), {number})
                for _ in range(1000):
                    pass
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, AtImport())
from ls_edge.__main__ import main
main()
"""

AT_START = """
import os
from ls_edge.device import threads
threads.can_start_threads = lambda: os.kill(os.getpid(), {number})
from ls_edge.__main__ import main
main()
"""


def python(code, *arguments, preexec_fn=hear_ctrl_c, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, preexec_fn=preexec_fn, **options,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["--version", "run --help", "train --help", "peer --help", "peer --log-json"])
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_before_a_command_begins_is_one_line(command, number, word):
    is_json = command.endswith("json")
    code = AT_START if is_json else AT_IMPORT  # between two imports, or during one
    done = python(code.format(module="click", number=int(number)), *command.split())
    line = f"ls-edge: {json.loads(done.stderr)['event']}\n" if is_json else done.stderr
    assert (done.returncode, done.stdout, line) == (128 + number, "", f"ls-edge: {word}\n")


@pytest.mark.parametrize("module", ["numpy", "ls_edge.runtime.source.source"])
def test_a_signal_that_an_import_swallows_ends_the_process(module, write_peers, tiny_bundle):
    peers = write_peers({"a": range(6)})
    done = python(
        AT_IMPORT.format(module=module, number=int(signal.SIGINT)),
        "run", "--peers", peers, "--bundle", tiny_bundle, "--data", "digits", "--wait", "0",
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ls-edge: interrupted\n")


AT_WORK = """
import os, signal, sys, types
import click
from ls_edge.cli import main as commands
@click.command()
def work():
    try:
        os.kill(os.getpid(), {number})
        signal.pause()
    finally:
        print("cleaned up", file=sys.stderr)
commands.COMMANDS["work"] = "Work without end."
sys.modules["ls_edge.cli.commands.work"] = types.SimpleNamespace(command=work)
from ls_edge.__main__ import main
main()
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_command_cleans_up_after_a_signal(number, word):
    done = python(AT_WORK.format(number=int(number)), "work")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"cleaned up\nls-edge: {word}\n")


STUBBORN = AT_WORK.replace('print("cleaned up", file=sys.stderr)', "os.kill(os.getpid(), {number}); signal.pause()")


def test_a_second_signal_ends_the_command_immediately():
    done = python(STUBBORN.format(number=int(signal.SIGINT)), "work")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ls-edge: interrupted\n")


FORKED = """
import os, signal, time
from ls_edge.cli import interrupts
interrupts.install()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(writing, b"1")
        while True:  # a signal just before a call to pause() would be waited for without end
            time.sleep(0.01)
    finally:
        os._exit(7)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1])
"""


def test_sigterm_ends_a_forked_process():
    done = python(FORKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{int(signal.SIGTERM)}\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_that_end_no_command_as_it_starts(write_peers, tiny_bundle, number):
    # SIGINT stays ignored; SIGHUP asks to read files that are read anyway.
    code = AT_IMPORT.format(module="numpy", number=int(number))
    done = python(
        code, "run", "--peers", write_peers({"a": range(6)}), "--bundle", tiny_bundle, "--data", "digits",
        "--wait", "0", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert (done.returncode, "no holder" in done.stderr) == (1, True), done.stderr


def test_standard_output_that_takes_nothing_is_one_line():
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "ls_edge", *arguments],
                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            )  # fmt: skip
        assert (done.returncode, done.stderr) == (
            1,
            "ls-edge: No space left on device; make room where the output goes\n",
        )


BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "timm", "onnx"):
            print("imported", name, file=sys.stderr)
sys.meta_path.insert(0, Block())
from ls_edge.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "what", "code"),
    [
        (["train", "--out", "new"], "no data for new: give --data DATA", 2),
        (["train", "--out", "new", "--data", "digits", "--config", "nowhere.yaml"], "no such file and no recipe", 2),
        (["train", "--out", "new", "--resume", "--overwrite"], "exclude each other", 2),
        (["train", "--out", "file", "--data", "digits"], "Directory 'file' is a file", 2),
        (["export", "run", "--out", "file"], "file is not a folder", 2),
        (["eval", "nowhere", "--data", "digits"], "nowhere is neither a run", 1),
        (["eval", "run", "nowhere", "--data", "digits"], "nowhere is neither a run", 1),
        (["eval", "run", "--data", "nowhere"], "nowhere: no such folder or tar", 1),
        (["eval", "run", "--data", "digits", "--figure", "run"], "cannot write run: it is a folder", 2),
    ],
)
def test_mistakes_are_found_before_torch_is_imported(tmp_path, arguments, what, code):
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("config.yaml", "model.safetensors"):
        (tmp_path / "run" / name).write_text("")
    done = python(BLOCK_TORCH, *arguments, cwd=tmp_path)
    assert (done.returncode, what in done.stderr, done.stderr.count("\n")) == (code, True, 1), done.stderr
