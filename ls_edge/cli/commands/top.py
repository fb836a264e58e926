"""``ls-edge top``: watch the peers in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.commands.status import document_of, look, remarks
from ls_edge.cli.inputs import peers_to_ask
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import printable
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.records import PeerState
from ls_edge.core.text import counted, format_ranges
from ls_edge.report.tables import STATE_STYLES
from ls_edge.report.terminal import PlainTable, as_list, fits, open_console
from ls_edge.runtime.clients.status import Observer, PeerStatus

_EVERY_S = 1.0
"""Interval between two looks, in seconds."""
_WAIT_S = 3.0
"""Time for a peer to answer, in seconds."""
_SHOWN_RATES = 24
"""Number of looks in the history of a peer."""
_SHOWN_CHANGES = 8
_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@click.command(
    cls=Command,
    examples=(
        "ls-edge top --peers peers.yaml",
        "ls-edge top --peers peers.yaml --secret-key laptop.key_secret",
        "ls-edge top --peers peers.yaml --json",
    ),
)
@options.PEERS
@options.SECRET_KEY
@options.bundle("Bundle to compare with.")
@options.as_json("Output as JSON, one line per second, as 'status --json'.")
def command(peers: Path, secret_key: Path | None, bundle: Path | None, as_json: bool) -> None:
    """Watch the peers in the terminal: state, load, queues, and what changes.

    Shows the table of 'ls-edge status' once per second, with the engine calls per second of each peer and their
    history. Below it are blocks without a holder, missing links, and the latest changes of state. Sends no images.
    q or Ctrl-C ends it.
    """
    opened = None if bundle is None else Bundle.open(bundle)
    file, keys = peers_to_ask(peers, secret_key)
    if opened is not None:
        file = file.of_model(opened.num_blocks)
    console, history = open_console(), History()
    live = Live(console=console, auto_refresh=False, screen=not console.is_dumb_terminal)
    is_live, ended = console.is_terminal and not as_json, False
    with (
        Observer(file, keys=keys) as observer,
        live if is_live else contextlib.nullcontext(),
        _quit_key() if is_live and os.isatty(0) else contextlib.nullcontext(lambda: False) as is_quit,
    ):
        while not ended:
            found = look(observer, opened, _WAIT_S)
            history.add(found, time.monotonic())
            if as_json:
                print_json(document_of(found), one_line=True)
            elif is_live:
                live.update(view(found, history, file, console), refresh=True)
            else:
                console.print(view(found, history, file, console))
            ended = observer.wait_until(is_quit, _EVERY_S)


@contextlib.contextmanager
def _quit_key() -> Iterator[Callable[[], bool]]:
    """Read keys as they are pressed; yield a function that returns whether q was one of them."""
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    try:
        yield lambda: bool(select.select([0], [], [], 0)[0]) and b"q" in os.read(0, 1024).lower()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@dataclass
class History:
    """Engine calls per second and changes of state, from all looks so far."""

    rates: dict[str, deque[float]] = field(default_factory=dict)
    changes: deque[Text] = field(default_factory=lambda: deque(maxlen=_SHOWN_CHANGES))
    _before: Mapping[str, PeerStatus] = field(default_factory=dict)
    _at: float = 0.0

    def add(self, found: Mapping[str, PeerStatus], now: float) -> None:
        """Compare a look with the previous one."""
        for name, status in found.items():
            before = self._before.get(name)
            rates = self.rates.setdefault(name, deque(maxlen=_SHOWN_RATES))
            if before is None:
                continue
            calls, known = status.calls or 0, before.calls or 0
            done = calls - known if calls >= known else calls  # fewer calls: the peer was restarted
            rates.append(done / (now - self._at) if before.calls is not None else 0.0)
            if status.state is not before.state:
                why = f": {status.reason}" if status.reason else ""
                change = Text(time.strftime("%H:%M:%S "), style="dim", no_wrap=False, overflow="fold")
                change.append(f"{name} ").append(status.state, STATE_STYLES[status.state]).append(printable(why))
                self.changes.appendleft(change)
        self._before, self._at = found, now


def view(found: Mapping[str, PeerStatus], history: History, file: PeersFile, console: Console) -> Group:
    """Return the screen of a look."""
    table = _table(found, history, with_bars=console.encoding.startswith("utf"))
    alive = sum(status.state is PeerState.ALIVE for status in found.values())
    title = f"{alive} of {counted(len(found), 'peer')} alive, {time.strftime('%H:%M:%S')}"
    return Group(
        Text(title, style="bold"),
        *([table] if fits(table, console) else as_list(table)),
        *(Text(line, style="yellow", no_wrap=False, overflow="fold") for line in remarks(found, file)),
        *history.changes,
    )


def _table(found: Mapping[str, PeerStatus], history: History, *, with_bars: bool) -> PlainTable:
    bars = ["calls/s over time"] * with_bars
    table = PlainTable.of("peer", "state", "blocks", ">queue", ">credits", ">block", ">latency", ">calls/s", *bars)
    most = max((rate for rates in history.rates.values() for rate in rates), default=0.0)
    for name, status in found.items():
        rates = history.rates[name]
        table.add_row(
            name,
            Text(status.state, style=STATE_STYLES[status.state]),
            format_ranges(status.blocks),
            *_numbers(status),
            f"{rates[-1]:.0f}" if rates else "",
            *[Text("".join(_BARS[round(8 * rate / (most or 1.0))] for rate in rates), style="green")] * with_bars,
        )
    return table


def _numbers(status: PeerStatus) -> Iterator[str]:
    for value, form in (
        (status.queue, "{}"),
        (status.credits, "{}"),
        (status.block_ms, "{:.1f} ms"),
        (status.latency_ms, "{:.1f} ms"),
    ):
        yield "" if value is None else form.format(value)
