"""The options of commands that work from profiles: which devices there are, and how they are linked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ls_edge.runtime.fleet.planning.from_profiles import PlanningInputs

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--bundle", required=True, type=click.Path(path_type=Path), help="Folder of the exported model."),
    click.option(
        "--profiles", required=True, multiple=True, metavar="FILE...",
        help="Files of 'ls-edge profile'; orin-0,orin-1=FILE for several devices like the one that was measured.",
    ),
    click.argument("more", nargs=-1, metavar=""),
    click.option("--source", help="Profile of the machine with the images; as fast as the fastest device if left out."),
    click.option("--links", type=click.Path(path_type=Path), help="File of 'ls-edge profile --links'."),
    click.option(
        "--codec", type=click.Choice(["raw", "fp16", "int8"]), default="raw", show_default=True,
        help="How tokens travel.",
    ),
    click.option(
        "--mbit", type=click.FloatRange(min=0.001), default=1000.0, show_default=True,
        help="Megabits a second of links that were not measured.",
    ),
    click.option(
        "--link-ms", type=click.FloatRange(min=0), default=0.3, show_default=True,
        help="Latency of links that were not measured.",
    ),
    click.option("--allow-throttled", is_flag=True, help="Take profiles of devices that throttled."),
)  # fmt: skip


def profile_options(command: _Command) -> _Command:
    """Add the options to a command, which passes all but ``bundle`` to :func:`planning_inputs`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def planning_inputs(
    *, profiles: tuple[str, ...], more: tuple[str, ...], source: str | None, links: Path | None, codec: str,
    mbit: float, link_ms: float, allow_throttled: bool, **others: Any,
) -> PlanningInputs:  # fmt: skip
    """Read the files of the options; ``others`` are further fields of the inputs."""
    from ls_edge.device.profile import load_links
    from ls_edge.runtime.fleet.planning.from_profiles import PlanningInputs, read_profiles

    return PlanningInputs(
        profiles=read_profiles((*profiles, *more)), source=None if source is None else read_profiles([source])[0],
        links=None if links is None else load_links(links), codec=codec, mbit=mbit, latency_ms=link_ms,
        throttled=allow_throttled, **others,
    )  # fmt: skip
