"""``ls-edge doctor``: check what this machine needs to run ls-edge."""

from __future__ import annotations

import click

from ls_edge.cli.command import Command


@click.command(
    cls=Command,
    examples=(
        "ls-edge doctor",
        "ls-edge doctor --json",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(*, as_json: bool) -> int:
    """Check Python, packages, engines, links and hardware, and name what fixes each problem.

    Ends with 1 where ls-edge cannot work here, else with 0.
    """
    import dataclasses
    import json

    from rich.text import Text

    from ls_edge.cli.diagnostics import examine, worst
    from ls_edge.report.terminal import PlainTable, open_console, print_table

    with open_console(stderr=True).status("checking this machine", spinner="line"):
        findings = examine()
    status = worst(findings)
    if as_json:
        document = {"status": status, "findings": [dataclasses.asdict(finding) for finding in findings]}
        click.echo(json.dumps(document, indent=1))
        return 1 if status == "bad" else 0
    colours = {"ok": "green", "warn": "yellow", "bad": "red"}
    table = PlainTable(box=None)
    for column in ("", "what", "found", "fix"):
        table.add_column(column)
    for finding in findings:
        mark = Text(finding.status, style=colours[finding.status])
        table.add_row(mark, finding.what, finding.detail, finding.fix or "")
    print_table(table)
    return 1 if status == "bad" else 0
