"""``ls-edge chaos``: what becomes of requests when everything goes wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ls_edge.cli import Command

if TYPE_CHECKING:
    from ls_edge.runtime.chaos.suite import ChaosResult, Fault


@click.command(
    cls=Command,
    short_help="Answer images while peers are killed, stopped, hung and cut off.",
    examples=(
        "ls-edge chaos bundle --requests 300 --faults 10",
        "ls-edge chaos bundle --policy parallel --seeds 5 --json",
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
    "--policy", type=click.Choice(["nearest", "fastest", "random", "parallel"]), default="nearest", show_default=True,
    help="How the next block is chosen.",
)  # fmt: skip
@click.option(
    "--block-ms", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Least time of an engine call, as on slower boards.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    bundle: Path, other_bundle: Path | None, data: str, requests: int, faults: int, seconds: float, seed: int,
    seeds: int, policy: str, block_ms: float, as_json: bool,
) -> int:  # fmt: skip
    """Serve BUNDLE by four local peers, send images, and let faults come at random times.

    Peers are killed, stopped, restarted with another model, their engines hang and crawl, their links go half open,
    garbage arrives, clocks jump, and all of them go away at once; each fault is undone after a while. Every block is
    held by two peers. Exit code 1 where a request was lost, failed, was answered twice or does not replay.
    """
    import msgspec
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ls_edge.datasets import open_data
    from ls_edge.logs import set_up
    from ls_edge.report.terminal import open_console
    from ls_edge.runtime.chaos.suite import run_chaos

    set_up(as_json=False, level=50)
    images = open_data(data, "eval")
    console = open_console(stderr=True)
    results: list[ChaosResult] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[fault]}"),
        console=console,
    ) as progress:  # fmt: skip
        for number in range(seed, seed + seeds):
            task = progress.add_task(f"seed {number}", total=requests, fault="")

            def on_fault(fault: Fault, task: int = task) -> None:
                progress.update(progress.task_ids[task], fault=f"{fault.kind} {fault.peer}")

            def on_answer(task: int = task) -> None:
                progress.advance(progress.task_ids[task])

            with tempfile.TemporaryDirectory(prefix="ls-edge-chaos-") as folder:
                results.append(
                    run_chaos(
                        bundle,
                        other_bundle,
                        images,
                        Path(folder),
                        seed=number,
                        requests=requests,
                        faults=faults,
                        seconds=seconds,
                        policy=policy,
                        block_ms=block_ms,
                        on_fault=on_fault,
                        on_answer=on_answer,
                    )
                )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(results), indent=1).decode())
    else:
        _print(results)
    return 0 if all(result.holds for result in results) else 1


def _print(results: list[ChaosResult]) -> None:
    from ls_edge.report.terminal import PlainTable, print_table

    rows = [
        {
            "seed": r.seed, "requests": r.requests, "faults": len(r.faults), "answered": r.answered,
            "in waves": r.in_waves, "failed": ", ".join(f"{count} {name}" for name, count in r.failed.items()) or 0,
            "lost": r.lost, "twice": r.twice, "not replayed": r.not_replayed,
            "p50": f"{r.latency_ms['p50']:.0f} ms", "max": f"{r.latency_ms['p100']:.0f} ms",
        }
        for r in results
    ]  # fmt: skip
    shown = [heading for heading in rows[0] if heading != "in waves" or any(r.in_waves for r in results)]
    table = PlainTable(box=None)
    for heading in shown:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(str(row[heading]) for heading in shown))
    print_table(table)
