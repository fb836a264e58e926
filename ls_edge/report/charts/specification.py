"""Common elements of charts: Vega-Lite specifications and their SVG, rows of data, scales, and labels.

Encodings are objects such as ``alt.Text`` and ``alt.OpacityValue``, because Altair takes 16 ms to convert each string
and each dictionary from ``alt.value`` or ``alt.condition``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.text import distinct_names, shorten, show_percent
from ls_edge.report.theme import BLOCK_SCHEME, CATEGORY_SCHEME, CHART_CONFIG, Chart, color, with_plain_colors

Row = dict[str, Any]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
"""Version of Vega-Lite that Altair writes."""

MOST_POINTS = 1200
"""Maximum number of answers drawn as points; of longer runs, every second, third or later one is drawn."""

MOST_MARKS = 200
"""Maximum number of degraded requests, of failed requests, and of events that are drawn."""

MOST_TEXTS = 12
"""Maximum number of rows in a grid whose cells have text."""


PERCENT = alt.Axis(labelExpr="format(100 * datum.value, '.0f') + ' %'", grid=True, values=[0, 0.25, 0.5, 0.75, 1])
"""Axis that shows fractions as :func:`ls_edge.core.text.show_percent` does, without decimals."""

ZOOM = "wheel![event.shiftKey]"
"""Wheel event for zooming; without the shift key, the wheel scrolls the page."""


def spec_of(chart: Chart) -> dict[str, Any]:
    """Return the specification of a chart with the common configuration, validated by Altair's schema."""
    spec: dict[str, Any] = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding")).to_dict()
    if "hconcat" in spec:
        del spec["autosize"]  # the concatenated charts have their own widths
    rows = {name: json.loads(text) for name, text in spec.pop("datasets").items()}
    return {**spec, "datasets": rows, "config": CHART_CONFIG}


def block_color(num_blocks: int, *, legend: bool = False, field: str = "block") -> alt.Color:
    """Return the color of a block by number, or of a slot if ``field`` is another one."""
    scale = alt.Scale(domain=list(range(num_blocks)), scheme=alt.SchemeParams(BLOCK_SCHEME, extent=[0.15, 1]))
    return alt.Color(f"{field}:O", title=field, scale=scale, legend=wide_legend(12, 6) if legend else None)


def wide_legend(columns: int = 8, narrow: int = 3) -> alt.Legend:
    """Return a legend with ``columns``, or with ``narrow`` columns if the chart is narrow."""
    return alt.Legend(columns=expression(f"narrow ? {narrow} : {columns}"), labelLimit=0, symbolOpacity=1)


def category_color(field: str, names: Sequence[str], *, legend: alt.Legend | None = None) -> alt.Color:
    """Return the color of a category by its name."""
    scale = alt.Scale(domain=list(names), scheme=CATEGORY_SCHEME)
    return alt.Color(field, title=None, scale=scale, legend=legend)


def title_with_text(text: str, *below: str) -> alt.TitleParams:
    """Return a title with lines of text below it."""
    return alt.TitleParams(text, subtitle=list(below), subtitleColor=color("soft"), subtitleFontSize=11)


def svg_of(chart: Chart) -> str:
    """Return the chart as an SVG document with a background, which follows light and dark mode."""
    import vl_convert

    spec = with_parameters(spec_of(chart), narrow=False)
    padding = {"left": 32, "right": 24, "top": 20, "bottom": 16}
    spec["config"] = {**spec["config"], "background": color("bg"), "padding": padding}
    if spec.get("width") == "container":
        spec["width"] = 880
    drawing: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return f"{with_plain_colors(drawing)}\n"


def write_svg(path: str | Path, chart: Chart | None) -> None:
    """Write a chart as an SVG file; raise :class:`UsageError` if there is nothing to draw."""
    if chart is None:
        raise UsageError(f"there is nothing to draw for {path}")
    write_output(path, svg_of(chart))


def with_parameters(spec: dict[str, Any], *, narrow: bool) -> dict[str, Any]:
    """Add the parameter ``narrow``, which pages set for charts of less than 520 pixels."""
    return {**spec, "params": [{"name": "narrow", "value": narrow}, *spec.get("params", [])]}


def chart_of(rows: list[Row]) -> Chart:
    """Return a chart of rows, which are stored as one string, because Altair deep-copies a chart at every step."""
    text = json.dumps(rows, allow_nan=False)
    return alt.Chart(alt.InlineData(values=text, format=alt.JsonDataFormat(type="json")))


def row_of(*, digits: int = 4, **values: Any) -> Row:
    """Return a row of data with plain numbers, rounded so that pages stay small."""
    return {
        name: round(float(value), digits) if isinstance(value, (float, np.floating)) else value
        for name, value in values.items()
    }


