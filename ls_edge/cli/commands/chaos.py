"""``ls-edge chaos``: what becomes of requests when everything goes wrong, and when a member lies."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ls_edge.cli.command import Command
from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.policies import POLICIES

if TYPE_CHECKING:
    from ls_edge.runtime.chaos.plan import Fault
    from ls_edge.runtime.chaos.suite import ChaosResult


class _Chaos(Command):
    """With what there is to choose from in its help."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists after the text."""
        from ls_edge.runtime.chaos.kinds import COURSE_LIES, KINDS, LIE_TEXTS

        super().format_help_text(ctx, formatter)
        with formatter.section("Kinds of faults"):
            formatter.write_dl(list(KINDS.items()))
        with formatter.section("Lies of a liar"):
            formatter.write_dl([(name, LIE_TEXTS[name]) for name in COURSE_LIES])


@click.command(
    cls=_Chaos,
    short_help="Answer images while peers are killed, stopped, cut off and lied to.",
    examples=(
        "ls-edge chaos bundle --requests 300 --faults 10",
        "ls-edge chaos bundle --policy parallel --block-ms 5 --seeds 5 --json",
        "ls-edge chaos bundle --kinds liar --lies unreachable,wrong --keys",
    ),
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--other-bundle", type=click.Path(path_type=Path), help="A bundle of another model, for that fault.")
@click.option("--data", default="digits", show_default=True, help="Folder of class folders, a tar of one, or 'digits'.")
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="Images a seed.")
@click.option("--faults", type=click.IntRange(min=0), default=20, show_default=True, help="Faults a seed.")
@click.option("--seconds", type=click.FloatRange(min=1), default=25.0, show_default=True, help="Over which they come.")
@click.option("--seed", type=int, default=0, show_default=True, help="The first seed.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="How many seeds, one by one.")
@click.option(
    "--policy", type=click.Choice([p.name for p in POLICIES.values() if p.may_skip and not p.needs_order_costs]),
    default="nearest", show_default=True, help="How the next block is chosen.",
)  # fmt: skip
@click.option(
    "--block-ms", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Least time of an engine call, as on slower boards.",
)  # fmt: skip
@click.option("--kinds", default="", help="Kinds of faults, with commas between.  [default: all]")
@click.option("--lies", default="", help="Lies of the kind liar, with commas between.  [default: all]")
@click.option("--keys", is_flag=True, help="Give everybody a key, and so encrypted links.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    bundle: Path, other_bundle: Path | None, data: str, requests: int, faults: int, seconds: float, seed: int,
    seeds: int, policy: str, block_ms: float, kinds: str, lies: str, keys: bool, as_json: bool,
) -> int:  # fmt: skip
    """Serve BUNDLE by four local peers, send images, and let faults come at random times.

    Every block is held by two peers. Faults come in rounds of all kinds, at times and to peers that the seed decides,
    and each is undone after a while. A liar has a place in peers.yaml and holds every block, or is a source.

    Exit code 1 where a request was lost, failed, was answered twice or does not replay, where a peer ended by itself,
    or where an audit blamed the wrong one. Answers that a liar spoilt with wrong tokens count apart: in a course with
    one, every answer is audited, and the audit must name it.
    """
    import msgspec
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ls_edge.core.logs import set_up
    from ls_edge.data.datasets import open_data
    from ls_edge.report.terminal import open_console
    from ls_edge.runtime.chaos.kinds import COURSE_LIES, KINDS
    from ls_edge.runtime.chaos.suite import ChaosSettings, run_chaos

    chosen_kinds = _chosen("--kinds", kinds, tuple(KINDS))
    chosen_lies = _chosen("--lies", lies, COURSE_LIES)
    if "other_bundle" in chosen_kinds and kinds and other_bundle is None:
        raise UsageError("--kinds other_bundle needs --other-bundle, a bundle of another model")
    settings = ChaosSettings(
        requests=requests, faults=faults, seconds=seconds, policy=policy, block_ms=block_ms, kinds=chosen_kinds,
        lies=chosen_lies, keys=keys,
    )  # fmt: skip
    set_up(as_json=False, level=50)
    images = open_data(data, "eval")
    _check_bundles(bundle, other_bundle)
    console = open_console(stderr=True)
    results: list[ChaosResult] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[fault]}"),
        console=console,
    ) as progress:  # fmt: skip
        for number in range(seed, seed + seeds):
            task = progress.add_task(f"seed {number}", total=requests, fault="")

            def on_fault(fault: Fault, task: int = task) -> None:
                progress.update(progress.task_ids[task], fault=f"{fault.lie or fault.kind} {fault.peer}")

            def on_answer(task: int = task) -> None:
                progress.advance(progress.task_ids[task])

            with tempfile.TemporaryDirectory(prefix="ls-edge-chaos-") as folder:
                course = dataclasses.replace(settings, seed=number)
                results.append(run_chaos(bundle, other_bundle, images, Path(folder), course, on_fault, on_answer))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(results), indent=1).decode())
    else:
        _print(results)
    return 0 if all(result.holds for result in results) else 1


def _check_bundles(bundle: Path, other: Path | None) -> None:
    """Read all parts of both once, and see that they are bundles of two models."""
    from ls_edge.core.bundle import Bundle
    from ls_edge.core.errors import UsageError

    opened = [Bundle.open(path) for path in (bundle, other) if path is not None]
    for each in opened:
        for name, _ in each.manifest.part_names():
            each.read(name)
    if len({each.manifest.model_id for each in opened}) < len(opened):
        raise UsageError(f"--other-bundle {other} is of the model of {bundle}; give one of another model")


def _print(results: list[ChaosResult]) -> None:
    from ls_edge.report.terminal import PlainTable, print_table

    rows = [
        {
            "seed": r.seed, "requests": r.requests, "faults": len(r.faults), "answered": r.answered,
            "in waves": r.in_waves, "failed": ", ".join(f"{count} {name}" for name, count in r.failed.items()) or 0,
            "lost": r.lost, "twice": r.twice, "not replayed": r.not_replayed, "spoilt": r.spoilt,
            "ended": ", ".join(r.ended) or 0,
            "p50": f"{r.latency_ms['p50']:.0f} ms", "max": f"{r.latency_ms['p100']:.0f} ms",
        }
        for r in results
    ]  # fmt: skip
    seldom = {"in waves": any(r.in_waves for r in results), "spoilt": any(r.spoilt for r in results)}
    shown = [heading for heading in rows[0] if seldom.get(heading, True)]
    table = PlainTable(box=None)
    for heading in shown:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(str(row[heading]) for heading in shown))
    print_table(table)
    for r in results:
        if r.spoilt:
            click.echo(f"seed {r.seed}: a liar's wrong tokens spoilt {r.spoilt} answers; the audit named {_named(r)}")


def _named(result: ChaosResult) -> str:
    found = [f"{name} ({one.named} times, as one of several {one.one_of})" for name, one in result.suspects.items()]
    return ", ".join(found) or "nobody"


def _chosen(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """What was chosen of a list; all of it where nothing was."""
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for one in chosen:
        if one not in known:
            raise UsageError(f"{flag}: {one!r} is not known; use one or several of {', '.join(known)}")
    return chosen or known
