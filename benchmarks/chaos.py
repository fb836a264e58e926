"""``python -m benchmarks chaos``: answer images while peers are killed, stopped, hung, cut off and lied to."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.logs import set_up
from ls_edge.data.datasets import open_data
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.routing.policies import POLICIES
from tests.faults.course import COURSE_LIES, KINDS, LIE_TEXTS, Fault
from tests.faults.suite import ChaosResult, ChaosSettings, run_chaos


class _Chaos(click.Command):
    """Command with the kinds of faults in its help, and errors in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and exit with its code."""
        try:
            ctx.exit(super().invoke(ctx))
        except LsEdgeError as error:
            failure = click.ClickException(str(error))
            failure.exit_code = error.exit_code
            raise failure from None

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the kinds of faults and lies after the text."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Kinds of faults"):
            formatter.write_dl(list(KINDS.items()))
        with formatter.section("Lies of a liar"):
            formatter.write_dl([(name, LIE_TEXTS[name]) for name in COURSE_LIES])


@click.command(cls=_Chaos)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--other-bundle", type=click.Path(path_type=Path), help="A bundle of another model, for that fault.")
@click.option("--data", default="digits", show_default=True, help="Folder of class folders, a tar of one, or 'digits'.")
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="Images per seed.")
@click.option("--faults", type=click.IntRange(min=0), default=20, show_default=True, help="Faults per seed.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=25.0,
    show_default=True,
    help="Length of the course.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The first seed.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Number of seeds.")
@click.option(
    "--policy", type=click.Choice([p.name for p in POLICIES.values() if p.may_skip and not p.needs_order_costs]),
    default="nearest", show_default=True, help="Policy of the source.",
)  # fmt: skip
@click.option(
    "--block-ms", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Least time of an engine call, as on slower boards.",
)  # fmt: skip
@click.option("--kinds", default="", help="Comma-separated kinds of faults.  [default: all]")
@click.option("--lies", default="", help="Comma-separated lies of the kind liar.  [default: all]")
@click.option("--keys", is_flag=True, help="Encrypt links: every process gets a key.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    bundle: Path, other_bundle: Path | None, data: str, requests: int, faults: int, seconds: float, seed: int,
    seeds: int, policy: str, block_ms: float, kinds: str, lies: str, keys: bool, as_json: bool,
) -> int:  # fmt: skip
    """Serve BUNDLE with four local peers, send images, and inject faults at random times.

    Every block is held by two peers. Faults come in rounds of all kinds; the seed decides their times and peers, and
    each fault is undone after a while. A liar is listed in peers.yaml and holds every block, or is a source.

    Exit code 1 if a request was lost, failed, was answered twice or does not replay, if a peer ended on its own, or if
    an audit blamed the wrong peer. Answers that a liar spoiled with wrong tokens are counted separately: in a course
    with such a liar, every answer is audited, and the audit must name it.
    """
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
    """Read all parts of both bundles and check that they are of two models."""
    opened = [Bundle.open(path) for path in (bundle, other) if path is not None]
    for each in opened:
        for name, _ in each.manifest.part_names():
            each.read(name)
    if len({each.manifest.model_id for each in opened}) < len(opened):
        raise UsageError(f"--other-bundle {other} is of the model of {bundle}; give one of another model")


def _print(results: list[ChaosResult]) -> None:
    rows = [
        {
            "seed": r.seed, "requests": r.requests, "faults": len(r.faults), "answered": r.answered,
            "in waves": r.in_waves, "failed": ", ".join(f"{count} {name}" for name, count in r.failed.items()) or 0,
            "lost": r.lost, "twice": r.twice, "not replayed": r.not_replayed, "spoiled": r.spoiled,
            "ended": ", ".join(r.ended) or 0,
            "p50": f"{r.latency_ms['p50']:.0f} ms", "max": f"{r.latency_ms['p100']:.0f} ms",
        }
        for r in results
    ]  # fmt: skip
    seldom = {"in waves": any(r.in_waves for r in results), "spoiled": any(r.spoiled for r in results)}
    shown = [heading for heading in rows[0] if seldom.get(heading, True)]
    table = PlainTable(box=None)
    for heading in shown:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(str(row[heading]) for heading in shown))
    print_table(table)
    for r in results:
        if r.spoiled:
            click.echo(f"seed {r.seed}: a liar's wrong tokens spoiled {r.spoiled} answers; the audit named {_named(r)}")


def _named(result: ChaosResult) -> str:
    found = [f"{name} ({one.named} times, as one of several {one.one_of})" for name, one in result.suspects.items()]
    return ", ".join(found) or "nobody"


def _chosen(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chosen names of a list, or all of them."""
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for one in chosen:
        if one not in known:
            raise UsageError(f"{flag}: {one!r} is not known; use one or several of {', '.join(known)}")
    return chosen or known