expression: Any = alt.ExprRef  # typed Any: Altair does not accept the class everywhere


def tooltip_of(field: str, title: str) -> alt.Tooltip:
    """Return a tooltip of a number."""
    return alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")


def label(chart: Chart, field: str, *, y: str, turn: float, dx: int, bold: bool = True) -> Chart:
    """Return labels of points at height ``y``, on the left of points beyond the fraction ``turn`` of the width.

    ``field`` is the field on the x-axis. Labels that are ``bold`` have the color of headings. An outline in the
    background color keeps text legible over lines.
    """
    right = f"scale('x', datum.{field}) < {turn} * width"
    mark: dict[str, Any] = {
        "align": expression(f"{right} ? 'left' : 'right'"),
        "dx": expression(f"{right} ? {dx} : -{dx}"),
        "y": expression(y),
        **({"fontWeight": 600, "color": color("ink")} if bold else {}),
    }
    rim = chart.mark_text(**{**mark, "stroke": color("bg"), "strokeWidth": 4, "strokeJoin": "round"})
    return alt.layer(*(each.encode(text=alt.Text("text:N")) for each in (rim, chart.mark_text(**mark))))


def names_axis(field: str, names: Sequence[str]) -> alt.Y:
    """Return an axis of names, which are truncated if the chart is narrow."""
    limit = expression("narrow ? 110 : 230")
    return alt.Y(field, title=None, sort=list(names), axis=alt.Axis(labelLimit=limit, labelColor=color("ink")))


def distinct_labels(names: Sequence[str], limit: int) -> list[str]:
    """Return distinct names of at most ``limit`` characters; names are numbered if they would otherwise be equal."""
    if len(set(names)) < len(names):
        names = distinct_names(names)
    short = [shorten(name, limit) for name in names]
    if len(set(short)) < len(short):
        short = [shorten(f"{number} {name}", limit) for number, name in enumerate(names, 1)]
    return short


def accuracy_chart(
    rows: list[Row], height: int, *, kinds: Sequence[str] = (), chance: float | None = None, bars: bool = False
) -> Chart | None:
    """Draw accuracies with 95 % intervals and text, and the accuracy of a guess; return None without rows.

    A row has ``name``, ``top1``, ``low``, ``high``, ``text``, and ``answers``, and either the color ``paint`` or a
    ``kind``.
    """
    if not rows:
        return None
    names = list(dict.fromkeys(row["name"] for row in rows))
    room = 8 * max(len(row["text"]) for row in rows)
    scale = alt.Scale(domain=[0, 1], nice=False, rangeMax=expression(f"width - {room}"))
    x = alt.X("top1:Q", title=None, scale=scale, axis=PERCENT)
    tips = [
        alt.Tooltip("name:N"),
        *([alt.Tooltip("kind:N")] if kinds else []),
        alt.Tooltip("text:N", title="accuracy"),
        alt.Tooltip("answers:N"),
        alt.Tooltip("low:Q", title="95 % from", format=".1%"),
        alt.Tooltip("high:Q", title="to", format=".1%"),
    ]
    base = chart_of(rows).encode(y=names_axis("name:N", names), tooltip=tips)
    legend = wide_legend() if len(kinds) > 1 else None
    paint = category_color("kind:N", kinds, legend=legend) if kinds else alt.Color("paint:N", scale=None, legend=None)
    dots = {"size": 90, "stroke": color("bg"), "strokeWidth": 1.5, "opacity": 1}
    marks = (base.mark_bar(height=12) if bars else base.mark_circle(**dots)).encode(x=x, color=paint)
    interval = base.transform_filter("datum.low !== null").mark_rule(color=color("ink"), strokeWidth=1.6)
    interval = interval.encode(x=alt.X("low:Q", scale=scale, title=None, axis=PERCENT), x2=alt.X2("high:Q"))
    text = base.mark_text(align="right", color=color("ink"), fontWeight=600)
    layers = [marks, interval] if bars else [interval, marks]
    layers.append(text.encode(x=alt.value("width"), text=alt.Text("text:N")))
    if chance is not None:
        guess = chart_of([row_of(top1=chance, what=f"a guess: {show_percent(chance)}")])
        rule = guess.mark_rule(color=color("axis"), strokeDash=[3, 3]).encode(x=x, tooltip=alt.Tooltip("what:N"))
        layers.insert(0, rule)
    described = "; ".join(f"{row['name']}{', ' + row['kind'] if kinds else ''}: {row['text']}" for row in rows)
    return alt.layer(*layers).properties(width="container", height=height * len(rows), description=f"{described}.")


