"""Simulated fleets as terminal output."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console

from ls_edge.core.text import counted, show, show_hours, show_ms, show_nines, show_nines_range, show_percent
from ls_edge.evaluation.availability import Interval
from ls_edge.evaluation.simulation_summary import Cell, SimulationSummary, SweepDocument
from ls_edge.report.terminal import PlainTable, print_table


def sweep_answer(document: SweepDocument) -> str:
    """Return a sentence about the combinations with the most and the fewest whole answers, and if it may be chance."""

    def said(cell: Cell) -> str:
        whole, values = cell.summary.whole_share, ", ".join(f"{key}={value}" for key, value in cell.values.items())
        return f"{values}: {show_nines(whole.share)} ({show_nines_range(whole.low, whole.high)})"

    worst, *_, best = sorted([*document.cells, document.cells[0]], key=lambda cell: cell.summary.whole_share.share)
    lowest, highest = worst.summary.whole_share, best.summary.whole_share
    if lowest.share == highest.share:
        low = min(cell.summary.whole_share.low for cell in document.cells)
        return (
            f"{show_nines(lowest.share)} of the requests get a whole answer with each combination; the widest 95 % "
            f"interval begins at {show_nines(low)}."
        )
    chance = " The intervals overlap: this may be chance." if lowest.high >= highest.low else ""
    return f"Most requests get a whole answer with {said(best)}; fewest with {said(worst)}.{chance}"


def print_sweep(document: SweepDocument, console: Console) -> None:
    """Print the conclusion and a row for each combination."""
    console.print(sweep_answer(document))
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
    print_table(table, console)
    warned = [cell for cell in document.cells if cell.summary.warnings]
    if warned:
        names = ", ".join(f"{key}={value}" for key, value in warned[0].values.items())
        console.print(
            f"warning: {counted(len(warned), 'row')} of {len(document.cells)} uncertain, such as {names}: "
            f"{warned[0].summary.warnings[0]}; a sweep has no --until, so give it more --requests or --seeds",
            style="yellow",
        )


def print_simulation(summary: SimulationSummary, console: Console) -> None:
    """Print the conclusion and the numbers behind it."""
    latency, losses = summary.latency_ms, summary.losses
    intervals, answered = summary.latency_intervals_ms, summary.answered_share
    times = {
        name: show_ms(getattr(latency, name)) + _range(intervals.get(name), show_ms)
        for name in ("p50", "p95", "p99", "max")
    }
    most = counted(summary.skips.max or 0, "block")
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
    if summary.top1 is not None:
        accuracy = show_percent(summary.top1) + _range(summary.top1_interval, show_percent)
        rows["accuracy"] = f"{accuracy} of {counted(summary.executed, 'order')} that ran, each on another image"
    for name, one in summary.profiles.items():
        rows[f"busy: {name}"] = f"{show_percent(one.busy)} of {counted(one.devices, 'device')}"
        if one.watts is not None:
            lasts = "" if one.battery_h is None else f", {show_hours(one.battery_h)} of battery"
            rows[f"power: {name}"] = f"{show(one.watts, ' W')}{lasts}"
    if summary.energy_mj is not None:
        rows["energy"] = show(summary.energy_mj, " mJ per answer")
    if summary.link_bytes:
        link, carried = max(summary.link_bytes.items(), key=lambda item: item[1])
        total = sum(summary.link_bytes.values())
        rows["busiest link"] = f"{link}: {show(carried / 1e6, ' MB')} of {show(total / 1e6, ' MB')} at a site"
    print_table(PlainTable.of_facts(rows.items()), console)
    console.print(f"simulated time: {show_hours(summary.seconds / 3600)} in the longest run of a site")
    for line in summary.assumptions:
        console.print(f"assumed: {line}")


def _range(interval: Interval | None, shown: Callable[[float], str]) -> str:
    return "" if interval is None else f" ({shown(interval.low)} to {shown(interval.high)})"


def _kinds(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {kind}' for kind, count in counts.items())})" if counts else ""
