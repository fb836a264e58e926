"""Log lines: readable, one line each, and harmless on a terminal."""

import json
import logging

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
    assert line.endswith(r" listening  peer=a address=tcp://b:1 why='it\'s so'" + "\n")


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
