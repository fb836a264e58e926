"""Chart of a simulated fleet: outcome of its requests over time, and devices that were up."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np

from ls_edge.evaluation.run_summary import Floats
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, SiteOutcome
from ls_edge.report.charts.specification import Chart, chart_of, row_of, tooltip_of
from ls_edge.report.formatting import counted, show_percent
from ls_edge.report.theme import color

_BINS = 96
_STATES = ((WHOLE, "answered whole", "accent"), (DEGRADED, "degraded", "warn"), (FAILED, "failed", "bad"))


def outcomes_over_time(outcomes: Sequence[SiteOutcome]) -> Chart:
    """Draw the requests that ended in each bin of simulated time by outcome, above the fraction of devices up."""
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
    scale = alt.Scale(domain=[0.0, float(edges[-1])], nice=False)
    x = alt.X("at:Q", scale=scale, title="seconds since the first submission of a site, simulated")
    bars = (
        chart_of(rows)
        .mark_rect()
        .encode(
            x=x,
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
        .properties(width=820, height=200)
    )
    up = _up_shares(outcomes, edges)
    line = (
        chart_of([row_of(at=at, up=share) for at, share in zip(edges[:-1], up, strict=True)])
        .mark_line(color=color("good"), interpolate="step-after", strokeWidth=1.6)
        .encode(
            x=x,
            y=alt.Y(
                "up:Q",
                title="devices up",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format=".0%", values=[0, 0.5, 1]),
            ),
            tooltip=[tooltip_of("at", "at, s"), alt.Tooltip("up:Q", title="devices up", format=".1%")],
        )
        .properties(width=820, height=90)
    )
    became = ", ".join(f"{int((states == state).sum()):,} {name}" for state, name, _ in _STATES)
    return alt.vconcat(bars, line, spacing=14).properties(
        description=f"{counted(len(states), 'request')} over {last:.3g} simulated seconds: {became}. Between "
        f"{show_percent(float(up.min()))} and {show_percent(float(up.max()))} of the devices were up."
    )


def _up_shares(outcomes: Sequence[SiteOutcome], edges: Floats) -> Floats:
    """Return the fraction of devices up at the start of each bin, over the sites that still have requests."""
    up, used = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for outcome in outcomes:
        running = edges[:-1] <= outcome.seconds
        times = np.array([at for at, _ in outcome.up])
        counts = np.array([count for _, count in outcome.up])
        up += running * counts[np.searchsorted(times, edges[:-1], side="right") - 1]
        used += running * outcome.used
    shares: Floats = up / np.maximum(used, 1)
    return shares
