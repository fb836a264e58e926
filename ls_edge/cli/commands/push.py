"""``ls-edge push``: send a bundle to the peers, and switch them to it one after the other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ls_edge.cli.command import Command
from ls_edge.core.errors import UsageError, printable

if TYPE_CHECKING:
    from ls_edge.runtime.clients.push import PushResult

_STYLES = {"active": "green", "failed": "red", "busy": "red", "unreachable": "red"}


@click.command(
    cls=Command,
    short_help="Send a bundle to the peers, and switch to it.",
    examples=(
        "ls-edge push --peers peers.yaml --bundle bundle --secret-key laptop.key_secret",
        "ls-edge push --peers peers.yaml --bundle bundle --secret-key laptop.key_secret --only orin-3",
        "ls-edge push --peers peers.yaml --rollback --secret-key laptop.key_secret",
    ),
)
@click.option("--peers", required=True, type=click.Path(path_type=Path), help="The peers.yaml of all machines.")
@click.option("--bundle", type=click.Path(path_type=Path), help="Folder of the exported model.")
@click.option("--rollback", is_flag=True, help="Instead of --bundle: back to the bundle before the last push.")
@click.option("--secret-key", type=click.Path(path_type=Path), help="Of a source with 'may_push: true' in peers.yaml.")
@click.option("--only", multiple=True, metavar="NAME", help="Leave the other peers as they are; may be repeated.")
@click.option(
    "--wait", type=click.FloatRange(min=1, max=3600), default=120.0, show_default=True, metavar="SECONDS",
    help="How long a peer may be away, or get no further.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    peers: Path, bundle: Path | None, *, rollback: bool, secret_key: Path | None, only: tuple[str, ...], wait: float,
    as_json: bool,
) -> int:  # fmt: skip
    """Send each peer the blocks that peers.yaml gives it, and have all of them serve the bundle.

    Peers that were started with --store take it over their own encrypted links. What a peer has already is not sent
    again, and a push that was cut off goes on where it was. When all have everything, verified by its digests, one peer
    after the other drains, switches and warms up; the first failure ends it. ONNX files travel, engines never: each
    board builds its own.
    """
    from ls_edge.cli.descriptor_limit import require_descriptors
    from ls_edge.core.bundle import Bundle
    from ls_edge.core.logs import set_up
    from ls_edge.core.peers_file import load_peers
    from ls_edge.runtime.clients.push import Pusher, PushError
    from ls_edge.runtime.protocol.codecs import CODECS
    from ls_edge.runtime.transport.keys import load_secret

    if (bundle is None) != rollback:
        raise UsageError("give --bundle FOLDER, or --rollback to go back to the bundle before")
    file = load_peers(peers)
    file.check_codecs(CODECS)
    opened = None if bundle is None else Bundle.open(bundle)
    set_up(as_json=False, level=50)  # the table shows what peers report
    require_descriptors(file)
    failure: PushError | None = None
    with (
        _bars(as_json=as_json) as on_change,
        Pusher(
            file, keys=None if secret_key is None else load_secret(secret_key), only=only, wait=wait,
            on_change=on_change, on_warning=lambda text: click.echo(f"ls-edge: {printable(text)}", err=True),
        ) as pusher,
    ):  # fmt: skip
        try:
            if opened is None:
                pusher.roll_back()
            else:
                pusher.push(opened)
        except PushError as error:
            failure = error
        results = pusher.results()
    if as_json:
        import msgspec

        click.echo(json.dumps({"peers": {name: msgspec.to_builtins(one) for name, one in results.items()}}, indent=1))
    elif results:
        _print(results)
    if failure is not None:
        raise failure
    return 0


@contextlib.contextmanager
def _bars(*, as_json: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """A bar for each peer on standard error; none without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

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


def _print(results: Mapping[str, PushResult]) -> None:
    from rich.text import Text

    from ls_edge.report.formatting import byte_size
    from ls_edge.report.terminal import PlainTable, print_table

    table = PlainTable()
    table.add_column("peer")
    table.add_column("state")
    for name in ("parts", "size", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why")
    for name, one in results.items():
        table.add_row(
            Text(printable(name)), Text(printable(one.state), style=_STYLES.get(one.state, "")), f"{one.parts}",
            byte_size(one.bytes), byte_size(one.sent_bytes), Text(printable(one.reason or "")),
        )  # fmt: skip
    print_table(table)
