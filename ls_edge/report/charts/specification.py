"""Parts that charts share: specifications of Vega-Lite and their SVG, rows of data, scales and labels.

Encodings are objects such as ``alt.Text`` and ``alt.OpacityValue``: Altair takes 16 ms to convert each string, and each
dictionary of ``alt.value`` or ``alt.condition``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.records import PeerEvent, PeerState, RequestRecord
from ls_edge.core.text import NOTHING, shorten
from ls_edge.evaluation.run_summary import Floats
from ls_edge.report.theme import BLOCK_SCHEME, CATEGORY_SCHEME, CHART_CONFIG, color, with_plain_colors

Chart = Any
"""Altair chart; its methods have no more exact type."""

Row = dict[str, Any]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
"""Version of Vega-Lite that Altair writes."""

MOST_POINTS = 1200
"""Answers that are drawn as points; longer runs are drawn as quantiles over time, to keep pages small and fast."""

MOST_MARKS = 200
"""Degraded or failed requests, or events, that are drawn."""

MOST_TEXTS = 12
"""Rows of a square whose cells have texts."""

ZOOM = "wheel![event.shiftKey]"
"""Wheel event for zooming; without the shift key the wheel scrolls the page."""


def spec_of(chart: Chart) -> dict[str, Any]:
    """Return the specification of a chart with the shared configuration, checked by Altair's schema."""
    spec: dict[str, Any] = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding")).to_dict()
    if "vconcat" in spec or "hconcat" in spec:
        del spec["autosize"]  # the parts have widths of their own
    rows = {name: json.loads(text) for name, text in spec.pop("datasets").items()}
    return {**spec, "datasets": rows, "config": CHART_CONFIG}


def block_color(num_blocks: int, *, legend: bool = False, field: str = "block") -> alt.Color:
    """Return the color of a block by its number, or of a slot by another ``field``."""
    scale = alt.Scale(domain=list(range(num_blocks)), scheme=alt.SchemeParams(BLOCK_SCHEME, extent=[0.15, 1]))
    return alt.Color(f"{field}:O", title=field, scale=scale, legend=wide_legend(12, 6) if legend else None)


def wide_legend(columns: int = 8, narrow: int = 3) -> alt.Legend:
    """Return a legend of this many columns, or ``narrow`` columns if the chart is narrow."""
    return alt.Legend(columns=expression(f"narrow ? {narrow} : {columns}"), labelLimit=0, symbolOpacity=1)


def block_ink(num_blocks: int) -> alt.ColorValue:
    """Return the color of text on :func:`block_color`: the first blocks are dark."""
    return alt.ColorValue("black", condition={"test": f"datum.block < {0.5 * num_blocks}", "value": "white"})


def at(channel: str, value: float | str) -> Any:
    """Return a position in pixels, or a name such as ``width``, for ``x``, ``x2``, ``y`` or ``y2``."""
    kind: Any = getattr(alt, f"{channel.title()}Value")
    return kind(value)


def opacity_if(test: str, otherwise: float = 0.0) -> alt.OpacityValue:
    """Return full opacity of the marks that pass a test."""
    return alt.OpacityValue(otherwise, condition={"test": test, "value": 1})


def category_color(field: str, names: Sequence[str], *, legend: alt.Legend | None = None) -> alt.Color:
    """Return the color of a category by its name."""
    scale = alt.Scale(domain=list(names), scheme=CATEGORY_SCHEME)
    return alt.Color(field, title=None, scale=scale, legend=legend)


def names_axis(field: str, names: Sequence[str]) -> alt.Y:
    """Return an axis of names, which are truncated if the chart is narrow."""
    limit = expression("narrow ? 110 : 230")
    return alt.Y(field, title=None, sort=list(names), axis=alt.Axis(labelLimit=limit, labelColor=color("ink")))


