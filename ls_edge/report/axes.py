"""Axes that several charts share."""

from __future__ import annotations

from ls_edge.report.svg import Scale, Svg, text_width, tick_label


def time_axis(svg: Svg, x: Scale, y: float, unit: str, width: int) -> None:
    """A horizontal axis at height ``y``; its last label names the unit."""
    svg.line(x.start, y, x.end, y, "ax")
    ticks = x.ticks(9 if width > 500 else 4)
    free = -1e9
    for index, tick in enumerate(ticks):
        label = tick_label(tick) + (f" {unit}" if index == len(ticks) - 1 else "")
        room = text_width(label)
        begin = min(max(x(tick) - room / 2, 0.0), svg.width - room)
        if begin < free:
            continue
        svg.line(x(tick), y, x(tick), y + 4, "ax")
        svg.text(begin + room / 2, y + 18, label, anchor="middle")
        free = begin + room + 6


def value_axis(svg: Svg, y: Scale, left: float, right: float, unit: str, count: int = 5) -> None:
    """Horizontal lines from ``left`` to ``right`` with labels before them; the highest names the unit."""
    ticks = y.ticks(count)
    for index, tick in enumerate(ticks):
        svg.line(left, y(tick), right, y(tick), "gr")
        label = tick_label(tick) + (f" {unit}" if unit and index == len(ticks) - 1 else "")
        svg.text(left - 8, y(tick) + 4, label, anchor="end")


def percent_axis(svg: Svg, x: Scale, top: float, bottom: float) -> None:
    """Vertical lines at quarters, from 0 % to 100 %."""
    for share in (0, 0.25, 0.5, 0.75, 1):
        svg.line(x(share), top, x(share), bottom, "gr")
        svg.text(x(share), bottom + 18, f"{100 * share:.0f} %", anchor="middle" if x(share) > 16 else "")


def chance_line(svg: Svg, x: float, top: float, bottom: float) -> None:
    """Where a guess would stand."""
    svg.line(x, top - 6, x, bottom, "evo")
    svg.text(max(x, text_width("a guess") / 2), top - 12, "a guess", anchor="middle")
