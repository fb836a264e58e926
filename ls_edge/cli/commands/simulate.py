"""``ls-edge simulate``: what a fleet of devices like those that were measured would do, while some come and go."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.profile_options import planning_inputs, profile_options
from ls_edge.core.bundle import Bundle
from ls_edge.core.files import check_writable
from ls_edge.core.order_costs import read_order_costs
from ls_edge.device.requirements import require_report
from ls_edge.evaluation.simulation_summary import SimulationSummary, summarise_simulation
from ls_edge.report.formatting import NOTHING, counted, show, show_ms, show_percent
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.fleet.planning.from_profiles import problem_of
from ls_edge.runtime.fleet.simulation.churn import Churn
from ls_edge.runtime.fleet.simulation.fleet import FleetSettings, simulate_sites, simulation_context, sites_of
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.source.settings import Settings, check_policy


@click.command(
    cls=Command,
    examples=(
        "ls-edge simulate --bundle bundle --profiles orin.json --devices 8 --requests 1000",
        "ls-edge simulate --bundle b --profiles a.json c.json --devices 99 --requests 5000 --rate 50",
        "ls-edge simulate --bundle b --profiles a.json --devices 9 --requests 999 --churn up=5m,down=9s",
    ),
)
@profile_options
@options.count("--devices", "Number of devices.", most=1_000_000, required=True)
@options.count("--requests", "Images to answer, at all sites together.", required=True)
@click.option(
    "--churn",
    metavar="SPEC",
    help="Mean up and down times, such as up=10m,down=30s, with weights of kill, stop, hang, drain.  [default: none]",
)
@options.POLICY
@options.MAX_SKIPS
@options.BUDGET_MS
@options.count(
    "--concurrency", "Requests at the same time at a site.  [default: enough to keep it busy]", most=1_000_000
)
@click.option(
    "--rate",
    type=options.Number(0, 10**9, min_open=True),
    metavar="IMAGES",
    help="Images per second in all, at random times.  [default: the next when one ends]",
)
@options.count("--replicas", "Minimum holders of a block at a site.  [default: 2, or 1 if memory is short]", most=64)
@options.count("--max-replicas", "Maximum holders of a block.  [default: as memory allows]", most=64)
@options.count(
    "--site-size", "Maximum devices of a site, which has one source.", most=64, default=16, show_default=True
)
@options.count("--batch", "Largest engine call.", most=1024)
@options.SEED
@options.count("--jobs", "Processes that share the sites.  [default: one per core]", most=256)
@options.REPORT
@options.JSON
def command(
    bundle: Path, devices: int, requests: int, churn: str | None, policy: str, max_skips: int | None,
    budget_ms: float, concurrency: int | None, rate: float | None, replicas: int | None, max_replicas: int | None,
    site_size: int, batch: int | None, seed: int, jobs: int | None, report: Path | None, as_json: bool,
    **measured: Any,
) -> int:  # fmt: skip
    """Simulate a fleet of devices that fail and return.

    Runs the routing of peers and sources in simulated time, with devices and links as fast as they were measured.
    Devices form sites of --site-size, planned for throughput. The source of a site submits the next image when one is
    answered, or at random times with --rate. No engine runs, so the result has no accuracy. The same flags give the
    same result, whatever --jobs.

    Exit code 3 if an answer skipped blocks or a request failed, 1 if none was answered.
    """
    if report is not None:
        check_writable(report)
        require_report("--report")
    opened = Bundle.open(bundle)
    costs = read_order_costs(opened.manifest.order_costs, opened.num_blocks)
    check_policy(opened, POLICIES[policy], costs)
    asked = Settings(policy=policy, budget_ms=budget_ms, max_skips=max_skips, seed=seed)
    settings = FleetSettings(
        devices=devices, requests=requests, policy=policy, max_skips=asked.skips_of(opened.num_blocks),
        budget_s=asked.budget_ms / 1e3, replicas=replicas, concurrency=concurrency, rate=rate, site_size=site_size,
        churn=None if churn is None else Churn.parse(churn), seed=seed,
    )  # fmt: skip
    inputs = planning_inputs(**measured, max_replicas=max_replicas, objective="throughput", batch=batch)
    problem, assumptions = problem_of(opened, inputs)
    began = time.monotonic()
    with StepProgress("simulate") as progress:
        progress(0, requests, "planning the sites")
        sites, assumed = sites_of(problem, settings, costs)
        outcomes = simulate_sites(
            sites, jobs or len(os.sched_getaffinity(0)), lambda done, total: progress(done, total, "requests")
        )
    context = simulation_context(
        sites, bundle_id=opened.manifest.bundle_id, churn=churn, assumptions=[*assumptions, *assumed]
    )
    summary = summarise_simulation(outcomes, context)
    if report is not None:
        from ls_edge.report.html import write_simulation

        write_simulation(report, summary, outcomes)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        _print(summary, time.monotonic() - began)
        if report is not None:
            click.echo(f"written to {report}")
    if not summary.answered:
        return 1
    return DEGRADED if summary.degraded or summary.failed else 0


def _print(summary: SimulationSummary, took_s: float) -> None:

    console = open_console()
    table = PlainTable()
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("")
    latency, skips, losses = summary.latency_ms, summary.skips, summary.losses
    most = 0 if skips.max is None else skips.max
    table.add_row("devices", f"{summary.devices:,} at {counted(summary.sites, 'site')}")
    table.add_row("answered", f"{summary.answered:,} of {summary.requests:,}")
    errors = ", ".join(f"{count:,} {kind}" for kind, count in summary.errors.items())
    table.add_row("failed", f"{summary.failed:,}" + (f" ({errors})" if errors else ""))
    table.add_row("degraded", f"{summary.degraded:,}" + (f", at most {counted(most, 'block')} skipped" if most else ""))
    table.add_row("throughput", NOTHING if summary.throughput is None else f"{show(summary.throughput)} / s")
    table.add_row(
        "latency", f"p50 {show_ms(latency.p50)}, p95 {show_ms(latency.p95)}, p99 {show_ms(latency.p99)}, "
        f"max {show_ms(latency.max)}",
    )  # fmt: skip
    table.add_row("hops", f"{show(summary.hops)} an answer, {counted(summary.retries, 'retry', 'retries')}")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in losses.by_kind.items())
    table.add_row("devices lost", f"{losses.count:,}" + (f" ({kinds})" if kinds else ""))
    table.add_row("devices up", show_percent(losses.up_share))
    for name, one in summary.profiles.items():
        table.add_row(f"busy: {name}", f"{show_percent(one.busy)} of {counted(one.devices, 'device')}")
    print_table(table, console)
    console.print(f"{summary.seconds:.3g} simulated seconds in {took_s:.1f} s", highlight=False)
    for line in summary.assumptions:
        console.print(f"assumed: {line}", soft_wrap=True, markup=False, highlight=False)
