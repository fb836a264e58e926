"""``ls-edge verify``: check the files of a bundle and, with its run, its outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import note_account, print_json, warn
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.text import short_id
from ls_edge.device.requirements import require_import
from ls_edge.report.bundle import shown
from ls_edge.report.terminal import PlainTable, print_table


@click.command(cls=Command, examples=("ls-edge verify bundle", "ls-edge verify bundle --run run --data digits --json"))
@click.argument("bundle", type=options.FILE)
@options.path("--run", "Run it was exported from, to compare with PyTorch.", metavar="RUN")
@options.choice("--engine", options.ENGINES, "Engine to compare with the bundle's reference outputs.")
@options.text("--data", "Images to compare on with --run, instead of generated ones.", "DATA")
@options.JSON
def command(bundle: Path, run: Path | None, engine: EngineKind | None, data: str | None, as_json: bool) -> None:
    """Check the files of a bundle, with --engine the engines, and with --run the outputs against PyTorch.

    Checks that every file in the folder BUNDLE matches the manifest and loads. If one was changed, is missing, or
    belongs to another bundle, names it and ends with exit code 1.
    """
    from ls_edge.export.file_checks import check_files, checked_with, compare_engines, raise_problems

    if data is not None and run is None:
        raise UsageError("--data compares with PyTorch and needs --run RUN as well")
    opened = Bundle.open(bundle)
    reports = check_files(opened)
    broken = any(report.problem for report in reports)
    compared = [] if engine is None or broken else [compare_engines(opened, engine)]
    numbers, account = (None, None) if run is None or broken else _numbers(opened, run, data)
    document = {
        "bundle": printable(bundle),
        "bundle_id": opened.manifest.bundle_id,
        "model_id": opened.manifest.model_id,
        "ok": not broken,
        "checked_with": [*checked_with(), *compared],
        "parts": [
            {"part": report.part, "file": report.file, "ok": report.problem is None, "problem": report.problem}
            for report in reports
        ],
        "numbers": numbers,
        "account": account,
    }
    if as_json:
        print_json(document)
    else:
        _print(document)
    raise_problems(opened, reports)


def _numbers(bundle: Bundle, run: Path, data: str | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the results of the comparison, and the account of its images."""
    require_import("--run", ("torch",), "export")
    from ls_edge.export.calibration import read_calibration
    from ls_edge.export.verify import verify_run
    from ls_edge.training.runs.checkpoint import load_run

    loaded = load_run(run)
    if data is None:
        return verify_run(bundle, loaded).to_json(), None
    found = read_calibration(data, loaded.record.image, loaded.record.classes, on_warning=warn)
    numbers = verify_run(bundle, loaded, found.held_out, data).to_json()
    note_account(found.account)
    return numbers, found.account


def _print(document: dict[str, Any]) -> None:
    parts, numbers = document["parts"], document["numbers"]
    good = sum(part["ok"] for part in parts)
    facts: list[tuple[str, str | Text]] = [
        ("bundle", f"{document['bundle']}  ({short_id(document['bundle_id'])})"),
        ("files", f"{good} of {len(parts)} valid ({', '.join(document['checked_with'])})"),
    ]
    wrong = (part for part in parts if not part["ok"])
    facts += [("", Text.assemble((part["part"], "red"), f"  {printable(part['file'])}")) for part in wrong]
    facts += [] if numbers is None else [("numbers", shown(numbers))]
    print_table(PlainTable.of_facts(facts))
