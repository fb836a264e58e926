"""``ls-edge push``: send a bundle to the peers, and switch them to it one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import peers_to_ask
from ls_edge.cli.output import print_json, warn
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import byte_size
from ls_edge.report.terminal import PlainTable, print_table
from ls_edge.runtime.clients.push import Pusher
from ls_edge.runtime.clients.sender import PushError, PushResult

_STYLES = {"active": "green", "failed": "red", "busy": "red", "unreachable": "red"}


@click.command(
    cls=Command,
    examples=(
        "ls-edge push --peers peers.yaml --bundle bundle --secret-key laptop.key_secret",
        "ls-edge push --peers peers.yaml --bundle bundle --secret-key laptop.key_secret --only orin-3",
        "ls-edge push --peers peers.yaml --rollback --secret-key laptop.key_secret",
    ),
)
@options.PEERS
@options.bundle()
@options.flag("--rollback", "Return to the previous bundle instead of sending --bundle.")
@options.PUSH_KEY
@options.names("--only", "Peer to update; may be repeated.")
@options.PUSH_WAIT
@options.JSON
def command(
    peers: Path,
    bundle: Path | None,
    rollback: bool,
    secret_key: Path | None,
    only: tuple[str, ...],
    wait: float,
    as_json: bool,
) -> None:
    """Send a bundle to the peers and switch to it.

    Peers started with --store receive their blocks over their encrypted links. Parts that a peer already has are not
    sent again, and an interrupted push continues where it stopped. Only ONNX files travel: each board builds its own
    engines while it still serves the previous bundle. Once every peer has verified and built all its parts, one peer
    after another drains, switches, and warms up; the first failure stops the push. To change the model, use ls-edge
    apply.
    """
    if rollback and not options.is_typed("bundle"):
        bundle = None
    if (bundle is None) != rollback:
        raise UsageError("give --bundle FOLDER, or --rollback to return to the previous bundle")
    file, keys = peers_to_ask(peers, secret_key)
    opened = None if bundle is None else Bundle.open(bundle)
    failure: PushError | None = None
    with (
        progress_bars(as_json=as_json) as on_change,
        Pusher(file, keys=keys, only=only, wait=wait, on_change=on_change, on_warning=warn) as pusher,
    ):
        try:
            if opened is None:
                pusher.roll_back()
            else:
                pusher.push(opened)
        except PushError as error:
            failure = error
        results = pusher.results()
    if as_json:
        print_json({"peers": results})
    elif results:
        print_results(results)
    if failure is not None:
        raise failure


@contextlib.contextmanager
def progress_bars(*, as_json: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """Show a bar for each peer on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda _name, _state, _missing, _total: None
        return
    columns = (TextColumn("{task.fields[peer]}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[state]}"))
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def on_change(name: str, state: str, missing: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task("", total=None, peer=printable(name), state="")
            done = max(0, total - missing)
            progress.update(tasks[name], total=total or None, completed=done, state=printable(state))

        yield on_change


def print_results(results: Mapping[str, PushResult]) -> None:
    """Print a row for each peer."""
    table = PlainTable.of("peer", "state", ">parts", ">size", ">sent", "why")
    for name, one in results.items():
        state = Text(printable(one.state), style=_STYLES.get(one.state, ""))
        sizes = (byte_size(one.bytes), byte_size(one.sent_bytes))
        table.add_row(name, state, f"{one.parts}", *sizes, one.reason or "")
    print_table(table)
