"""``ls-edge simulate``: simulate a fleet of measured devices that fail and return."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ls_edge.api.simulation import SWEPT, Fleet, SimulationSettings, check_grid
from ls_edge.cli import options, source_options
from ls_edge.cli.command import Command, exit_code
from ls_edge.cli.output import print_json
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console
from ls_edge.runtime.fleet.simulation.site_pool import process_pool
from ls_edge.runtime.fleet.simulation.sweep import parse_sweep


@click.command(
    cls=Command,
    examples=(
        "ls-edge simulate --bundle bundle --profiles orin.json --devices 8 --requests 1000",
        "ls-edge simulate --bundle b --profiles a.json c.json --devices 99 --requests 5000 --rate 50",
        "ls-edge simulate --bundle b --profiles a.json --devices 9 --requests 999 --churn up=5m,down=9s",
    ),
)
@options.bundle("Folder of the exported model; or give --blocks and --tokens-bytes.")
@options.PROFILES
@options.settings(SimulationSettings)
@options.text(
    "--until",
    "Repeat until half of the 95 % interval is at most this fraction of the answers that are not whole.",
    "SHARE",
    callback=options.share_of,
)
@options.names(
    "--sweep",
    "Values of an option, such as replicas=1,2 or up=1m,1h; may be repeated for all combinations.",
    "KEY=A,B",
)
@options.output("--out", "JSON of --sweep to write, or to continue.")
@options.names(
    "--churn",
    "Mean up and down times, such as up=10m,down=30s, or a CSV of device,time,up|down; may be repeated.",
    "SPEC|FILE",
)
@options.text("--data", "Labeled images for --execute: a folder, a tar, 'digits', or a timm data set.", "DATA")
@source_options.POLICY
@options.MAX_SKIPS
@options.BUDGET_MS
@options.RATE
@options.count("--max-replicas", "Maximum holders of a block.  [default: as memory allows]", most=64)
@options.count("--batch", "Largest engine call.", most=1024)
@options.SEED
@options.count("--jobs", "Processes that share the sites.  [default: one per core]", most=256)
@options.REPORT
@options.JSON
def command(
    bundle: Path | None,
    profiles: tuple[str, ...],
    more: tuple[str, ...],
    links: Path | None,
    sweep: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    report: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Simulate a fleet of devices that fail and return.

    Runs the routing of peers and sources in simulated time, with devices and links as fast as they were measured.
    Devices form sites of --site-size, planned for throughput. The source of a site submits the next image when one is
    answered, or at random times with --rate. No engine runs, except for --execute. The same flags give the same
    result, with any --jobs.

    Exit code 3 if an answer skipped blocks or a request failed, 1 if none was answered.
    """
    grid = parse_sweep(sweep, SWEPT)
    check_grid(grid, given["seeds"], out)
    fleet = Fleet.open(bundle, (*profiles, *more), links=None if links is None else str(links), **given)
    is_one = not grid and fleet.asked.until is None and fleet.asked.devices <= fleet.asked.site_size
    with (
        StepProgress("simulate") as progress,
        process_pool(1 if is_one else jobs or len(os.sched_getaffinity(0))) as pool,
    ):
        if grid:
            document = fleet.sweep(grid, out, pool, progress)
        else:
            progress(0, fleet.asked.requests, "planning the sites")
            summary, outcomes = fleet.simulate(pool, progress)
    found = document if grid else summary
    try:
        if report is not None:
            from ls_edge.report.html import write_simulation, write_sweep

            if grid:
                write_sweep(report, document)
            else:
                write_simulation(report, summary, outcomes)
    finally:
        if as_json:
            print_json(found)
        else:
            found.show(open_console())
    if report is not None and not as_json:
        click.echo(f"written to {report}")
    summaries = [cell.summary for cell in document.cells] if grid else [summary]
    return exit_code(sum(one.answered for one in summaries), sum(one.degraded + one.failed for one in summaries))
