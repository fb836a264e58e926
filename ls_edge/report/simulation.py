"""Simulated fleets as terminal output."""

from __future__ import annotations

from rich.console import Console

from ls_edge.core.text import counted, show, show_hours, show_ms, show_percent
from ls_edge.evaluation.simulation_summary import SimulationSummary
from ls_edge.report.terminal import PlainTable, print_table


def print_simulation(summary: SimulationSummary, console: Console) -> None:
    """Print the conclusion and the numbers behind it."""
    console.print(f"{summary.answer}.")
    times = (f"{name} {show_ms(getattr(summary.latency_ms, name))}" for name in ("p50", "p95", "p99", "max"))
    errors = ", ".join(f"{count:,} {kind}" for kind, count in summary.errors.items())
    most = counted(summary.skips.max or 0, "block")
    rows = {
        "devices": f"{summary.devices:,} at {counted(summary.sites, 'site')}",
        "answered": f"{summary.answered:,} of {summary.requests:,}",
        "failed": f"{summary.failed:,}" + (f" ({errors})" if errors else ""),
        "degraded": f"{summary.degraded:,}" + (f", at most {most} skipped" if summary.skips.max else ""),
        "throughput": show(summary.throughput, " / s"),
        "latency": ", ".join(times),
        "hops": f"{show(summary.hops)} per answer, {counted(summary.retries, 'retry', 'retries')}",
        "devices lost": f"{summary.losses:,}",
        "devices up": show_percent(summary.up_share),
        **{f"busy: {name}": show_percent(share) for name, share in summary.busy.items()},
        "simulated time": show_hours(summary.seconds / 3600),
    }
    print_table(PlainTable.of_facts(rows.items()), console)
    for line in summary.assumptions:
        console.print(f"assumed: {line}")
