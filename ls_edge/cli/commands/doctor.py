"""``ls-edge doctor``: check what this machine, or every peer, needs to run ls-edge."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.board_report import TITLE, write_report
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import peers_to_ask
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import counted
from ls_edge.device.diagnostics import examine, worst
from ls_edge.engines.diagnostics import check_engines
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.clients.status import Observer

_COLORS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command(
    cls=Command,
    examples=(
        "ls-edge doctor",
        "ls-edge doctor --json",
        "ls-edge doctor --peers peers.yaml --secret-key laptop.key_secret",
        "ls-edge doctor --report report.md --bundle bundle",
    ),
)
@options.path("--peers", "peers.yaml whose peers to check instead of this machine.")
@options.secret_key("NAME.key_secret of a source, with --peers.")
@options.wait("Time for a peer to answer.", default=180.0, least=0.1, most=600)
@options.output("--report", "Report on this machine to write, from all commands on --bundle.", ours=TITLE)
@options.bundle("Folder of the exported model for --report.")
@options.text("--data", "Images for --report.  [default: none]", "DATA")
@options.JSON
def command(
    *,
    peers: Path | None,
    secret_key: Path | None,
    wait: float,
    report: Path | None,
    bundle: Path | None,
    data: str | None,
    as_json: bool,
) -> int:
    """Find what is missing or misconfigured on this machine.

    Checks Python, packages, engines, links, and hardware, and names the fix of each problem. With --peers, every peer
    checks its own machine, and one table shows the problems, including peers without a link to each other.

    --report collects facts about the machine, runs doctor, verify, build, and bench, compares each part with the
    bundle's reference, then runs two peers on this machine, apply, and run. It writes the output to one file, which is
    complete after each section: a report to send from a new kind of board.

    Exit code 1 if ls-edge cannot work here or on some peer, or if a peer does not answer.
    """
    if report is not None:
        if bundle is None:
            raise UsageError("--report runs the commands on a model; give --bundle FOLDER")
        if as_json or peers is not None:
            raise UsageError("--report is text about this machine; leave out --json and --peers")
        images = str(Path(data).resolve()) if data is not None and Path(data).exists() else data
        worked = write_report(report, Bundle.open(bundle), images)
        click.echo(f"written to {report}; please read it before you send it: it names this machine's hardware")
        return 0 if worked else 1
    if data is not None:
        raise UsageError("--data has the images of a report; give --report FILE too, or leave it out")
    if peers is None:
        if options.is_typed("secret_key"):
            raise UsageError("--secret-key is for asking peers; give --peers FILE too, or leave it out")
        status, document, table = _here()
    else:
        status, document, table = _on_peers(peers, secret_key, wait)
    if as_json:
        print_json(document)
    else:
        print_table(table)
    return 1 if status == "bad" else 0


def _here() -> tuple[str, dict[str, Any], PlainTable]:
    """Check this machine; return the worst status, the JSON, and the table."""
    with open_console(stderr=True).status("checking this machine", spinner="line"):
        findings = examine(check_engines)
    table = PlainTable("", "what", "found", "fix", box=None)
    for finding in findings:
        table.add_row(_mark(finding.status), finding.what, finding.detail, finding.fix or "")
    status = worst(findings)
    return status, {"status": status, "findings": [dataclasses.asdict(finding) for finding in findings]}, table


def _on_peers(peers: Path, secret_key: Path | None, wait: float) -> tuple[str, dict[str, Any], PlainTable]:
    """Ask every peer; return the worst status, the JSON, and the table."""
    file, keys = peers_to_ask(peers, secret_key)
    with (
        open_console(stderr=True).status("the peers check their machines", spinner="line"),
        Observer(file, keys=keys) as observer,
    ):
        found = observer.inspect(wait)
    table = PlainTable("peer", "", "what", "found", "fix", box=None)
    entries: dict[str, dict[str, Any]] = {}
    for name, rows in found.items():
        if isinstance(rows, str):
            entries[name] = {"status": "bad", "reason": rows, "findings": []}
            table.add_row(printable(name), _mark("bad"), "link", rows, "ls-edge status shows more")
            continue
        status = max((row.status for row in rows), key=_rank, default="ok")
        findings = [
            {"status": row.status, "what": row.what, "detail": row.detail, "fix": row.fix or None} for row in rows
        ]
        entries[name] = {"status": status, "reason": None, "findings": findings}
        good = sum(row.status == "ok" for row in rows)
        table.add_row(printable(name), _mark("ok"), counted(good, "check"), "passed", "")
        for row in rows:
            if row.status != "ok":
                table.add_row(printable(name), _mark(row.status), row.what, row.detail, row.fix)
    overall = max((entry["status"] for entry in entries.values()), key=_rank)
    return overall, {"status": overall, "peers": entries}, table


def _rank(status: str) -> int:
    """Return the severity of a status; an unknown one counts as a warning."""
    return {"ok": 0, "bad": 2}.get(status, 1)


def _mark(status: str) -> Text:
    return Text(printable(status), style=_COLORS.get(status, ""))
