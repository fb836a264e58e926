"""``ls-edge simulate``: simulate a fleet of measured devices that fail and return."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command, exit_code
from ls_edge.cli.output import print_json
from ls_edge.cli.profile_options import PROFILES, planning_inputs
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.order_costs import read_order_costs
from ls_edge.core.text import counted, show, show_hours, show_ms, show_nines, show_nines_range, show_percent
from ls_edge.evaluation.availability import Interval
from ls_edge.evaluation.simulation_summary import FleetSettings, SimulationSummary, SweepDocument, summarize_simulation
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.fleet.planning.from_profiles import problem_of
from ls_edge.runtime.fleet.simulation.site_pool import MOST_ROUNDS, process_pool, simulate_fleet
from ls_edge.runtime.fleet.simulation.sites import simulation_context, sites_of
from ls_edge.runtime.fleet.simulation.sweep import (
    Prepared,
    combinations,
    continued,
    parse_sweep,
    run_sweep,
)
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.simulator.churn import Churn
from ls_edge.runtime.source.settings import Settings, check_policy


@click.command(
    cls=Command,
    examples=(
        "ls-edge simulate --bundle bundle --profiles orin.json --devices 8 --requests 1000",
        "ls-edge simulate --bundle b --profiles a.json c.json --devices 99 --requests 5000 --rate 50",
        "ls-edge simulate --bundle b --profiles a.json --devices 9 --requests 999 --churn up=5m,down=9s",
    ),
)
@PROFILES
@options.count("--devices", "Number of devices.", most=1_000_000, required=True)
@options.count("--requests", "Images to answer, at all sites together.", required=True)
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
@options.count("--seeds", "Runs of each combination of --sweep, with different seeds.", most=1000, default=1)
@options.output("--out", "JSON of --sweep to write, or to continue.", ours="")
@options.text(
    "--churn",
    "Mean up and down times, such as up=10m,down=30s, with weights of kill, stop, hang, drain.  [default: none]",
    "SPEC",
)
@options.POLICY
@options.MAX_SKIPS
@options.BUDGET_MS
@options.count(
    "--concurrency", "Requests at the same time at a site.  [default: enough to keep it busy]", most=1_000_000
)
@options.RATE
@options.count("--replicas", "Minimum holders of a block at a site.  [default: 2, or 1 if memory is short]", most=64)
@options.count("--max-replicas", "Maximum holders of a block.  [default: as memory allows]", most=64)
@options.count("--site-size", "Maximum devices of a site, which has one source.", most=64, default=16)
@options.count("--batch", "Largest engine call.", most=1024)
@options.SEED
@options.count("--jobs", "Processes that share the sites.  [default: one per core]", most=256)
@options.REPORT
@options.JSON
def command(
    bundle: Path,
    devices: int,
    requests: int,
    until: float | None,
    sweep: tuple[str, ...],
    seeds: int,
    out: Path | None,
    churn: str | None,
    policy: str,
    max_skips: int | None,
    budget_ms: float,
    concurrency: int | None,
    rate: float | None,
    replicas: int | None,
    site_size: int,
    seed: int,
    jobs: int | None,
    report: Path | None,
    as_json: bool,
    **inputs: Any,
) -> int:
    """Simulate a fleet of devices that fail and return.

    Runs the routing of peers and sources in simulated time, with devices and links as fast as they were measured.
    Devices form sites of --site-size, planned for throughput. The source of a site submits the next image when one is
    answered, or at random times with --rate. No engine runs, so the result has no accuracy. The same flags give the
    same result, with any --jobs.

    Exit code 3 if an answer skipped blocks or a request failed, 1 if none was answered.
    """
    opened = Bundle.open(bundle)
    costs = read_order_costs(opened.manifest.order_costs, opened.num_blocks)
    problem, assumptions = problem_of(opened, planning_inputs(**inputs, objective="throughput"))
    given = {
        "devices": devices,
        "requests": requests,
        "rate": rate,
        "replicas": replicas,
        "policy": policy,
        "max-skips": max_skips,
        "budget-ms": budget_ms,
        "concurrency": concurrency,
        "site-size": site_size,
    }

    def prepare(values: Mapping[str, str]) -> Prepared:
        """Plan the sites, with some options replaced."""
        own = {**given, **_typed(values)}
        check_policy(opened, find_policy(own["policy"]), costs)
        asked = Settings(policy=own["policy"], budget_ms=own["budget-ms"], max_skips=own["max-skips"], seed=seed)
        written = _churn_with(churn, values)
        losses = None if written is None else Churn.parse(written)
        settings = FleetSettings(
            devices=own["devices"],
            requests=own["requests"],
            policy=own["policy"],
            max_skips=asked.skips_of(opened.num_blocks),
            budget_ms=asked.budget_ms,
            replicas=own["replicas"],
            concurrency=own["concurrency"],
            rate=own["rate"],
            seed=seed,
            outage_s=0.0 if losses is None else losses.outage_s,
            until=until,
        )
        sites, assumed = sites_of(problem, settings, site_size=own["site-size"], churn=losses, costs=costs)
        all_assumed = [*assumptions, *assumed]
        return Prepared(
            sites,
            simulation_context(sites, bundle_id=opened.manifest.bundle_id, churn=written, assumptions=all_assumed),
        )

    cores = jobs or len(os.sched_getaffinity(0))
    if sweep:
        if until is not None:
            raise UsageError("--sweep has --seeds instead of --until; leave --until out")
        asked_for = {**given, **inputs, "churn": churn, "seed": seed, "bundle": opened.manifest.bundle_id}
        document = SweepDocument(parse_sweep(sweep, [*given, "up", "down"]), seeds, str(sorted(asked_for.items())), [])
        if out is not None:
            document = continued(document, out)
        prepared = [prepare(values) for values in combinations(document.sweep)]
        with StepProgress("simulate") as progress, process_pool(cores) as pool:
            document = run_sweep(
                document, prepared, path=out, executor=pool, on_step=lambda done, total: progress(done, total, "cells")
            )
        if report is not None:
            from ls_edge.report.html import write_sweep

            write_sweep(report, document)
        if as_json:
            print_json(document)
        else:
            _print_sweep(document)
        answered, all_of = (
            sum(getattr(cell.summary, key) for cell in document.cells) for key in ("answered", "requests")
        )
        return exit_code(answered, all_of - answered)
    began = time.monotonic()
    with StepProgress("simulate") as progress:
        progress(0, requests, "planning the sites")
        sites, context = prepare({})
        most = len(sites) if until is None else len(sites) * MOST_ROUNDS
        with process_pool(min(most, cores)) as pool:
            outcomes = simulate_fleet(sites, pool, lambda done, total: progress(done, total, "requests"))
    summary = summarize_simulation(outcomes, context)
    if report is not None:
        from ls_edge.report.html import write_simulation

        write_simulation(report, summary, outcomes)
    if as_json:
        print_json(summary)
    else:
        _print(summary, time.monotonic() - began)
        if report is not None:
            click.echo(f"written to {report}")
    return exit_code(summary.answered, summary.degraded + summary.failed)


def _typed(values: Mapping[str, str]) -> dict[str, Any]:
    """Return values of ``--sweep`` as the options of the same names would read them."""
    context = click.get_current_context()
    types = {param.opts[0].removeprefix("--"): param for param in context.command.params}
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in types:
            try:
                found[key] = types[key].type_cast_value(context, value)
            except click.BadParameter as error:
                raise UsageError(f"--sweep {key}={value}: {error.message}") from None
    return found


def _churn_with(churn: str | None, values: Mapping[str, str]) -> str | None:
    """Return the text of ``--churn`` with the times of ``--sweep``."""
    times = {key: values[key] for key in ("up", "down") if key in values}
    others = [piece for piece in (churn or "").split(",") if piece and piece.partition("=")[0].strip() not in times]
    return ",".join([*(f"{key}={value}" for key, value in times.items()), *others]) or None


def _print_sweep(document: SweepDocument) -> None:
    table = PlainTable.of(
        *(f">{key}" for key in document.sweep),
        ">whole answers", "interval", ">outages", ">answered", ">p50", ">p99", ">images / s",
    )  # fmt: skip
    for cell in document.cells:
        one = cell.summary
        table.add_row(
            *cell.values.values(),
            show_nines(one.whole_share.share),
            show_nines_range(one.whole_share.low, one.whole_share.high),
            f"{one.whole_share.outages:,}",
            show_nines(one.answered_share.share),
            show_ms(one.latency_ms.p50),
            show_ms(one.latency_ms.p99),
            show(one.throughput),
        )
    console = open_console()
    print_table(table, console)
    warned = [cell for cell in document.cells if cell.summary.warnings]
    if warned:
        names = ", ".join(f"{key}={value}" for key, value in warned[0].values.items())
        console.print(
            f"warning: {counted(len(warned), 'row')} of {len(document.cells)} uncertain, such as {names}: "
            f"{warned[0].summary.warnings[0]}",
            style="yellow",
        )


def _print(summary: SimulationSummary, took_s: float) -> None:
    latency, losses = summary.latency_ms, summary.losses
    intervals, answered = summary.latency_intervals_ms, summary.answered_share
    times = {
        name: show_ms(getattr(latency, name)) + _range(intervals.get(name), show_ms)
        for name in ("p50", "p95", "p99", "max")
    }
    most = counted(summary.skips.max or 0, "block")
    console = open_console()
    console.print(f"{summary.answer}.")
    for line in summary.warnings:
        console.print(f"warning: {line}", style="yellow")
    rows = {
        "devices": f"{summary.devices:,} at {counted(summary.sites, 'site')}",
        "answered": f"{summary.answered:,} of {summary.requests:,}: {show_nines(answered.share)} "
        f"({show_nines_range(answered.low, answered.high)})",
        "failed": f"{summary.failed:,}{_kinds(summary.errors)}",
        "degraded": f"{summary.degraded:,}" + (f", at most {most} skipped" if summary.skips.max else ""),
        "throughput": show(summary.throughput, " / s") + _range(summary.throughput_interval, show),
        "latency": ", ".join(f"{name} {value}" for name, value in times.items()),
        "hops": f"{show(summary.hops)} per answer, {counted(summary.retries, 'retry', 'retries')}",
        "devices lost": f"{losses.count:,}{_kinds(losses.by_kind)}",
        "devices up": show_percent(losses.up_share),
    }
    for name, one in summary.profiles.items():
        rows[f"busy: {name}"] = f"{show_percent(one.busy)} of {counted(one.devices, 'device')}"
    print_table(PlainTable.of_facts(rows.items()), console)
    console.print(f"{show_hours(summary.seconds / 3600)} of simulated time, computed in {took_s:.1f} s")
    for line in summary.assumptions:
        console.print(f"assumed: {line}")


def _range(interval: Interval | None, shown: Callable[[float], str]) -> str:
    return "" if interval is None else f" ({shown(interval.low)} to {shown(interval.high)})"


def _kinds(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {kind}' for kind, count in counts.items())})" if counts else ""
