"""``ls-edge simulate``: simulate a fleet of measured devices that fail and return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ls_edge.api.simulation import SimulationSettings, simulate_sites
from ls_edge.cli import options, source_options
from ls_edge.cli.command import Command, exit_code
from ls_edge.cli.output import print_json
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console


@click.command(
    cls=Command,
    examples=(
        "ls-edge simulate --bundle b --profiles a.json --devices 8 --requests 1000",
        "ls-edge simulate --bundle b --profiles a --devices 9 --requests 99 --rate 5",
        "ls-edge simulate --bundle b --profiles a --devices 9 --requests 9 --rate 1",
    ),
)
@options.BUNDLE
@options.PROFILES
@options.settings(SimulationSettings)
@source_options.POLICY
@options.RATE
@options.SEED
@options.REPORT
@options.JSON
def command(
    bundle: Path,
    profiles: tuple[str, ...],
    more: tuple[str, ...],
    run: Path | None,
    report: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Simulate a fleet of devices that fail and return.

    Runs the routing of peers and sources in simulated time, with devices and links as fast as they were measured. Up
    to 16 devices form a site with its own source, planned for throughput. The source submits the next image when one
    is answered, or at random times with --rate. No engine runs. The same flags give the same result.

    Exit code 3 if an answer skipped blocks or a request failed, 1 if none was answered.
    """
    with StepProgress("simulate") as progress:
        found, outcomes = simulate_sites(
            bundle, (*profiles, *more), progress, run=None if run is None else str(run), **given
        )
    try:
        if report is not None:
            from ls_edge.report.html import write_simulation

            write_simulation(report, found, outcomes)
    finally:
        if as_json:
            print_json(found)
        else:
            found.show(open_console())
    if report is not None and not as_json:
        click.echo(f"written to {report}")
    return exit_code(found.answered, found.degraded + found.failed)
