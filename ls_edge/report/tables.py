"""Tables of a run for the terminal; lines without boxes or colours where the output goes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ls_edge.core.records import PeerState, RequestRecord
from ls_edge.core.text import format_ranges
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.formatting import counted, shorten, show, show_ms, show_percent
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
SHOWN_ANSWERS = 5
"""Answers with class names at the end of a run."""
SHOWN_REASONS = 3
"""Reasons for which blocks were skipped."""


def print_summary(summary: RunSummary, console: Console | None = None, *, title: str = "") -> None:
    """Print the two tables of a run, on standard output by default."""
    console = console or open_console()
    _print(console, [summary_table(summary, title=title), peers_table(summary)])


def print_answers(records: Sequence[RequestRecord], classes: Sequence[str], console: Console | None = None) -> None:
    """Print a few answers with class names, spread evenly over the run; nothing where there are none."""
    if records:
        console = console or open_console()
        console.print()
        _print(console, [answers_table(records, classes)])


def print_comparison(
    runs: Sequence[tuple[str, RunSummary]], console: Console | None = None, *, title: str = ""
) -> None:
    """Print several named runs side by side."""
    console = console or open_console()
    _print(console, [comparison_table(runs, title=title)])


def summary_table(summary: RunSummary, *, title: str = "") -> Table:
    """What was answered, how well and how fast."""
    table = PlainTable(title)
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("")
    latency, hops = summary.latency_ms, summary.hops
    answered = Text(f"{summary.answered:,} of {summary.requests:,}")
    failed = Text(f"{summary.failed:,}", style="red" if summary.failed else "")
    if summary.errors:
        failed.append(
            " (" + ", ".join(f"{count:,} {shorten(name, 40)}" for name, count in summary.errors.items()) + ")"
        )
    degraded = Text(f"{summary.degraded:,}", style="yellow" if summary.degraded else "")
    table.add_row("answered", answered)
    table.add_row("failed", failed)
    table.add_row("degraded", degraded)
    table.add_row("accuracy", _accuracy(summary))
    quantiles = ", ".join(
        f"{name} {show_ms(value)}"
        for name, value in (("p50", latency.p50), ("p95", latency.p95), ("p99", latency.p99), ("max", latency.max))
    )
    table.add_row("latency", Text(quantiles))
    table.add_row("throughput", Text(f"{show(summary.throughput)} / s"))
    table.add_row("skipped blocks", Text(f"{show(summary.skips.mean)} on average, {_count(summary.skips.max)} at most"))
    for why, count in list(summary.skips.reasons.items())[:SHOWN_REASONS]:
        table.add_row("", Text(f"{counted(count, 'answer')}: {why}", style="yellow"))
    table.add_row(
        "hops",
        Text(
            f"{show(hops.mean)}; medians: wire {show_ms(hops.wire_ms_p50)}, queue {show_ms(hops.queue_ms_p50)}, "
            f"engine {show_ms(hops.engine_ms_p50)}, codec {show_ms(hops.codec_ms_p50)}"
        ),
    )
    table.add_row("order", Text(_order(summary)))
    if summary.retries or summary.duplicates_dropped:
        table.add_row(
            "retries",
            Text(f"{summary.retries:,}, {counted(summary.duplicates_dropped, 'late answer')} dropped", style="yellow"),
        )
    if summary.audit is not None:
        audit = summary.audit
        text = f"{audit.audited:,} answers computed again, {audit.mismatched:,} differ"
        left = audit.dropped + audit.waiting
        left_out = f"; {left:,} left out" if left else ""
        table.add_row("audit", Text(text + left_out, style="red" if audit.mismatched else ""))
    return table


def peers_table(summary: RunSummary) -> Table:
    """Each peer's part."""
    table = PlainTable()
    table.add_column("peer", no_wrap=True)
    table.add_column("blocks")
    for name in ("answers", "blocks run", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name, peer in summary.peers.items():
        state = Text(peer.state, style=STATE_STYLES[peer.state])
        if peer.lost:
            state.append(", lost once" if peer.lost == 1 else f", lost {peer.lost} times", style="red")
        table.add_row(
            Text(shorten(name, 40)),
            format_ranges(peer.blocks) or show(None),
            f"{peer.requests:,}",
            f"{peer.blocks_run:,}",
            show_percent(peer.busy),
            state,
        )
    return table


def answers_table(records: Sequence[RequestRecord], classes: Sequence[str]) -> Table:
    """Image, predicted and true class of at most :data:`SHOWN_ANSWERS` requests, spread evenly over ``records``."""
    table = PlainTable()
    for name in ("image", "prediction", "truth", ""):
        table.add_column(name, overflow="fold")
    step = max(1, (len(records) - 1) // (SHOWN_ANSWERS - 1))
    for record in records[::step][:SHOWN_ANSWERS]:
        wrong = record.label is not None and record.prediction != record.label
        if record.error is not None:
            remark = Text(shorten(record.error, 60), style="red")
        else:
            remark = Text("degraded" if record.degraded else "", style="yellow")
        table.add_row(
            Text(shorten(record.image, 50)),
            Text(_class_name(record.prediction, classes), style="red" if wrong else ""),
            Text(_class_name(record.label, classes)),
            remark,
        )
    return table


def comparison_table(runs: Sequence[tuple[str, RunSummary]], *, title: str = "") -> Table:
    """A row for each run."""
    table = PlainTable(title)
    table.add_column("run")
    for name in ("accuracy", "answered", "degraded", "failed", "p50", "p95", "throughput"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, run in runs:
        bad = run.top1 is not None and run.chance is not None and run.top1 < 3 * run.chance
        table.add_row(
            Text(shorten(name, 60)),
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
        return Text("no labels" if summary.answered else show(None))
    text = Text(show_percent(summary.top1), style="bold")
    if summary.top1_interval is not None:
        low, high = summary.top1_interval
        text.append(f" (95 %: {100 * low:.1f} to {100 * high:.1f})", style="not bold dim")
    return text


def _class_name(index: int | None, classes: Sequence[str]) -> str:
    if index is None:
        return show(None)
    return shorten(classes[index] if index < len(classes) else str(index), 40)


def _count(value: int | None) -> str:
    return show(None) if value is None else f"{value:,}"


def _order(summary: RunSummary) -> str:
    if summary.order_tau is None:
        return show(None)
    return f"tau {summary.order_tau:+.2f} (1: trained order, 0: random)"


def _print(console: Console, tables: Sequence[Table]) -> None:
    for number, table in enumerate(tables):
        table.show_header = any(str(column.header) for column in table.columns)
        if number:
            console.print()
        print_table(table, console)
