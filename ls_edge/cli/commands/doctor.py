"""``ls-edge doctor``: check what this machine, or every peer, needs to run ls-edge."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.descriptor_limit import require_descriptors
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.logs import set_up
from ls_edge.core.peers_file import load_peers
from ls_edge.device.diagnostics import examine, worst
from ls_edge.engines.diagnostics import check_engines
from ls_edge.report.formatting import counted
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.protocol.messages import FindingRow
from ls_edge.runtime.transport.keys import load_secret

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command(
    cls=Command,
    examples=(
        "ls-edge doctor",
        "ls-edge doctor --json",
        "ls-edge doctor --peers peers.yaml --secret-key laptop.key_secret",
    ),
)
@options.path("--peers", "peers.yaml whose peers to check instead of this machine.")
@options.path("--secret-key", "NAME.key_secret of a source, with --peers.")
@options.wait("Time for a peer to answer.", default=180.0, least=0.1, most=600)
@options.JSON
def command(*, peers: Path | None, secret_key: Path | None, wait: float, as_json: bool) -> int:
    """Find what is missing or misconfigured on this machine.

    Checks Python, packages, engines, links, and hardware, and names the fix of each problem. With --peers, every peer
    checks its own machine, and one table shows the problems.

    Exit code 1 if ls-edge cannot work here or on some peer, or if a peer does not answer.
    """
    if peers is not None:
        return _ask_peers(peers, secret_key, wait, as_json=as_json)
    if secret_key is not None:
        raise UsageError("--secret-key is for asking peers; give --peers FILE too, or leave it out")
    with open_console(stderr=True).status("checking this machine", spinner="line"):
        findings = examine(check_engines)
    status = worst(findings)
    if as_json:
        document = {"status": status, "findings": [dataclasses.asdict(finding) for finding in findings]}
        click.echo(json.dumps(document, indent=1))
        return 1 if status == "bad" else 0
    table = PlainTable.of("", "what", "found", "fix", box=None)
    for finding in findings:
        table.add_row(_mark(finding.status), finding.what, finding.detail, finding.fix or "")
    print_table(table)
    return 1 if status == "bad" else 0


def _ask_peers(peers: Path, secret_key: Path | None, wait: float, *, as_json: bool) -> int:
    """Ask every peer, and print one table or document."""
    file = load_peers(peers)
    set_up(as_json=False, level=50)  # the table shows what peers report
    require_descriptors(file)
    with (
        open_console(stderr=True).status("the peers check their machines", spinner="line"),
        Observer(file, keys=None if secret_key is None else load_secret(secret_key)) as observer,
    ):
        found = observer.inspect(wait)
    status = {name: "bad" if isinstance(rows, str) else _worst(rows) for name, rows in found.items()}
    overall = max(status.values(), key=_rank)
    if as_json:
        document = {name: _entry(status[name], rows) for name, rows in found.items()}
        click.echo(json.dumps({"status": overall, "peers": document}, indent=1))
        return 1 if overall == "bad" else 0
    table = PlainTable.of("peer", "", "what", "found", "fix", box=None)
    for name, rows in found.items():
        if isinstance(rows, str):
            table.add_row(printable(name), _mark("bad"), "link", printable(rows), "ls-edge status shows more")
            continue
        good = sum(row.status == "ok" for row in rows)
        table.add_row(printable(name), _mark("ok"), counted(good, "check"), "in order", "")
        for row in rows:
            if row.status != "ok":
                table.add_row(printable(name), _mark(row.status), *map(printable, (row.what, row.detail, row.fix)))
    print_table(table)
    return 1 if overall == "bad" else 0


def _entry(status: str, rows: Sequence[FindingRow] | str) -> dict[str, object]:
    """Return the JSON of one peer."""
    if isinstance(rows, str):
        return {"status": status, "reason": rows, "findings": []}
    found = [{"status": row.status, "what": row.what, "detail": row.detail, "fix": row.fix or None} for row in rows]
    return {"status": status, "reason": None, "findings": found}


def _rank(status: str) -> int:
    """Return the severity of a status; an unknown one counts as a warning."""
    return {"ok": 0, "bad": 2}.get(status, 1)


def _worst(rows: Sequence[FindingRow]) -> str:
    return max((row.status for row in rows), key=_rank, default="ok")


def _mark(status: str) -> Text:

    return Text(printable(status), style=_COLOURS.get(status, ""))
