"""Colors of charts and pages in light and dark mode, and the Vega-Lite configuration that all charts share.

Data uses Vega's color schemes: :data:`BLOCK_SCHEME` becomes lighter from the first block to the last, so a trained
order looks like a gradient and a shuffled one like a patchwork; :data:`CATEGORY_SCHEME` is for data without an order.
Background, text, and states are CSS variables, so the same drawing follows the reader's light or dark mode.
"""

from __future__ import annotations

import re
from typing import Any, Final

Chart = Any
"""Altair chart. Altair declares no more exact type, and most of the package does not need Altair."""

BLOCK_SCHEME: Final = "viridis"
CATEGORY_SCHEME: Final = "tableau10"

_COLORS = {
    "bg": ("#fcfcfa", "#14161a"),
    "panel": ("#f4f4f0", "#1c1f25"),
    "ink": ("#1b1f26", "#e8e9ec"),
    "soft": ("#5a626f", "#a3abb8"),
    "rule": ("#e2e2dc", "#2d323b"),
    "axis": ("#b9bcc2", "#4a515d"),
    "accent": ("#2b6ca3", "#6aa9dd"),
    "good": ("#1f7f60", "#56c09a"),
    "warn": ("#9a6200", "#e8b04d"),
    "bad": ("#b8401c", "#f08a66"),
}
"""Colors by name, for light and dark mode."""

FONT = 'Inter,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","Liberation Sans",Arial,sans-serif'


def color(name: str) -> str:
    """Return the CSS variable of a color of :data:`STYLE`."""
    return f"var(--{name})"


def _variables(column: int) -> str:
    return "".join(f"--{name}:{pair[column]};" for name, pair in _COLORS.items())


STYLE = (
    f":root{{color-scheme:light dark;--font:{FONT};{_variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
)


def with_plain_colors(drawing: str) -> str:
    """Replace the CSS variables of an SVG document by the light colors, since not every program supports variables."""
    return re.sub(r"var\(--(\w+)\)", lambda match: _COLORS[match[1]][0], drawing)


_WORDS = {
    "labelColor": color("soft"),
    "titleColor": color("soft"),
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
}
CHART_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": FONT,
    "padding": {"left": 2, "right": 8, "top": 4, "bottom": 4},
    "view": {"stroke": None},
    "range": {"category": {"scheme": CATEGORY_SCHEME}, "ordinal": {"scheme": BLOCK_SCHEME}},
    "axis": {
        **_WORDS,
        "gridColor": color("rule"),
        "domainColor": color("axis"),
        "tickColor": color("axis"),
        "labelPadding": 6,
        "tickSize": 4,
        "labelOverlap": True,
        "labelSeparation": 8,
    },
    "axisX": {"grid": False, "tickCount": 9},
    "axisY": {"domain": False, "ticks": False, "tickCount": 5},
    "legend": {**_WORDS, "symbolType": "square", "symbolStrokeWidth": 0, "orient": "bottom", "columns": 8},
    "text": {"color": color("soft"), "fontSize": 12},
    "title": {"color": color("ink"), "fontSize": 13, "fontWeight": 600, "anchor": "start", "offset": 12},
}
