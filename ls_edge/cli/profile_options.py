"""Options of commands that plan from profiles of devices and links."""

from __future__ import annotations

import click

from ls_edge.cli import options

PROFILES = options.apply_options(
    options.names(
        "--profiles",
        "Files of 'ls-edge profile'; NAME,NAME=FILE for several devices of one kind.",
        "FILE...",
        required=True,
    ),
    click.argument("more", nargs=-1, metavar=""),
    options.text("--source", "Profile of the source.  [default: the fastest device]", "FILE"),
    options.path("--links", "File of 'ls-edge profile --links'."),
    options.choice("--codec", ["raw", "fp16", "int8"], "Encoding of tokens.", default="raw"),
    options.number("--mbit", "Megabits per second of links that were not measured.", "MBIT", 0.001, default=1000.0),
    options.number("--link-ms", "Latency of links that were not measured.", "MS", default=0.3),
    options.flag("--allow-throttled", "Accept profiles of devices that throttled."),
)
