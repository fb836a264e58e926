"""What all charts share: specifications of Vega-Lite and their SVG, rows of data, scales and labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from ls_edge.core.records import PeerEvent, PeerState, RequestRecord
from ls_edge.evaluation.run_summary import Floats
from ls_edge.report.formatting import NOTHING, shorten
from ls_edge.report.theme import block_colour, chart_config, colour, ink_on, with_plain_colours

Chart = Any
"""A chart of Altair, whose methods have no more exact type."""

Row = dict[str, Any]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
"""Version of Vega-Lite that Altair writes for."""

MOST_POINTS = 1200
"""Answers that are drawn one by one; of more, quantiles of stretches of time. More make a larger, slower page."""

MOST_MARKS = 200
"""Degraded or failed requests, or events, that are drawn one by one."""

ZOOM = "wheel![event.shiftKey]"
"""Zooming needs the shift key, so that a page can be scrolled over its charts."""


def spec_of(chart: Chart) -> dict[str, Any]:
    """The specification of a chart with the shared configuration, valid by Altair's schema."""
    spec: dict[str, Any] = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding")).to_dict()
    if "vconcat" in spec or "hconcat" in spec:
        del spec["autosize"]  # the parts have widths of their own
    rows = {name: json.loads(text) for name, text in spec.pop("datasets").items()}
    return {**spec, "datasets": rows, "config": chart_config()}


def block_paint(num_blocks: int, *, legend: bool = False, inks: bool = False) -> alt.Color:
    """Colour of a block by its number; ``inks`` are for text on that colour."""
    colours = [block_colour(block, num_blocks) for block in range(num_blocks)]
    return alt.Color(
        "block:O",
        title="block",
        scale=alt.Scale(domain=list(range(num_blocks)), range=list(map(ink_on, colours)) if inks else colours),
        legend=alt.Legend(columns=12) if legend else None,
    )


def names_axis(field: str, names: Sequence[str]) -> alt.Y:
    """An axis of names, cut where the chart is narrow."""
    limit = expression("narrow ? 130 : 230")
    return alt.Y(field, title=None, sort=list(names), axis=alt.Axis(labelLimit=limit, labelColor=colour("ink")))


def title_with_text(text: str, below: str) -> alt.TitleParams:
    """A title with a line of text below it."""
    return alt.TitleParams(text, subtitle=below, subtitleColor=colour("soft"), subtitleFontSize=11)


def svg_of(chart: Chart, width: int = 880) -> str:
    """The chart as an SVG document, on paper of its own; light or dark as its reader's screen is."""
    import vl_convert

    spec = with_parameters(spec_of(chart), narrow=False)
    spec["config"]["background"] = colour("bg")
    spec["config"]["padding"] = {"left": 32, "right": 24, "top": 20, "bottom": 16}
    if spec.get("width") == "container":
        spec["width"] = width
    drawing: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return f"{with_plain_colours(drawing)}\n"


def with_parameters(spec: dict[str, Any], *, narrow: bool) -> dict[str, Any]:
    """The specification with the parameter ``narrow``, which is set where a chart has less than 520 pixels."""
    return {**spec, "params": [{"name": "narrow", "value": narrow}, *spec.get("params", [])]}


def chart_of(rows: list[Row]) -> alt.Chart:
    """A chart of rows, which Altair carries as one text: it copies a chart, and all that is in it, at every step."""
    text = json.dumps(rows, allow_nan=False)
    chart: alt.Chart = alt.Chart(alt.InlineData(values=text, format=alt.JsonDataFormat(type="json")))
    return chart


def row_of(*, digits: int = 4, **values: Any) -> Row:
    """A row of data: plain numbers, rounded so that a page stays small."""
    return {
        name: round(float(value), digits) if isinstance(value, (float, np.floating)) else value
        for name, value in values.items()
    }


def expression(text: str) -> Any:
    """A Vega expression in place of a value."""
    return alt.ExprRef(text)


def tooltip_of(field: str, title: str) -> alt.Tooltip:
    """A tooltip of a number."""
    return alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")


def label_with_halo(chart: alt.Chart, text: str, *, bold: bool = True, y: Any, **options: Any) -> Any:
    """Text on a chart; ``bold`` is in the ink of headings."""
    mark: dict[str, Any] = {"fontWeight": 600, "color": colour("ink")} if bold else {}
    return chart.mark_text(**mark, **options).encode(y=y, text=text)


def lookup_expression(values: Sequence[Any], index: str) -> str:
    """An expression for one of ``values``, whose texts are string literals."""
    return f"{json.dumps(list(values))}[{index}]"


def request_row(record: RequestRecord) -> Row:
    """A request as a row of data: seconds, milliseconds, and what its tooltip shows."""
    return row_of(
        t=record.submitted_us / 1e6, ms=record.latency_us / 1e3, request=record.id, image=shorten(record.image, 40)
    )


def event_row(event: PeerEvent, number: int) -> Row:
    """An event of a peer as a row of data."""
    kind = {PeerState.LOST: "lost", PeerState.ALIVE: "back"}.get(event.state, "other")
    return row_of(
        t=event.at_us / 1e6, what=event_text(event), kind=kind, why=shorten(event.why, 80) or NOTHING, number=number
    )


def event_text(event: PeerEvent) -> str:
    """An event of a peer in a few words."""
    return f"{shorten(event.peer, 18)} {'back' if event.state == PeerState.ALIVE else event.state.value}"


def sampled(records: list[RequestRecord]) -> list[RequestRecord]:
    """Every n-th record, at most :data:`MOST_MARKS` of them."""
    return records[:: -(-len(records) // MOST_MARKS)] if records else []


def latency_scale(values: Floats, *, from_zero: bool = True, room: float = 1.05) -> alt.Scale:
    """By ratio where the largest is far from the median, so that one retry does not flatten everything else.

    ``room`` is how far the scale reaches above the largest.
    """
    low, high, middle = float(values.min()), float(values.max()), float(np.median(values))
    if low > 0 and high > 5 * middle:
        return alt.Scale(type="log", domain=[low / 1.12, high * max(room, 1.12)], nice=False)
    if not from_zero and low > 0.4 * high > 0:
        beside = max(high - low, 0.05 * high) * 0.12
        return alt.Scale(type="linear", domain=[low - beside, high + beside], nice=False)
    return alt.Scale(type="linear", domain=[0.0, high * room if high > 0 else 1.0], nice=False)


def position_of(value: float, scale: alt.Scale) -> float:
    """Where on its axis a value stands, from 0 to 1."""
    low, high = scale.domain
    if scale.type == "log":
        return float(np.log(value / low) / np.log(high / low))
    return float((value - low) / (high - low))