def title_with_text(text: str, below: str) -> alt.TitleParams:
    """Return a title with a line of text below it."""
    return alt.TitleParams(text, subtitle=below, subtitleColor=color("soft"), subtitleFontSize=11)


def svg_of(chart: Chart, width: int = 880) -> str:
    """Return the chart as an SVG document with a background, light or dark as the screen."""
    import vl_convert

    spec = with_parameters(spec_of(chart), narrow=False)
    padding = {"left": 32, "right": 24, "top": 20, "bottom": 16}
    spec["config"] = {**spec["config"], "background": color("bg"), "padding": padding}
    if spec.get("width") == "container":
        spec["width"] = width
    drawing: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return f"{with_plain_colors(drawing)}\n"


def write_svg(path: str | Path, chart: Chart | None) -> None:
    """Write a chart as an SVG file; raise :class:`UsageError` if there is nothing to draw."""
    if chart is None:
        raise UsageError(f"there is nothing to draw for {path}")
    write_output(path, svg_of(chart))


def with_parameters(spec: dict[str, Any], *, narrow: bool) -> dict[str, Any]:
    """Add the parameter ``narrow``, which pages set if a chart has less than 520 pixels."""
    return {**spec, "params": [{"name": "narrow", "value": narrow}, *spec.get("params", [])]}


def chart_of(rows: list[Row]) -> alt.Chart:
    """Return a chart of rows, as one text: Altair copies a chart and everything in it at every step."""
    text = json.dumps(rows, allow_nan=False)
    chart: alt.Chart = alt.Chart(alt.InlineData(values=text, format=alt.JsonDataFormat(type="json")))
    return chart


def row_of(*, digits: int = 4, **values: Any) -> Row:
    """Return a row of data with plain numbers, rounded to keep pages small."""
    return {
        name: round(float(value), digits) if isinstance(value, (float, np.floating)) else value
        for name, value in values.items()
    }


expression: Any = alt.ExprRef  # its class is not accepted for every value


def tooltip_of(field: str, title: str) -> alt.Tooltip:
    """Return a tooltip of a number."""
    return alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")


def label(chart: alt.Chart, text: str, *, y: Any, left: bool, dx: int, bold: bool = True) -> Any:
    """Return text next to a point, aligned ``left`` or right; ``bold`` has the color of headings.

    A rim in the color of the paper keeps it legible over lines.
    """
    mark: dict[str, Any] = {"fontWeight": 600, "color": color("ink")} if bold else {}
    mark |= {"align": "left", "dx": dx} if left else {"align": "right", "dx": -dx}
    rim = chart.mark_text(**{**mark, "stroke": color("bg"), "strokeWidth": 4, "strokeJoin": "round"})
    return alt.layer(*(each.encode(y=y, text=alt.Text(text)) for each in (rim, chart.mark_text(**mark))))


def lookup_expression(values: Sequence[Any], index: str) -> str:
    """Return an expression for one of ``values``; texts become string literals."""
    return f"{json.dumps(list(values))}[{index}]"


def request_row(record: RequestRecord) -> Row:
    """Return a request as a row: seconds, milliseconds, and the text of its tooltip."""
    return row_of(
        t=record.submitted_us / 1e6, ms=record.latency_us / 1e3, request=record.id, image=shorten(record.image, 40)
    )


def event_row(event: PeerEvent, number: int) -> Row:
    """Return an event of a peer as a row."""
    kind = {PeerState.LOST: "lost", PeerState.ALIVE: "back"}.get(event.state, "other change")
    return row_of(
        t=event.at_us / 1e6, what=event_text(event), kind=kind, why=shorten(event.why, 80) or NOTHING, number=number
    )


def event_text(event: PeerEvent) -> str:
    """Return an event of a peer in a few words."""
    return f"{shorten(event.peer, 18)} {'back' if event.state == PeerState.ALIVE else event.state.value}"


