"""The table of the times of parts, which ``bench`` and ``profile`` print."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from ls_edge.device.profile import BatchTimes, Times
from ls_edge.engines.benchmark import Bench
from ls_edge.report.terminal import PlainTable, print_table


def print_times(title: str, found: Bench | BatchTimes, wholes: Mapping[str, Times | None], console: Console) -> None:
    """Print the times of stem, blocks, and head, and below them those of ``wholes`` that were measured."""
    table = PlainTable.of("", ">median ms", ">95 % ms", ">min ms", title=title, box=None)
    parts = {"stem": found.stem_ms, **{f"block {index}": one for index, one in enumerate(found.blocks_ms)}}
    for group in ({**parts, "head": found.head_ms}, wholes):
        for name, times in group.items():
            if times is not None:
                table.add_row(name, f"{times.p50:.2f}", f"{times.p95:.2f}", f"{times.min:.2f}")
        table.add_section()
    print_table(table, console)