def lines_chart(
    series: Mapping[str, Mapping[Any, float | None]],
    title: str,
    value: str | None,
    *,
    order: Sequence[str] | None = None,
    scale: alt.Scale | None = None,
    axis: alt.Axis | None = None,
    joined: bool = True,
) -> Chart:
    """Draw a line, or points if not ``joined``, for each name of ``series``, which maps x to a value."""
    rows = [
        row_of(digits=9, what=name, x=x, value=y)
        for name, values in series.items()
        for x, y in values.items()
        if y is not None
    ]
    names = list(series)
    described = "; ".join(f"{row['what']}, {title} {row['x']}: {row['value']:.3g}" for row in rows)
    chart = chart_of(rows)
    marked = chart.mark_line(point=True) if joined else chart.mark_point(filled=True, size=70, opacity=0.8)
    places = sorted({row["x"] for row in rows if isinstance(row["x"], int | float)})
    if places and order is None:  # a numeric axis keeps uneven distances between numbers
        ends = alt.Scale(domain=[places[0], places[-1]], nice=False, padding=16)
        x = alt.X("x:Q", title=title, scale=ends, axis=alt.Axis(values=places, grid=False, labelExpr="datum.value"))
    else:
        sort = None if order is None else list(order)
        x = alt.X("x:O", title=title, sort=sort, axis=alt.Axis(labelAngle=0))
    return marked.encode(
        x=x,
        y=alt.Y("value:Q", title=value, scale=scale or alt.Scale(), axis=axis or alt.Axis(grid=True)),
        color=category_color("what:N", names, legend=wide_legend(4, 2) if len(names) > 1 else None),
        tooltip=[alt.Tooltip("what:N"), alt.Tooltip("x:N", title=title), tooltip_of("value", value or "value")],
    ).properties(width="container", height=220, description=f"{described}.")


def bars_chart(
    rows: list[Row], names: Sequence[str], value: str | None, tips: Sequence[alt.Tooltip], **axis: Any
) -> Chart:
    """Draw the ``value`` of each row by ``block``, with a bar for each ``what`` in ``names``."""
    described = "; ".join(f"block {row['block']}, {row['what']}: {row['value']:.3g}" for row in rows)
    return (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=alt.X("block:O", title="block", axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("what:N", sort=list(names)),
            y=alt.Y("value:Q", title=value, **{"axis": alt.Axis(grid=True), **axis}),
            color=category_color("what:N", names, legend=wide_legend(2, 1)),
            tooltip=[alt.Tooltip("block:O"), alt.Tooltip("what:N"), *tips],
        )
        .properties(width="container", height=220, description=f"{described}.")
    )


def square_of(
    values: Sequence[Sequence[float | None]],
    names: Sequence[str],
    titles: tuple[str, str],
    what: str,
    *,
    exponent: float = 1.0,
    text_of: Callable[[float], str] = "{:.2f}".format,
) -> Chart:
    """Draw a grid of cells whose opacity is their value relative to the largest one, to the power ``exponent``.

    ``names`` are the names of the rows and of the columns; ``titles`` are the titles of both axes. Cells have text if
    there is room for it.
    """
    row_title, column_title = titles
    peak = max((value for row in values for value in row if value is not None), default=1.0) or 1.0
    rows = [
        row_of(
            row=name,
            column=column,
            value=value,
            depth=0.0 if value is None else (max(0.0, value) / peak) ** exponent,
            text="" if value is None else text_of(value),
        )
        for name, cells in zip(names, values, strict=True)
        for column, value in zip(names, cells, strict=True)
    ]
    top = alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False)
    base = chart_of(rows).encode(
        x=alt.X("column:O", title=column_title, sort=list(names), scale=alt.Scale(domain=list(names)), axis=top),
        y=alt.Y("row:O", title=row_title, sort=list(names)),
        tooltip=[
            alt.Tooltip("row:O", title=row_title),
            alt.Tooltip("column:O", title=column_title),
            tooltip_of("value", what),
        ],
    )
    depth = alt.Opacity("depth:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[0, 1]))
    layers = [
        base.mark_rect(color=color("panel"), stroke=color("bg")),
        base.mark_rect(stroke=color("bg"), strokeWidth=1, color=color("accent")).encode(opacity=depth),
    ]
    has_texts = len(names) <= MOST_TEXTS
    if has_texts:
        ink = alt.ColorValue(color("ink"), condition={"test": "datum.depth > 0.6", "value": color("bg")})
        layers.append(base.mark_text(fontSize=11, fontWeight=600).encode(text=alt.Text("text:N"), color=ink))
    described = f"{what} by {row_title} and {column_title}; the largest is {peak:.3f}."
    height = (34 if has_texts else 20) * len(names)
    return alt.layer(*layers).properties(width="container", height=height, description=described)
