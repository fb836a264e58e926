"""Results that print like the commands, and draw themselves in notebooks."""

from __future__ import annotations

import contextlib
import html
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a board without terminal output does not need rich
    from rich.console import Console


class Shown:
    """Mixin of results: text for ``print``, and HTML for notebooks."""

    def show(self, console: Console) -> None:
        """Print the result."""
        raise NotImplementedError

    def chart(self) -> str:
        """Return an SVG for notebooks, or an empty string; raise ImportError without the extra ``report``."""
        return ""

    def __str__(self) -> str:
        from ls_edge.report.terminal import open_console

        with io.StringIO() as text:
            self.show(open_console(file=text))
            return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        chart = ""
        with contextlib.suppress(ImportError):
            chart = self.chart()
        return f"<pre>{html.escape(str(self))}</pre>{chart}"
