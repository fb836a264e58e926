"""Report of a board: whole after each section, limits, and no names of the machine."""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import zmq

from ls_edge.cli import board_report
from ls_edge.cli.board_report import BoardReport
from ls_edge.core.bundle import Bundle
from ls_edge.engines.tensorrt.build import tensorrt_name


def is_whole(text):
    """Whether all sections of a report are complete."""
    return re.fullmatch(
        r"# Hardware report\n\nls-edge \S+.*\n(\n## .+\n\n(Exit code .+\n\n)?```text\n(?:(?!```).*\n)*```\n)*", text
    )


@pytest.fixture
def report(tmp_path):
    return BoardReport(tmp_path / "report.md", tmp_path)


def test_a_section_that_hangs_is_stopped_with_its_processes(report, tmp_path, monkeypatch):
    monkeypatch.setattr(board_report, "LIMIT_S", 3.0)
    report.add("fact", "known")
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
    report.program("hangs", "hangs", (sys.executable, "-c", code))
    report.program("works", "works", (sys.executable, "-c", "print('done')"))
    text = (tmp_path / "report.md").read_text()
    assert is_whole(text)
    assert re.findall(r"^## (.*)", text, re.M) == ["fact", "hangs", "works"]
    assert "Exit code -9, " in text
    assert "s, stopped at its limit of 3 s." in text
    assert report.failed == ["hangs"]
    (child,) = re.findall(r"^(\d+)$", text, re.M)
    assert "sleep" not in _command_of(child)


def _command_of(number):
    try:
        return Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return ""


def test_an_interrupted_report_has_all_sections_so_far(report, tmp_path):
    report.add("fact", "known")
    before = (tmp_path / "report.md").read_text()
    assert is_whole(before)
    child = os.fork()
    if child == 0:
        report.program("waits", "waits", (sys.executable, "-c", "import os; os.kill(os.getppid(), 9)"))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
    assert (tmp_path / "report.md").read_text() == before


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_real_report_is_whole_when_it_is_interrupted(ls_edge, bundle, tmp_path, wait_until, number):
    path = tmp_path / "report.md"
    process = ls_edge.start("doctor", "--report", path, "--bundle", bundle)
    wait_until(lambda: path.exists() and "## ls-edge doctor" in path.read_text(), timeout=150)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert is_whole(path.read_text())


def test_a_report_goes_on_without_keys(tmp_path, tiny_bundle, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    programs = []
    monkeypatch.setattr(BoardReport, "program", lambda _self, _title, name, _command: programs.append(name))
    assert not board_report.write_report(tmp_path / "report.md", Bundle.open(tiny_bundle), None)
    text = (tmp_path / "report.md").read_text()
    assert is_whole(text)
    assert re.search(r"^## peers\n\n```text\n.* was built without CURVE", text, re.M)
    assert text.splitlines()[2].endswith(" Failed: peers.")
    assert "\n## kernel messages\n" in text
    assert ("build" in programs) == (tensorrt_name() is not None)  # TensorRT for RTX has another name


def test_a_report_does_not_name_the_machine_or_the_users_folder(report, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "box.lan")
    report.add(f"verify {Path.home()}/a\nb", f"{Path.home()}/bundle on box.lan, total-box.lan, box, 10.16.1.11\x1b[31m")
    assert (
        "## verify ~/a b\n\n```text\n~/bundle on HOST, total-box.lan, HOST, 10.16.1.11\\x1b[31m\n"
        in (tmp_path / "report.md").read_text()
    )
