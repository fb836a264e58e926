"""Tables of runs, for terminals and pages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ls_edge.core.peer_reports import PeerState
from ls_edge.core.text import NOTHING, counted, format_ranges, shorten, show, show_ms, show_percent
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.terminal import PlainTable, open_console, print_table

STATE_STYLES = {
    PeerState.ALIVE: "green",
    PeerState.COLD: "yellow",
    PeerState.SUSPECT: "yellow",
    PeerState.STUCK: "red",
    PeerState.DRAINING: "cyan",
    PeerState.LOST: "red",
    PeerState.REFUSED: "red",
    PeerState.SILENT: "red",
    PeerState.UNKNOWN: "dim",
}
SHOWN_REASONS = 3


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print the tables of a run."""
    console = console or open_console()
    print_table(summary_table(summary), console)
    console.print()
    print_table(peers_table(summary), console)


def summary_table(summary: RunSummary) -> Table:
    """Return a table of the answers, their accuracy, and their speed."""
    latency, hops, skips = summary.latency_ms, summary.hops, summary.skips
    failed = Text(f"{summary.failed:,}", style="red" if summary.failed else "")
    if summary.errors:
        kinds = ", ".join(f"{count:,} {shorten(name, 40)}" for name, count in summary.errors.items())
        failed.append(f" ({kinds})")
    most = NOTHING if skips.max is None else f"{skips.max:,}"
    rows: list[tuple[str, RenderableType]] = [
        ("answered", f"{summary.answered:,} of {summary.requests:,}"),
        ("failed", failed),
        ("degraded", Text(f"{summary.degraded:,}", style="yellow" if summary.degraded else "")),
        ("accuracy", _accuracy(summary)),
        (
            "latency",
            f"p50 {show_ms(latency.p50)}, p95 {show_ms(latency.p95)}, p99 {show_ms(latency.p99)}, "
            f"max {show_ms(latency.max)}",
        ),
        ("throughput", f"{show(summary.throughput)} / s"),
        ("skipped blocks", f"{show(skips.mean)} on average, {most} at most"),
        *(
            ("", Text(f"{counted(count, 'answer')}: {why}", style="yellow"))
            for why, count in list(skips.reasons.items())[:SHOWN_REASONS]
        ),
        (
            "hops",
            f"{show(hops.mean)} per answer; medians per hop: wire {show_ms(hops.wire_ms_p50)}, "
            f"queue {show_ms(hops.queue_ms_p50)}, engine {show_ms(hops.engine_ms_p50)}, "
            f"codec {show_ms(hops.codec_ms_p50)}",
        ),
    ]
    if summary.retries or summary.duplicates_dropped:
        dropped = f"{summary.retries:,}, {counted(summary.duplicates_dropped, 'late answer')} dropped"
        rows.append(("retries", Text(dropped, style="yellow")))
    if summary.audit is not None:
        audit = summary.audit
        left_out = f"; {audit.dropped + audit.waiting:,} left out" if audit.dropped + audit.waiting else ""
        text = f"{counted(audit.audited, 'answer')} recomputed, {audit.mismatched:,} differ{left_out}"
        rows.append(("audit", Text(text, style="red" if audit.mismatched else "")))
    return PlainTable.of_facts(rows)


def peers_table(summary: RunSummary) -> Table:
    """Return a table of the work of each peer."""
    table = PlainTable("peer", "blocks", ">answers", ">blocks run", ">busy", "state")
    for name, peer in summary.peers.items():
        state = Text(peer.state, style=STATE_STYLES[peer.state])
        if peer.lost:
            state.append(", lost once" if peer.lost == 1 else f", lost {peer.lost} times", style="red")
        blocks = format_ranges(peer.blocks) or NOTHING
        table.add_row(
            shorten(name, 40), blocks, f"{peer.requests:,}", f"{peer.blocks_run:,}", show_percent(peer.busy), state
        )
    return table


def comparison_table(runs: Sequence[tuple[str, RunSummary]]) -> Table:
    """Return a table with a row for each run."""
    numbers = (">accuracy", ">answered", ">degraded", ">failed", ">p50", ">p95", ">throughput")
    table = PlainTable("run", *numbers)
    for name, run in runs:
        bad = run.top1 is not None and run.chance is not None and run.top1 <= run.chance < 1
        table.add_row(
            shorten(name, 60),
            Text(show_percent(run.top1), style="red" if bad else "bold"),
            f"{run.answered:,} of {run.requests:,}",
            Text(f"{run.degraded:,}", style="yellow" if run.degraded else ""),
            Text(f"{run.failed:,}", style="red" if run.failed else ""),
            show_ms(run.latency_ms.p50),
            show_ms(run.latency_ms.p95),
            f"{show(run.throughput)} / s",
        )
    return table


def _accuracy(summary: RunSummary) -> Text:
    if summary.top1 is None:
        return Text("no labels" if summary.answered else NOTHING)
    text = Text(show_percent(summary.top1), style="bold")
    if summary.top1_interval is not None:
        low, high = summary.top1_interval
        text.append(f" (95 % CI {100 * low:.1f} to {100 * high:.1f}", style="not bold dim")
        repeated = 0 < summary.images < summary.answered
        of = f"; {summary.answered:,} answers, {counted(summary.images, 'image')})" if repeated else ")"
        text.append(of, style="not bold dim")
    return text
