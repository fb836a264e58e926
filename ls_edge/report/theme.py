"""Colours of the charts and the page, in light and dark, and the Vega-Lite configuration that all charts share.

Blocks take their colours from one ramp that grows lighter from the first block to the last, so a trained order
reads as a gradient and a shuffled one as a patchwork, with any kind of colour vision; their numbers stand beside
the colours. Stages of a request follow Okabe and Ito's palette for colour-blind readers, muted a little.

Charts of the page name their colours as CSS variables, so one drawing is light or dark as its reader's screen is. In
files they are plain colours, those on light paper, since not every program that draws SVG knows variables; a style
sheet with a media query makes them dark.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_RAMP = ((0x3B, 0x4A, 0x94), (0x2F, 0x78, 0xAE), (0x2B, 0x9C, 0x98), (0x68, 0xB8, 0x6E), (0xD8, 0xC2, 0x4A))


class RequestStage(NamedTuple):
    """One kind of work that a request's time goes to."""

    name: str
    meaning: str


STAGES = (
    RequestStage("stem", "patch embedding, on the source"),
    RequestStage("wire", "between two processes"),
    RequestStage("queue", "waiting for the engine"),
    RequestStage("codec", "encoding and decoding tokens"),
    RequestStage("engine", "running blocks"),
    RequestStage("wait", "waiting for tracks of others"),
    RequestStage("head", "classifier, on the source"),
    RequestStage("other", "not explained by any duration"),
)

_COLOURS = {
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
    "shade": ("#f3ddd3", "#37251d"),
    "stem": ("#83bce0", "#83bce0"),
    "wire": ("#e3a13a", "#e3a13a"),
    "queue": ("#c3c7ce", "#656d79"),
    "codec": ("#c47da3", "#c47da3"),
    "engine": ("#2b6ca3", "#4b8fc9"),
    "wait": ("#e4def0", "#3d3850"),
    "head": ("#3a9b7a", "#45ab88"),
    "other": ("#8d6e63", "#a1887f"),
}
"""Colour by name: on light and on dark paper."""

FONT = 'Inter,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","Liberation Sans",Arial,sans-serif'


def colour(name: str) -> str:
    """The CSS variable of a colour of :data:`STYLE`."""
    return f"var(--{name})"


def _variables(column: int) -> str:
    return "".join(f"--{name}:{pair[column]};" for name, pair in _COLOURS.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(0)}}}@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
)
"""A style sheet that defines the colours."""


def with_plain_colours(drawing: str) -> str:
    """An SVG document whose colours are CSS variables, with plain ones on light paper and a style sheet for dark."""
    used: set[tuple[str, str]] = set()

    def plain(match: re.Match[str]) -> str:
        attribute, name = match.groups()
        used.add((attribute, name))
        return f'{attribute}="{_COLOURS[name][0]}" data-{attribute}="{name}"'

    drawing = re.sub(r'\b(fill|stroke)="var\(--(\w+)\)"', plain, drawing)
    dark = "".join(f'[data-{a}="{name}"]{{{a}:{_COLOURS[name][1]}}}' for a, name in sorted(used))
    style = f"<style>:root{{color-scheme:light dark}}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    head, rest = drawing.split(">", 1)
    return f"{head}>{style}{rest}"


def block_colour(block: int, num_blocks: int) -> str:
    """The colour of a block of a model of ``num_blocks`` blocks, as ``#rrggbb``."""
    place = (len(_RAMP) - 1) * (block / (num_blocks - 1) if num_blocks > 1 else 0.4)
    index = min(int(place), len(_RAMP) - 2)
    share = min(place - index, 1.0)
    mixed = (round(a + share * (b - a)) for a, b in zip(_RAMP[index], _RAMP[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def ink_on(background: str) -> str:
    """The colour of a text that reads well on ``#rrggbb``: white or near black."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if luminance < 0.26 else "#14181f"


def chart_config() -> dict[str, Any]:
    """The Vega-Lite configuration of every chart."""
    return {
        "background": "transparent",
        "font": FONT,
        "padding": {"left": 2, "right": 8, "top": 4, "bottom": 4},
        "view": {"stroke": None},
        "axis": {
            "labelColor": colour("soft"), "titleColor": colour("soft"), "labelFontSize": 12, "titleFontSize": 12,
            "titleFontWeight": "normal", "gridColor": colour("rule"), "domainColor": colour("axis"),
            "tickColor": colour("axis"), "labelPadding": 6, "tickSize": 4, "labelOverlap": True, "labelSeparation": 8,
        },
        "axisX": {"grid": False, "tickCount": 9},
        "axisY": {"domain": False, "ticks": False, "tickCount": 5},
        "legend": {
            "labelColor": colour("soft"), "titleColor": colour("soft"), "labelFontSize": 12, "titleFontSize": 12,
            "titleFontWeight": "normal", "symbolType": "square", "symbolStrokeWidth": 0, "orient": "bottom",
            "columns": 8,
        },
        "text": {"color": colour("soft"), "fontSize": 12},
        "title": {"color": colour("ink"), "fontSize": 13, "fontWeight": 600, "anchor": "start", "offset": 12},
    }  # fmt: skip
