"""Log lines: readable, one line each, and harmless on a terminal."""

import json
import logging
import os
import pty
import subprocess
import sys
import termios

import pytest

from ls_edge.core import logs

EVIL = "\x1b]0;title\x07\x1b[2J\nforged: line\u202e"


@pytest.fixture
def logger():
    return logging.getLogger("ls_edge.test")


def test_a_line_of_text_has_the_event_and_its_fields(logger, capsys):
    logs.set_up(as_json=False)
    logger.info("listening", extra={"peer": "a", "address": "tcp://b:1", "why": "it's so", "none": None, "empty": ""})
    line = capsys.readouterr().err
    assert line.endswith(r" INFO    listening  peer=a address=tcp://b:1 why='it\'s so'" + "\n")


def test_text_from_outside_cannot_control_the_terminal(logger, capsys):
    logs.set_up(as_json=False)
    logger.warning("dropped %s", EVIL, extra={"why": EVIL, "count": 3})
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    assert r"why='\x1b]0;title\x07\x1b[2J forged: line\u202e'" in text


def test_a_traceback_is_printable_too(logger, capsys):
    logs.set_up(as_json=False)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logger.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("Traceback")
    assert any(line.startswith("    raise ValueError") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_json_lines_are_json_and_printable(logger, capsys):
    logs.set_up(as_json=True)
    logger.warning("dropped", extra={"why": EVIL})
    text = capsys.readouterr().err
    assert text.rstrip("\n").isprintable()
    assert json.loads(text)["why"] == EVIL


LOGGING = """
import logging, threading
from ls_edge.core import logs

logs.set_up(as_json=True)
log = logging.getLogger("ls_edge.test")
log_lines = lambda: [log.info("line", extra={"text": "x" * 100}) for _ in range(2000)]
threads = [threading.Thread(target=log_lines) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("logged", flush=True)
input()
log.info("last")
"""


@pytest.fixture(params=["terminal", "pipe"])
def unread(request):
    """Both ends of a terminal with Ctrl-S, or of a pipe, that nobody reads, and a call that undoes it."""
    reads, writes = pty.openpty() if request.param == "terminal" else os.pipe()
    if request.param == "terminal":
        termios.tcflow(writes, termios.TCOOFF)
    yield reads, writes, lambda: request.param == "pipe" or termios.tcflow(writes, termios.TCOON)
    os.close(reads)
    os.close(writes)


def start_logging(writes):
    command = [sys.executable, "-c", LOGGING]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writes, text=True)


@pytest.mark.processes
def test_unread_log_lines_block_no_thread_and_are_counted(unread):
    reads, writes, read_again = unread
    with start_logging(writes) as process:
        assert process.stdout.readline() == "logged\n"
        read_again()
        text = b""
        while text.count(b"\n") < logs.MAX_WAITING_LINES:
            text += os.read(reads, 65536)
        process.stdin.write("\n")
        process.stdin.flush()
        while b'"last"}' not in text:
            text += os.read(reads, 65536)
        lines = [json.loads(line) for line in text.decode().splitlines()]
        dropped = sum(line["count"] for line in lines if line["event"] == "log lines dropped")
        assert dropped + sum(line["event"] == "line" for line in lines) == 4000
        assert dropped >= 4000 - logs.MAX_WAITING_LINES - 800  # the pipe and the terminal hold some


@pytest.mark.processes
def test_a_process_with_an_unread_log_ends(unread):
    _, writes, _ = unread
    with start_logging(writes) as process:
        assert process.stdout.readline() == "logged\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
