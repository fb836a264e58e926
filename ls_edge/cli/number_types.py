"""click types for numbers that are finite and within a sensible limit.

click accepts ``nan`` as a number above any minimum, and ``2**70`` as a count of threads, which later end in a traceback
or an endless run. :func:`limit_number` replaces the type of an option by one of these.
"""

from __future__ import annotations

import math
from typing import Any

import click

MOST = {
    "threads": 1024, "batch": 65_536, "batch_size": 65_536, "max_batch": 65_536, "orders": 100_000,
    "limit": 10_000_000, "requests": 10_000_000, "cost_orders": 100_000, "calibrate_images": 1_000_000,
    "seeds": 10_000, "workers": 1024, "img_size": 16_384, "depth": 10_000, "concurrency": 1_000_000,
}  # fmt: skip
"""The largest value of an option, by its name."""
MOST_WHOLE, MOST_SECONDS = 10**9, 10**6
"""Of the others; seeds alone may be as large as they like."""


class Whole(click.IntRange):
    """A whole number; ``most`` is checked but not shown with the range, since it is far above useful values."""

    def __init__(self, least: int | None, max_: int | None, most: float) -> None:
        super().__init__(least, max_)
        self.most = most

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; a click error where it is none, or out of range."""
        try:
            number = int(value)
        except (ValueError, TypeError):
            self.fail(f"{value!r} is no whole number", param, ctx)
        if number > self.most:
            self.fail(f"{number} is too large; the most is {self.most:.0f}", param, ctx)
        return super().convert(number, param, ctx)


class Finite(click.FloatRange):
    """A number that is neither NaN nor infinite."""

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; a click error where it is none, or out of range."""
        try:
            number = float(value)
        except (ValueError, TypeError):
            self.fail(f"{value!r} is no number", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        if abs(number) > MOST_SECONDS * 1e3:
            self.fail(f"{value} is too large; the most is {MOST_SECONDS * 1e3:.0f}", param, ctx)
        return super().convert(number, param, ctx)


def limit_number(param: click.Parameter) -> None:
    """Replace the type of an option that takes a number."""
    kind = param.type
    name = param.name or ""
    if isinstance(kind, (click.IntRange, click.types.IntParamType)):
        most = math.inf if name == "seed" else MOST.get(name, MOST_WHOLE)
        whole = Whole(getattr(kind, "min", None), getattr(kind, "max", None), most)
        whole.name = kind.name
        param.type = whole
    elif isinstance(kind, (click.FloatRange, click.types.FloatParamType)):
        finite = Finite(
            getattr(kind, "min", None), getattr(kind, "max", None), getattr(kind, "min_open", False),
            getattr(kind, "max_open", False),
        )  # fmt: skip
        finite.name = kind.name
        param.type = finite
