"""Charts of latency, of outcomes over time, and of compared values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from ls_edge.core.peer_reports import PeerState
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.core.text import NOTHING, counted, shorten, show_hours, show_ms
from ls_edge.evaluation.run_summary import Floats, Quantiles
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, SiteOutcome
from ls_edge.report.charts.specification import (
    MOST_MARKS,
    MOST_POINTS,
    ZOOM,
    chart_of,
    expression,
    label,
    row_of,
    tooltip_of,
    wide_legend,
)
from ls_edge.report.runs.statistics import RunData
from ls_edge.report.theme import Chart, color

_HEIGHT = 260
FAR = 4.0
"""Multiple of the 95th percentile beyond which a latency would squeeze all others into a few bars."""


def latency_histogram(values: Floats, quantiles: Quantiles) -> Chart | None:
    """Draw a histogram of latencies in ms, and the median, 95th, and 99th percentile.

    Outliers are counted but not drawn; otherwise, all other answers would share one bar.
    """
    if not values.size:
        return None
    p95, most = float(np.quantile(values, 0.95)), float(values.max())
    limit = max(1.05 * p95, p95 + 1.5 * (p95 - float(values.min()))) if most > FAR * p95 else most
    drawn = values[values <= limit]
    scale = _latency_scale(drawn, from_zero=False)
    low, high = scale.domain
    bins = int(min(64, max(8, 2 * drawn.size**0.5)))
    edges = np.geomspace(low, high, bins + 1) if scale.type == "log" else np.linspace(low, high, bins + 1)
    counts, _ = np.histogram(np.clip(drawn, low, high), edges)
    above = len(values) - len(drawn)
    beyond = f"; not drawn: {counted(above, 'answer')} up to {show_ms(most)}" if above else ""
    x = alt.X("at:Q", scale=scale, title=f"latency, ms{beyond}")
    bars = (
        chart_of([row_of(at=a, to=b, answers=int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)])
        .mark_rect(color=color("accent"), stroke=color("bg"), strokeWidth=1)
        .encode(
            x=x,
            x2=alt.X2("to:Q"),
            y=alt.Y("answers:Q", title="answers", scale=alt.Scale(domain=[0, max(int(counts.max()), 4) * 1.3])),
            y2=alt.Y2Datum(0),
            tooltip=[tooltip_of("at", "from, ms"), tooltip_of("to", "to, ms"), alt.Tooltip("answers:Q")],
        )
    )
    return alt.layer(bars, *_quantile_marks(quantiles, x, high)).properties(
        width="container",
        height=_HEIGHT,
        description=f"Histogram of {counted(len(values), 'answer')}. Median {show_ms(quantiles.p50)}, "
        f"95th percentile {show_ms(quantiles.p95)}, 99th percentile {show_ms(quantiles.p99)}, "
        f"largest {show_ms(quantiles.max)}{beyond}.",
    )


def _quantile_marks(quantiles: Quantiles, x: alt.X, high: float) -> list[Chart]:
    """Draw the median, 95th, and 99th percentile, with labels in different rows, so that they do not overlap.

    A percentile above ``high`` is drawn at the right end, with an arrow.
    """
    found = {"p50": quantiles.p50 or 0.0, "p95": quantiles.p95 or 0.0, "p99": quantiles.p99 or 0.0}
    rows = [
        row_of(at=min(value, high), level=level, text=f"{name} {show_ms(value)}{' →' * (value > high)}")
        for level, (name, value) in enumerate(found.items())
    ]
    marks = chart_of(rows).encode(x=x)
    dashed = {"color": color("ink"), "strokeDash": [3, 3], "y": expression("4 + 16 * datum.level"), "y2": _HEIGHT}
    return [marks.mark_rule(**dashed), label(marks, "at", y="9 + 16 * datum.level", turn=0.6, dx=5)]


def latency_over_time(data: RunData) -> Chart | None:
    """Draw the latency of each answer by time of submission, and the changes of peers.

    Of more than :data:`MOST_POINTS` answers, draw every second, third or later one.
    """
    if not data.records:
        return None
    degraded = [record for record in data.answers if record.degraded]
    scale = _latency_scale(np.array([record.latency_us / 1e3 for record in data.records]), room=1.25)
    x = alt.X(
        "t:Q",
        title="submitted, seconds since the start",
        scale=alt.Scale(domain=[data.start_ms / 1e3, data.end_ms / 1e3], nice=False),
    )
    y = alt.Y("ms:Q", title="latency, ms", scale=scale)
    tips = [
        alt.Tooltip("request:N"),
        alt.Tooltip("image:N"),
        tooltip_of("ms", "latency, ms"),
        tooltip_of("t", "submitted, s"),
    ]
    events = data.changes[:MOST_MARKS]
    layers: list[alt.Chart] = []

    def mark(records: Sequence[RequestRecord], **look: Any) -> None:
        """Draw each request as a point, unless there are none: an empty layer has scales without an extent."""
        if records:
            rows = [
                row_of(t=r.submitted_us / 1e6, ms=r.latency_us / 1e3, request=r.id, image=shorten(r.image, 40))
                for r in records
            ]
            layers.append(chart_of(rows).mark_point(clip=True, **look).encode(x=x, y=y, tooltip=tips))

    whole = [record for record in data.answers if not record.degraded]
    mark(
        whole[:: -(-len(whole) // MOST_POINTS) or 1],
        shape="circle",
        filled=True,
        color=color("accent"),
        size=22,
        opacity=0.6,
    )
    for records, shape, paint in ((degraded, "triangle-up", "warn"), (data.failed, "cross", "bad")):
        mark(
            records[:: -(-len(records) // MOST_MARKS) or 1], shape=shape, color=color(paint), fill=color(paint), size=42
        )
    layers += _changes(events, x)
    changed = " ".join(f"{_event_text(event)} at {event.at_us / 1e6:.2f} s." for event in events[:20])
    return (
        alt.layer(*layers)
        .add_params(alt.selection_interval(name="zoom", bind="scales", encodings=["x"], zoom=ZOOM))
        .properties(
            width="container",
            height=_HEIGHT,
            description=f"{counted(len(data.answers), 'answer')}, {len(degraded)} degraded, {len(data.failed)} failed. "
            f"{changed or 'No peer changed.'}",
        )
    )


def _changes(events: Sequence[PeerEvent], x: alt.X) -> list[alt.Chart]:
    """Draw the changes of peers."""
    if not events:
        return []
    kinds = {PeerState.LOST: "lost", PeerState.ALIVE: "back"}
    rows = [
        row_of(
            t=event.at_us / 1e6,
            text=_event_text(event),
            kind=kinds.get(event.state, "other change"),
            why=shorten(event.why, 80) or NOTHING,
        )
        for event in events
    ]
    kind = alt.Color(
        "kind:N",
        title="a peer",
        legend=wide_legend(),
        scale=alt.Scale(domain=["lost", "back", "other change"], range=[color("bad"), color("good"), color("axis")]),
    )
    tip = [alt.Tooltip("text:N", title="peer"), tooltip_of("t", "at, s"), alt.Tooltip("why:N")]
    return [chart_of(rows).mark_rule(strokeWidth=1.3, clip=True).encode(x=x, color=kind, tooltip=tip)]


def _event_text(event: PeerEvent) -> str:
    return f"{shorten(event.peer, 18)} {'back' if event.state == PeerState.ALIVE else event.state.value}"


def _latency_scale(values: Floats, *, from_zero: bool = True, room: float = 1.05) -> alt.Scale:
    """Return a scale up to ``room`` times the largest value; it is logarithmic if that is far above the median."""
    low, high, middle = float(values.min()), float(values.max()), float(np.median(values))
    if low > 0 and high > 5 * middle:
        return alt.Scale(type="log", domain=[low / 1.12, high * max(room, 1.12)], nice=False)
    if not from_zero and low > 0.4 * high > 0:
        margin = max(high - low, 0.05 * high) * 0.12
        return alt.Scale(type="linear", domain=[low - margin, high + margin], nice=False)
    return alt.Scale(type="linear", domain=[0.0, high * room if high > 0 else 1.0], nice=False)


_BINS = 96
_STATES = ((WHOLE, "answered whole", "accent"), (DEGRADED, "degraded", "warn"), (FAILED, "failed", "bad"))


def outcomes_over_time(outcomes: Sequence[SiteOutcome]) -> Chart:
    """Draw the outcomes of requests in bins of simulated time."""
    last = max(outcome.seconds for outcome in outcomes)
    edges = np.linspace(0.0, last or 1.0, _BINS + 1)
    ended = np.concatenate([outcome.submitted_s + outcome.latency_s for outcome in outcomes])
    states = np.concatenate([outcome.states for outcome in outcomes])
    rows = []
    below = np.zeros(_BINS, dtype=int)
    for state, name, _ in _STATES:
        counts, _ = np.histogram(ended[states == state], edges)
        rows += [
            row_of(at=a, to=b, low=int(low), high=int(low + n), requests=int(n), what=name)
            for a, b, low, n in zip(edges, edges[1:], below, counts, strict=False)
            if n
        ]
        below += counts
    became = ", ".join(f"{int((states == state).sum()):,} {name}" for state, name, _ in _STATES)
    return (
        chart_of(rows)
        .mark_rect()
        .encode(
            x=alt.X(
                "at:Q",
                scale=alt.Scale(domain=[0.0, float(edges[-1])], nice=False),
                title="seconds since the beginning of a site, simulated",
            ),
            x2=alt.X2("to:Q"),
            y=alt.Y("low:Q", title="requests that ended", scale=alt.Scale(domain=[0, max(int(below.max()), 1)])),
            y2=alt.Y2("high:Q"),
            color=alt.Color(
                "what:N",
                title=None,
                scale=alt.Scale(domain=[n for _, n, _ in _STATES], range=[color(paint) for _, _, paint in _STATES]),
            ),
            tooltip=[tooltip_of("at", "from, s"), alt.Tooltip("what:N"), alt.Tooltip("requests:Q")],
        )
        .properties(
            width="container",
            height=200,
            description=f"{counted(len(states), 'request')} over {show_hours(last / 3600)} simulated: {became}.",
        )
    )
