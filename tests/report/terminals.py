"""Consoles whose output can be read."""

import io

from rich.console import Console


def console(terminal, width=100):
    colors = "standard" if terminal else None
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=colors, legacy_windows=False)


def written(console):
    return console.file.getvalue()
