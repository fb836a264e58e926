"""Report of a board: all commands and measurements that a new kind of board needs, in one file.

The file is complete after each section: it is replaced as a whole, so it can be sent whenever the report ends. Each
section has a time limit; when it ends, the processes of the section are killed and the report continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ls_edge.cli.command import DEGRADED
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, LsEdgeError, printable
from ls_edge.core.files import write_output
from ls_edge.data.frame_source import visible_name
from ls_edge.device.child import module_command
from ls_edge.device.facts import facts, kernel_messages
from ls_edge.engines.tensorrt.build import tensorrt_name
from ls_edge.report.terminal import open_console
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.version import __version__

TITLE = "# Hardware report"
LIMITS_S = {"build": 5400.0, "errors": 5400.0}
"""Time limits of sections that build engines of a whole model, in seconds."""
LIMIT_S = 900.0
"""Time limit of every other section, in seconds: the longest takes two minutes on a slow laptop."""

_END_S = 20.0
"""Seconds for a peer to leave, more than it takes to drain and to free the memory of a GPU."""


class BoardReport:
    """Sections of a report, and the file that holds them."""

    def __init__(self, path: Path, place: Path) -> None:
        """Write the title, before any work is done; commands run in ``place``."""
        self._path, self._place = path, place
        self._sections: list[str] = []
        self.failed: list[str] = []
        self._console = open_console(stderr=True)
        self._write()

    def add(self, title: str, text: str, note: str = "") -> None:
        """Add a section without the names of this machine and its user's folder, and write the file."""
        text, host = f"{' '.join(title.splitlines())}\n{text}", socket.gethostname()
        for name, shown in ((os.path.expanduser("~"), "~"), (host, "HOST"), (host.partition(".")[0], "HOST")):
            if len(name) > 1:
                text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
        title, *lines = (printable(line.rstrip()) for line in text.splitlines())
        self._sections.append("\n".join([f"## {title}\n\n{note}```text", *lines, "```\n"]))
        self._write()

    def run(self, *words: str) -> None:
        """Add the output of a command of ls-edge."""
        self.program(f"ls-edge {shlex.join(map(visible_name, words))}", words[0], (*module_command("ls_edge"), *words))

    def program(self, title: str, name: str, command: Sequence[str]) -> None:
        """Add the output of a program, even if it fails or is stopped at its time limit."""
        self._console.print(title)
        began, limit, stopped = time.monotonic(), LIMITS_S.get(name, LIMIT_S), ""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(  # noqa: S603  our own interpreter and arguments
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._place,
                start_new_session=True,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                stopped = f", stopped at its limit of {limit:.0f} s"
            except BaseException:
                stopped = ", interrupted"
                raise
            finally:
                if stopped:
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                if code not in (0, DEGRADED):
                    self.failed.append(name)
                output.seek(0)
                text = output.read().decode(errors="replace")
                self.add(title, text, f"Exit code {code}, {time.monotonic() - began:.1f} s{stopped}.\n\n")

    def _write(self) -> None:
        names = f" Failed: {', '.join(self.failed)}." if self.failed else ""
        write_output(self._path, "\n".join([f"{TITLE}\n\nls-edge {__version__}.{names}\n", *self._sections]))


def write_report(path: Path, bundle: Bundle, data: str | None) -> bool:
    """Run all sections on this board, and write their output; return whether all of them worked."""
    folder = str(bundle.folder.resolve())
    with tempfile.TemporaryDirectory(prefix="ls-edge-") as temporary:
        report = BoardReport(path, Path(temporary))
        for subject, text in facts():
            report.add(subject, text)
        report.run("doctor")
        report.run("verify", folder)
        if tensorrt_name() is not None:
            report.run("build", folder)
        report.program("errors of parts", "errors", (*module_command("ls_edge.engines.board_numbers"), folder))
        report.run("bench", folder)
        report.run("bench", folder, "--out", "profile.json", "--json")
        try:
            _run_fleet(report, Path(temporary), bundle, data)
        except LsEdgeError as error:  # without CURVE, for example
            report.failed.append("peers")
            report.add("peers", str(error))
        report.add("kernel messages", kernel_messages())
    return not report.failed


def _run_fleet(report: BoardReport, place: Path, bundle: Bundle, data: str | None) -> None:
    """Push the model to two peers of this machine, classify images, and add the logs of the peers."""
    blocks, folder = range(bundle.num_blocks), str(bundle.folder.resolve())
    cluster = LocalCluster(
        place, folder, {"a": blocks, "b": blocks}, each={"threads": None}, sources=["here"], keys=True, stores=True
    )
    to = ("--peers", "peers.yaml", "--secret-key", "here.key_secret")
    try:
        with cluster:
            with contextlib.suppress(LinkError):  # the log says why
                cluster.wait_settled()
            report.run("apply", "peers.yaml", "--yes", *to, "--bundle", folder)
            report.run("status", *to)
            if data is not None:
                report.run("run", *to, "--bundle", folder, "--data", data, "--limit", "100", "--json")
            for name in cluster.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    cluster.terminate(name, _END_S)
    finally:
        for name, peer in cluster.processes.items():
            with contextlib.suppress(OSError):
                log = cluster.log_path(name).read_text(encoding="utf-8", errors="replace")
                report.add(f"log of peer {name}", log, f"Exit code {peer.returncode}.\n\n")
