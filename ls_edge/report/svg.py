"""SVG, just enough of it for charts: shapes, escaped text, scales and ticks.

A drawing carries classes and no ``style`` attributes, so that one style sheet gives it its colours in light and
dark and a page can forbid everything else by its content security policy. Coordinates are pixels, y downwards.
Whatever text goes in is made printable (:func:`ls_edge.errors.printable`), so XML 1.0 can hold it, and escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ls_edge.errors import printable

NOTHING = "\N{EN DASH}"
"""Stands for a figure that there is none of."""


def markup(text: object) -> str:
    """Return ``text`` printable and escaped for HTML and XML, attributes included."""
    return escape(printable(text), quote=True)


def shorten(text: object, limit: int) -> str:
    """Cut a long text in its middle, where names of files say least."""
    whole = printable(text)
    if len(whole) <= limit:
        return whole
    head = (limit - 1) // 2
    return f"{whole[:head]}…{whole[len(whole) - (limit - 1 - head) :]}"


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


class Svg:
    """A drawing of ``width`` x ``height`` pixels with a title and a description for those who cannot see it."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self.description = description
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, css: str, *, fill: str = "", tip: str = "") -> None:
        """A rectangle; ``tip`` is shown when the pointer rests on it."""
        paint = f' fill="{fill}"' if fill else ""
        head = (
            f'<rect class="{css}" x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.1))}" '
            f'height="{number(max(height, 0.1))}"{paint}'
        )
        self._parts.append(f"{head}><title>{markup(tip)}</title></rect>" if tip else f"{head}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self._parts.append(
            f'<line class="{css}" x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"/>'
        )

    def path(self, commands: str, css: str, *, fill: str = "") -> None:
        """A path in SVG's own notation."""
        if commands:
            paint = f' fill="{fill}"' if fill else ""
            self._parts.append(f'<path class="{css}" d="{commands}"{paint}/>')

    def boxes(self, boxes: Sequence[tuple[float, float, float, float]], css: str, *, fill: str = "") -> None:
        """Many rectangles ``(x, y, width, height)`` of one colour in one element."""
        self.path(
            "".join(f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h-{number(w)}z" for x, y, w, h in boxes),
            css,
            fill=fill,
        )

    def polyline(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """A line through ``points``."""
        self.path("M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) if points else "", css)

    def dots(self, points: Sequence[tuple[float, float]], css: str, radius: float = 2) -> None:
        """Many circles in one element."""
        r, d = number(radius), number(2 * radius)
        arc = f"a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0"
        self.path("".join(f"M{number(x - radius)} {number(y)}{arc}" for x, y in points), css)

    def text(self, x: float, y: float, text: object, css: str = "t", *, anchor: str = "") -> None:
        """One line of text; ``anchor`` is ``middle`` or ``end``."""
        extra = f' text-anchor="{anchor}"' if anchor else ""
        self._parts.append(f'<text class="{css}" x="{number(x)}" y="{number(y)}"{extra}>{markup(text)}</text>')

    def render(self, ident: str, *, css: str = "", style: str = "", margin: float = 0) -> str:
        """Return the element; ``ident`` is unique in its document, ``style`` makes it stand alone."""
        left, width, height = number(-margin), number(self.width + 2 * margin), number(self.height + 2 * margin)
        head, inside = f' class="{css}"' if css else "", ""
        if style:
            head += f' xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            paper = f'<rect class="paper" x="{left}" y="{left}" width="{width}" height="{height}"/>'
            inside = f"<style>{style}</style>{paper}"
        return (
            f'<svg{head} viewBox="{left} {left} {width} {height}" role="img" '
            f'aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">{markup(self.title)}</title>'
            f'<desc id="{ident}-d">{markup(self.description)}</desc>{inside}{"".join(self._parts)}</svg>'
        )


@dataclass(frozen=True)
class Scale:
    """Maps ``low``..``high`` to ``start``..``end`` pixels, by ratio where ``log``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``, which is held inside the scale."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about ``count`` round values inside the scale."""
        return log_ticks(self.low, self.high, count) if self.log else ticks(self.low, self.high, count)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return values of 1, 2, 5 times a power of ten, or fewer where those are more than ``count``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= count:
            break
    return found if len(found) > 1 else [low, high]


def text_width(text: str, size: float = 12) -> float:
    """Guess the width of ``text`` in pixels; a browser's font decides, so leave room."""
    return 0.57 * size * len(text)


def show_ms(value: float | None) -> str:
    """``0.42 ms``, ``9.1 ms``, ``131 ms``, ``2.40 s``."""
    if value is None:
        return NOTHING
    if value >= 1000:
        return f"{value / 1000:.2f} s" if value < 10_000 else f"{value / 1000:.0f} s"
    return f"{show(value)} ms"


def show(value: float | None) -> str:
    """A number with about three digits that mean something, thousands set apart."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 3 else f"{value:.2f}"


def show_percent(share: float | None) -> str:
    """``81.3 %``."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def tick_label(value: float) -> str:
    """The shortest exact text of a tick."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
