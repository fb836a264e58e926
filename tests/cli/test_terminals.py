"""Every command on terminals that have no Unicode, no cursor or twenty columns: nothing crashes, no figure is lost."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from ls_edge.cli.main import COMMANDS
from ls_edge.core.peer_reports import PeerState, Visit
from ls_edge.core.records import PeerEvent, RequestRecord, RunContext
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report.progress import RunProgress
from ls_edge.report.tables import comparison_table, print_summary
from ls_edge.report.terminal import PlainTable, print_table

EVAL = ("--data", "digits", "--limit", 20, "--orders", 2, "--keep", "2", "--threads", 1)
ASCII = [{"LC_ALL": "POSIX"}, {"PYTHONIOENCODING": "ascii"}]


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def on_a_terminal(*arguments, columns=20, term="xterm", **env):
    """Exit code and output of a real process whose output and errors are a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ls_edge", *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave,
        env={**settings, "TERM": term, **env},
    )  # fmt: skip
    os.close(slave)
    parts = []
    try:
        while part := os.read(master, 65536):
            parts.append(part)
    except OSError:  # what Linux says at the end
        pass
    os.close(master)
    return process.wait(60), b"".join(parts).decode()


@pytest.mark.parametrize("env", ASCII, ids=lambda env: "=".join(*env.items()))
def test_characters_that_an_encoding_lacks_are_escaped(process, bundle, env):
    clean = dict.fromkeys(("LANG", "LC_ALL", "LC_CTYPE", "PYTHONIOENCODING", "PYTHONUTF8"), "")
    done = process("eval", bundle, *EVAL, **{**clean, **env})
    assert done.returncode == 0, done.stderr
    encoding = env.get("PYTHONIOENCODING", "utf-8")  # Python takes UTF-8 for the C locale
    text = done.stdout.decode(encoding)
    assert (r"\xb1" if encoding == "ascii" else "±") in text
    assert re.search(r"all +\d+\.\d % +\d+\.\d %", text)
    assert b"Traceback" not in done.stderr


def test_names_that_ascii_lacks_are_unambiguous(process, tmp_path):
    done = process("verify", tmp_path / "größer…", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert rb"gr\xf6\xdfer\u2026" in done.stderr
    done = process("verify", str(tmp_path).encode().decode() + "/caf\udce9")
    assert rb"caf\xe9" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_help_is_ascii(command):
    for name in COMMANDS:
        code, out, _ = command(name, "--help")
        assert code == 0
        assert out.isascii(), name


BENCH = ("bench", "--duration", "0.05", "--threads", 1)


@pytest.mark.parametrize("arguments", [BENCH, ("verify",)], ids=lambda arguments: arguments[0])
@pytest.mark.parametrize("how", [{"columns": 1}, {"term": "dumb", "PYTHONIOENCODING": "ascii"}])
def test_commands_work_on_odd_terminals(bundle, arguments, how):
    code, text = on_a_terminal(arguments[0], bundle, *arguments[1:], **how)
    assert code == 0, text
    assert "…" not in text
    if arguments[0] == "bench" and how.get("columns") != 1:
        assert "1 thread, " in plain(text).replace("\r\n", "")


def test_a_live_run_prints_lines_on_a_terminal_without_a_cursor(monkeypatch):
    out = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    with RunProgress(2, ["a"], console=out) as progress:
        progress.event(PeerEvent(1000, "a", PeerState.LOST))
        progress.record(record(0, 7.25))
    lines = out.file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["run", "run"]
    assert "\x1b" not in out.file.getvalue()


def record(number, latency):
    visit = Visit("a", (0, 1), 100, 1000, 100)
    return RequestRecord(
        id=number, image="a.png", label=1, prediction=1, latency_us=round(1e3 * latency), degraded=False, error=None,
        waves=((((0, "a"), (1, "a")),),), skipped=(), attempts=1, logits=None,
        stem_us=500, head_us=100, visits=(visit,),
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 7, 20, 39])
def test_tables_of_a_run_fit_any_width(width):
    summary = summarize(
        [record(n, 7.25) for n in range(3)],
        [PeerEvent(0, "a", PeerState.ALIVE)],
        RunContext(classes=tuple("0123456789")),
    )
    for terminal in (True, False):
        out = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
        print_summary(summary, out)
        print_table(comparison_table([("one", summary)]), out)
        text = "".join(out.file.getvalue().split())
        for figure in ("3of3", "p507.2ms", "100.0%", "blocksrun", "6"):
            assert figure in text
        assert "…" not in text


def test_cells_are_neither_markup_nor_commands():
    table = PlainTable("name")
    table.add_row("[/x] \x1b]0;t\x07 :smile:")
    out = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    print_table(table, out)
    assert r"[/x] \x1b]0;t\x07 :smile:" in out.file.getvalue()