def sampled(records: list[RequestRecord]) -> list[RequestRecord]:
    """Return at most :data:`MOST_MARKS` records, evenly spaced."""
    return records[:: -(-len(records) // MOST_MARKS)] if records else []


def latency_scale(values: Floats, *, from_zero: bool = True, room: float = 1.05) -> alt.Scale:
    """Return a scale that is logarithmic if the largest value is far above the median, as after a retry.

    It reaches ``room`` times the largest value.
    """
    low, high, middle = float(values.min()), float(values.max()), float(np.median(values))
    if low > 0 and high > 5 * middle:
        return alt.Scale(type="log", domain=[low / 1.12, high * max(room, 1.12)], nice=False)
    if not from_zero and low > 0.4 * high > 0:
        beside = max(high - low, 0.05 * high) * 0.12
        return alt.Scale(type="linear", domain=[low - beside, high + beside], nice=False)
    return alt.Scale(type="linear", domain=[0.0, high * room if high > 0 else 1.0], nice=False)


def position_of(value: float, scale: alt.Scale) -> float:
    """Return the position of a value on its axis, from 0 to 1."""
    low, high = scale.domain
    if scale.type == "log":
        return float(np.log(value / low) / np.log(high / low))
    return float((value - low) / (high - low))


def heat_map(
    rows: list[Row],
    row: tuple[str, str],
    column: tuple[str, str],
    columns: Sequence[str],
    *,
    size: int,
    tips: list[alt.Tooltip],
) -> Chart:
    """Return a grid of cells with a color ``paint`` of ``depth`` 0 to 1, and their ``text`` if they are large enough.

    ``row`` and ``column`` are field and title.
    """
    base = chart_of(rows).encode(
        x=alt.X(
            f"{column[0]}:O",
            title=column[1],
            sort=list(columns),
            scale=alt.Scale(domain=list(columns)),
            axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False),
        ),
        y=alt.Y(f"{row[0]}:O", title=row[1], sort=list(dict.fromkeys(cell[row[0]] for cell in rows))),
        tooltip=tips,
    )
    depth = alt.Opacity("depth:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[0, 1]))
    paint = alt.Color("paint:N", scale=None, legend=None)
    layers = [
        base.mark_rect(color=color("panel"), stroke=color("bg")),
        base.mark_rect(stroke=color("bg"), strokeWidth=1).encode(color=paint, opacity=depth),
    ]
    if size > 30:
        ink = alt.ColorValue(color("ink"), condition={"test": "datum.depth > 0.6", "value": color("bg")})
        layers.append(base.mark_text(fontSize=11, fontWeight=600).encode(text=alt.Text("text:N"), color=ink))
    return alt.layer(*layers).properties(width="container")


def square_of(
    values: Sequence[Sequence[float | None]],
    names: Sequence[str],
    titles: tuple[str, str],
    what: str,
    *,
    exponent: float = 1.0,
    digits: int = 2,
) -> Chart:
    """Draw a square of cells whose depth is the value over the largest one, to the power ``exponent``.

    ``names`` and ``titles`` are those of rows and columns.
    """
    row_title, column_title = titles
    peak = max((value for row in values for value in row if value is not None), default=1.0) or 1.0
    rows = [
        row_of(
            row=name,
            column=column,
            value=value,
            depth=0.0 if value is None else (max(0.0, value) / peak) ** exponent,
            text="" if value is None else f"{value:.{digits}f}",
            paint=color("accent"),
        )
        for name, cells in zip(names, values, strict=True)
        for column, value in zip(names, cells, strict=True)
    ]
    tips = [
        alt.Tooltip("row:O", title=row_title),
        alt.Tooltip("column:O", title=column_title),
        tooltip_of("value", what),
    ]
    size = 34 if len(names) <= MOST_TEXTS else 20
    chart = heat_map(rows, ("row", row_title), ("column", column_title), names, size=size, tips=tips)
    described = f"{what} by {row_title} and {column_title}; the largest is {peak:.3f}."
    return chart.properties(height=size * len(names), description=described)
