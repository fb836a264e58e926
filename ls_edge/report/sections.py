"""The parts of a report that are no charts: cards of figures, tables, and the words around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ls_edge.evaluation.run_summary import RunSummary, error_type
from ls_edge.report.data import RunData
from ls_edge.report.formatting import block_ranges, counted
from ls_edge.report.svg import markup, shorten, show, show_ms, show_percent
from ls_edge.report.track_statistics import table_of, tracks_by_peer

MOST_ROWS = 60


class _Card(NamedTuple):
    name: str
    value: str
    unit: str
    below: str
    css: str = ""


def cards(summary: RunSummary) -> str:
    """The figures that matter most."""
    latency, hops = summary.latency_ms, summary.hops
    interval = summary.top1_interval
    p50, unit = show_ms(latency.p50).rsplit(" ", 1) if latency.p50 is not None else (show(None), "")
    shown = [
        _Card(
            "Accuracy",
            *_split(show_percent(summary.top1)),
            f"95 % between {show_percent(interval[0])} and {show_percent(interval[1])}" if interval else "no labels",
        ),
        _Card(
            "Median latency",
            p50,
            unit,
            f"p95 {show_ms(latency.p95)}, p99 {show_ms(latency.p99)}, max {show_ms(latency.max)}",
        ),
        _Card("Throughput", show(summary.throughput), "/ s", f"over {_seconds(summary.duration_s)}"),
        _Card(
            "Answered",
            f"{summary.answered:,}",
            "",
            f"of {summary.requests:,}, {f'{summary.failed:,}' if summary.failed else 'none'} failed",
            "bad" if summary.failed else "good",
        ),
        _Card(
            "Degraded",
            f"{summary.degraded:,}",
            "",
            f"skipped {show(summary.skips.mean)} blocks on average, {summary.skips.max} at most"
            if summary.skips.max
            else "no block was skipped",
            "warn" if summary.degraded else "good",
        ),
        _Card(
            "Order, Kendall's τ",
            f"{summary.order_tau:+.2f}" if summary.order_tau is not None else show(None),
            "",
            "1 is the trained order, 0 a random one" if summary.order_tau is not None else "no plain order to rank",
        ),
        _Card(
            "Hops",
            show(hops.mean),
            "",
            f"{show_ms(hops.wire_ms_p50)} wire, {show_ms(hops.engine_ms_p50)} engine (medians)",
        ),
        _Card(
            "Recovered",
            f"{summary.retries:,}",
            "retry" if summary.retries == 1 else "retries",
            f"{counted(summary.duplicates_dropped, 'late answer')} dropped",
        ),
    ]
    items = "".join(
        f'<div class="card"><dt>{markup(card.name)}</dt><dd class="big">{markup(card.value)}'
        + (f"<small>{markup(card.unit)}</small>" if card.unit else "")
        + f'</dd><dd class="below{f" {card.css}" if card.css else ""}">{markup(tight(card.below))}</dd></div>'
        for card in shown
    )
    return f'<dl class="cards">{items}</dl>'


def tight(text: str) -> str:
    """Keep a figure and its unit on one line."""
    return re.sub(r"(\d) (%|ms|s)(?![a-z])", "\\1\u00a0\\2", text)


def _lost(times: int) -> str:
    return "" if times == 0 else ", lost once" if times == 1 else f", lost {times} times"


def _split(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(" ")
    return value, unit


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], numeric: Sequence[int] = (), css: str = "scroll") -> str:
    def cell(tag: str, index: int, value: Any) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        right = ' class="n"' if index in numeric else ""
        return f"<{tag}{scope}{right}>{markup(value)}</{tag}>"

    top = "".join(cell("th", i, value) for i, value in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="{css}"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def peers_table(summary: RunSummary) -> str:
    """A row for each peer."""
    if not summary.peers:
        return "<p>No peer was known.</p>"
    rows = [
        (
            shorten(name, 60),
            block_ranges(peer.blocks) or show(None),
            f"{peer.requests:,}",
            f"{peer.blocks_run:,}",
            show_percent(peer.busy),
            peer.state + _lost(peer.lost),
        )
        for name, peer in summary.peers.items()
    ]
    return _table(("Peer", "Blocks", "Answers", "Blocks run", "Busy", "State"), rows, (2, 3, 4))


def tracks_table(data: RunData) -> str:
    """How each peer's tracks fared; empty where no wave was ever planned."""
    waves = data.summary.settings.get("waves")
    tracks = tracks_by_peer(data.records, waves if isinstance(waves, int) else 1)
    if not tracks:
        return ""
    head, rows = table_of(tracks, data.lanes)
    return _table(head, [[tight(cell) for cell in row] for row in rows], range(1, 6))


def happened(data: RunData) -> str:
    """Changes of the peers' state, the first of them."""
    rows = [
        (f"{event.at_us / 1e6:.3f} s", shorten(event.peer, 60), event.state, shorten(event.why, 200))
        for event in data.changes[:MOST_ROWS]
    ]
    return _table(("At", "Peer", "State", "Why"), rows, css="scroll long") + _more(len(data.changes))


def failures(data: RunData) -> str:
    """Failed requests by type, and the first of them."""
    failed = [record for record in data.records if record.error is not None]
    counts = ", ".join(f"{count:,} {shorten(name, 60)}" for name, count in data.summary.errors.items())
    rows = [
        (record.id, shorten(record.image, 60), shorten(error_type(record.error or ""), 60), shorten(record.error, 240))
        for record in failed[:MOST_ROWS]
    ]
    table = _table(("Request", "Image", "Error", "Message"), rows, css="scroll long")
    return f"<p>{markup(counts)}</p>{table}{_more(len(failed))}"


def _more(count: int) -> str:
    return f'<p class="why">And {count - MOST_ROWS:,} more.</p>' if count > MOST_ROWS else ""


def comparison_table(runs: Sequence[tuple[str, RunSummary]]) -> str:
    """A row for each run."""
    rows = [
        (
            shorten(name, 60),
            show_percent(run.top1),
            f"{run.answered:,} of {run.requests:,}",
            f"{run.degraded:,}",
            show_ms(run.latency_ms.p50),
            show_ms(run.latency_ms.p95),
            f"{show(run.throughput)} / s",
            f"{run.order_tau:+.2f}" if run.order_tau is not None else show(None),
        )
        for name, run in runs
    ]
    head = ("Run", "Accuracy", "Answered", "Degraded", "p50", "p95", "Throughput", "Order τ")
    return _table(head, rows, range(1, 8))


def settings_table(summary: RunSummary) -> str:
    """What the run was made with."""
    facts = {
        "model": summary.model,
        "training method": summary.method,
        "bundle": summary.bundle_id,
        "policy": summary.policy,
        "seed": summary.seed,
        "preprocessing, median": show_ms(summary.preprocess_ms.p50),
        **summary.settings,
    }
    rows = [(key, shorten(value, 400)) for key, value in facts.items() if value not in (None, "")]
    return _table(("Setting", "Value"), rows, css="scroll long")


def _seconds(value: float | None) -> str:
    return show(None) if value is None else show_ms(1000 * value)
