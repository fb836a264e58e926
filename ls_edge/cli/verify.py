"""``ls-edge verify``: digests and files of a bundle and, with its run, its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ls_edge.cli import Command

if TYPE_CHECKING:
    from ls_edge.bundle import Bundle


@click.command(cls=Command, short_help="Check a bundle's digests and, with its run, its numbers.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--run", type=click.Path(path_type=Path), help="The run it was exported from: compare with PyTorch too.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def command(bundle: Path, run: Path | None, as_json: bool) -> None:
    """Check that the files of the folder BUNDLE are those of its manifest and load; with --run, that they compute it.

    Every file that was changed, is missing or belongs to another bundle is named; exit code 1 then.
    """
    from ls_edge.bundle import Bundle
    from ls_edge.export.files import check_files, checked_with, raise_problems

    opened = Bundle.open(bundle)
    reports = check_files(opened)
    broken = any(report.problem for report in reports)
    numbers = _numbers(opened, run) if run is not None and not broken else None
    document = {
        "bundle": str(bundle),
        "bundle_id": opened.manifest.bundle_id,
        "model_id": opened.manifest.model_id,
        "ok": not broken,
        "checked_with": checked_with(),
        "parts": [
            {"part": report.part, "file": report.file, "ok": report.problem is None, "problem": report.problem}
            for report in reports
        ],
        "numbers": numbers,
    }
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
    else:
        _print(document)
    raise_problems(opened, reports)


def _numbers(bundle: Bundle, run: Path) -> dict[str, Any]:
    from ls_edge.errors import UsageError

    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError("--run needs torch; install it with pip install 'ls-edge[export]'") from None
    from ls_edge.export.verify import verify_run
    from ls_edge.training.checkpoint import load_run

    return verify_run(bundle, load_run(run)).to_json()


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    parts, numbers = document["parts"], document["numbers"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("[bold]bundle[/bold]", f"{document['bundle']}  ({document['bundle_id'][:12]})")
    good = sum(part["ok"] for part in parts)
    table.add_row("[bold]files[/bold]", f"{good} of {len(parts)} in order ({', '.join(document['checked_with'])})")
    for part in parts:
        if not part["ok"]:
            table.add_row("", f"[red]{part['part']}[/red]  {part['file']}")
    if numbers is not None:
        table.add_row(
            "[bold]numbers[/bold]",
            f"within {numbers['max_rel_error']:.1e} of {numbers['reference']} (bar {numbers['bar']:.0e})",
        )
    Console(soft_wrap=True).print(table)
