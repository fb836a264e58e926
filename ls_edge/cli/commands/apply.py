"""``ls-edge apply``: change a running fleet to match a peers.yaml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.inputs import open_peers, peers_to_ask
from ls_edge.cli.output import print_json, warn
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.parts import ENDS, shown_parts
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import byte_size, counted, name_blocks
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, print_table
from ls_edge.runtime.change.planner import Step
from ls_edge.runtime.clients.apply import Applier, Change
from ls_edge.runtime.clients.fetching import running_file
from ls_edge.runtime.clients.sender import PushError, PushResult, pusher_name

_STYLES = {"active": "green", "failed": "red", "missing": "red"}
_KINDS = {"add": "added", "switch": "changed", "follow": "told of the others", "remove": "removed"}


@click.command(
    cls=Command,
    examples=(
        "ls-edge apply planned.yaml --bundle bundle --secret-key laptop.key_secret",
        "ls-edge apply peers.yaml --secret-key laptop.key_secret --dry-run",
        "ls-edge apply peers.yaml --rollback --secret-key laptop.key_secret",
    ),
)
@click.argument("new", type=options.FILE, metavar="NEW.yaml")
@options.peers("peers.yaml that the peers use now.  [default: the applied file]")
@options.bundle("Bundle to serve; needed if peers have none, or gain blocks that they lack.")
@options.flag("--rollback", "Return to the previous bundle of each peer.")
@options.flag("--dry-run", "Show the difference and change nothing.")
@options.flag("--yes", "Apply without asking.")
@options.flag("--allow-outage", "Continue even if some blocks briefly have no holder.")
@options.secret_key("NAME.key_secret of a source with 'may_push: true' in the peers.yaml of the peers.")
@options.wait("Time that a peer may be unreachable or make no progress.", default=120.0, least=1, most=3600)
@options.JSON
def command(
    new: Path,
    peers: Path | None,
    bundle: Path | None,
    rollback: bool,
    dry_run: bool,
    yes: bool,
    allow_outage: bool,
    secret_key: Path | None,
    wait: float,
    as_json: bool,
) -> None:
    """Change a running fleet to match NEW.yaml.

    Shows the difference, asks, and carries it out over the encrypted links of peers with a --store: each peer gets the
    file and the parts of --bundle that it lacks, and builds its engines while it still serves. Then one peer after
    another switches, in an order in which every block keeps a holder. The first failure stops the change. A peer
    records each step, and starts from the recorded file; so the same command continues an interrupted change, and
    changes nothing in a fleet that already matches the file. Continue a rollback with --bundle.

    Exit code 3 if some peers do not answer, which are named; run it again when they are
    back, after a rollback with --bundle.
    """
    if rollback and not options.is_typed("bundle"):
        bundle = None
    if rollback and bundle is not None:
        raise UsageError("--rollback returns to the previous bundle, so leave out --bundle")
    if peers is not None and peers.resolve() == new.resolve():  # LS_EDGE_PEERS names the file that was just edited
        peers = None
    current, keys = peers_to_ask(new if peers is None else peers, secret_key)
    file = current if peers is None else open_peers(new)
    if peers is None:
        current = running_file(file, keys, pusher_name(file, keys)) or file
    opened = None if bundle is None else Bundle.open(bundle)
    failure: PushError | None = None
    progress = StepProgress("apply", line_every_s=60)
    with Applier(
        file, current, "previous" if rollback else opened, keys=keys, wait=wait, on_progress=progress, on_warning=warn
    ) as applier:
        change = applier.look()
        outages = change.plan.outages.items()
        why = "; ".join(f"while {name} switches, no peer serves {name_blocks(parts)}" for name, parts in outages)
        if not as_json:
            _show(change, file, current, why)
        if why and not dry_run and not allow_outage:
            raise UsageError(f"{why}; to continue anyway, give --allow-outage")
        is_over = dry_run or (change.is_settled and not change.missing)
        if not is_over and not yes and not (sys.stdin.isatty() and click.confirm("Apply this?", err=True)):
            raise UsageError("nothing was changed; to apply the file without a question, give --yes")
        if not is_over:
            try:
                with progress:
                    applier.apply(change)
            except PushError as error:
                failure = error
        results = applier.results(change)
    if as_json:
        steps = {step.peer: _document(step, change) for step in change.plan.steps}
        print_json({"version": change.version, "changes": steps, "outage": why or None, "peers": results})
    elif not is_over:
        _print_results(results)
    if failure is not None:
        raise failure
    if change.missing:
        names = ", ".join(map(printable, change.missing))
        again = "apply their bundle with --bundle" if rollback else "run the same command again"
        warn(f"{names}: not reached; {again} when all peers of the file answer")
        raise SystemExit(DEGRADED)


def _show(change: Change, new: PeersFile, current: PeersFile, outage: str) -> None:
    """Show the difference between the fleet and the file, and why requests may fail during the change."""
    if change.plan.steps:
        table = PlainTable("peer", "change", "gains", "loses", ">size")
        for step in change.plan.steps:
            gains, loses = (name_blocks(parts) if parts else "" for parts in (step.gained, step.lost))
            table.add_row(step.peer, _KINDS[step.kind], gains, loses, byte_size(change.sends[step.peer]))
        print_table(table)
        if change.other_model:
            click.echo(
                f"{change.other_model}: sources without a bundle use the new model once peers serve all of it; "
                "restart the others with the new bundle"
            )
        if any(change.plan.holders.values()):
            always = min(min(counts.values(), default=0) for counts in change.plan.holders.values())
            click.echo(f"meanwhile every block has at least {counted(always, 'holder')}" if always else outage)
    else:
        click.echo(f"the peers that answer run {new.path}, version {change.version}")
    names = [{entry.name: entry for entry in file.sources} for file in (current, new)]
    for name in sorted(names[0].keys() | names[1].keys()):
        if names[0].get(name) != names[1].get(name):
            what = "added" if name not in names[0] else "removed" if name not in names[1] else "changed"
            click.echo(f"source {name}: {what}")
    for name, why in change.missing.items():
        warn(f"{name} does not answer: {why}")


def _document(step: Step, change: Change) -> dict[str, object]:
    gained, lost = (shown_parts(sorted(parts)) for parts in (step.gained, step.lost))
    holders = {str(ENDS.get(part, part)): count for part, count in sorted(change.plan.holders[step.peer].items())}
    return {
        "change": step.kind,
        "gains": gained,
        "loses": lost,
        "bytes": change.sends[step.peer],
        "holders": holders,
    }


def _print_results(results: Mapping[str, PushResult]) -> None:
    """Print a row for each peer."""
    table = PlainTable("peer", "state", ">parts", ">size", ">sent", "why")
    for name, one in results.items():
        state = Text(printable(one.state), style=_STYLES.get(one.state, ""))
        table.add_row(name, state, f"{one.parts}", byte_size(one.bytes), byte_size(one.sent_bytes), one.reason or "")
    print_table(table)
