"""Options of commands that plan from profiles: the devices and the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ls_edge.cli import options
from ls_edge.device.profile import load_links
from ls_edge.runtime.fleet.planning.from_profiles import PlanningInputs, read_profiles

profile_options = options.apply_options(
    options.BUNDLE,
    click.option(
        "--profiles", required=True, multiple=True, metavar="FILE...",
        help="Files of 'ls-edge profile'; orin-0,orin-1=FILE for several devices of the measured kind.",
    ),
    click.argument("more", nargs=-1, metavar=""),
    click.option("--source", metavar="FILE", help="Profile of the source.  [default: the fastest device]"),
    options.path("--links", "File of 'ls-edge profile --links'."),
    options.choice("--codec", ["raw", "fp16", "int8"], "Encoding of tokens.", default="raw", show_default=True),
    click.option(
        "--mbit", type=options.Number(0.001, 10**9), default=1000.0, show_default=True, metavar="MBIT",
        help="Megabits per second of links that were not measured.",
    ),
    click.option(
        "--link-ms", type=options.Number(0, 10**9), default=0.3, show_default=True, metavar="MS",
        help="Latency of links that were not measured.",
    ),
    click.option("--allow-throttled", is_flag=True, help="Accept profiles of devices that throttled."),
)  # fmt: skip


def planning_inputs(
    *, profiles: tuple[str, ...], more: tuple[str, ...], source: str | None, links: Path | None, codec: str,
    mbit: float, link_ms: float, allow_throttled: bool, **others: Any,
) -> PlanningInputs:  # fmt: skip
    """Read the files of :data:`profile_options`; ``others`` are further fields of the inputs."""
    return PlanningInputs(
        profiles=read_profiles((*profiles, *more)),
        source=None if source is None else read_profiles([source])[0],
        links=None if links is None else load_links(links),
        codec=codec,
        mbit=mbit,
        latency_ms=link_ms,
        throttled=allow_throttled,
        **others,
    )
