"""``ls-edge demo``: train, export, serve and measure on the embedded digits, by the commands that a user would type.

Training, evaluation and export are run as the real commands and shown; the peers are real processes on the loopback,
and one of them is really killed while images are on their way. No process is left behind, also after Ctrl-C.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ls_edge.cli.command import Command
from ls_edge.core.errors import LsEdgeError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ls_edge.report.html import Run
    from ls_edge.runtime.fleet.local_cluster import LocalCluster

PLACEMENT = {"anna": [0, 1, 2, 3, 4], "ben": [3, 4, 5, 6, 7], "cleo": [0, 1, 2, 5, 6, 7]}
"""Three peers; every block is held by two of them, none holds all."""

PRETRAIN_EPOCHS, SHUFFLE_EPOCHS = 20, 20


@dataclass(frozen=True)
class Scene:
    """One run of images through the peers."""

    name: str
    model: str
    policy: str = "nearest"
    kill: str = ""
    """Peer that is killed after a third of the answers and started again after another third."""
    lost: tuple[str, ...] = ()
    """Peers that are not there at all."""
    max_skips: int | None = None
    rounds: int = 1
    """How often all images are answered."""


SCENES = (
    Scene("shuffled, a peer killed", "shuffled", kill="ben", rounds=5),
    Scene("shuffled, random order", "shuffled", policy="random"),
    Scene("shuffled, one peer left", "shuffled", lost=("ben", "cleo"), max_skips=3),
    Scene("unshuffled, trained order", "unshuffled"),
    Scene("unshuffled, random order", "unshuffled", policy="random"),
)


@click.command(
    cls=Command,
    short_help="Train, export, serve and measure on embedded data, with a peer killed on the way.",
    examples=(
        "ls-edge demo",
        "ls-edge demo --out /tmp/demo --limit 100",
        "ls-edge demo --boards orin-nano,orin-nano,orin-nano-super",
    ),
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("demo-out"), show_default=True,
    help="Folder for models, bundles and the report.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=10), default=359, show_default=True, help="Images a run.")
@click.option(
    "--boards", metavar="NAME,...",
    help="Instead: plan for emulated boards, orin-nano, orin-nano-super or a profile.json, and try the plan on them.",
)  # fmt: skip
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="With --boards: what they serve; else an untrained one."
)
@click.option(
    "--slowdown", type=click.FloatRange(min=1, max=1000), default=1.0, show_default=True,
    help="Factor on the times of all boards; use it if the cores of this machine are too slow.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Train again even where OUT has models from an earlier demo.")
def command(out: Path, limit: int, boards: str | None, bundle: Path | None, slowdown: float, fresh: bool) -> int:
    """Fine-tune a small vision transformer with shuffled block order, cut it into one engine a block, serve the blocks
    by three peer processes, answer real images while one of the peers is killed, and do the same with a model that was
    trained without shuffling.

    Ends with a table and OUT/report.html. Takes a few minutes on two cores.

    With --boards: engines on this machine are paced to the published throughput of boards, linked by the loopback.
    Memory and power are not emulated, and the boards share these cores.
    """  # noqa: D205
    if boards is not None:
        return _boards(out, boards, bundle, limit, slowdown)
    if bundle is not None:
        raise UsageError("--bundle is for --boards; leave it out, or add --boards")
    from ls_edge.report.tables import comparison_table
    from ls_edge.report.terminal import open_console, print_table

    console = open_console(stderr=True)
    _check_installed()
    started = time.monotonic()
    _make_folder(out)
    accuracy = _models(out, console, fresh=fresh)
    runs = [_run_scene(scene, out, limit, console) for scene in SCENES]
    _write_charts(out / "pictures", runs)
    from ls_edge.report.html import write_comparison

    report = out / "report.html"
    write_comparison(
        report, runs, title="ls-edge demo: one vision transformer on three peers", lede=_headline(accuracy)
    )  # fmt: skip
    document = {
        "accuracy": accuracy,
        "runs": {name: json.loads(summary.to_json()) for name, summary, _, _ in runs},
        "seconds": round(time.monotonic() - started, 1),
    }
    (out / "demo.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    _print_accuracy(accuracy)
    print_table(comparison_table([(name, summary) for name, summary, _, _ in runs]))
    console.print(f"\nreport: {report}    figures: {out / 'demo.json'}    {document['seconds']:.0f} s", soft_wrap=True)
    return 0


def _boards(out: Path, boards: str, bundle: Path | None, limit: int, slowdown: float) -> int:
    from ls_edge.cli.board_demo import board_demo, check_boards
    from ls_edge.report.terminal import open_console

    kinds = check_boards(boards)
    _make_folder(out)
    console = open_console(stderr=True)
    found = board_demo(out, kinds, bundle, limit, console, slowdown=slowdown)
    (out / "boards.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    _ls_edge(console, "report", *found["files"])
    console.print(f"\nfigures: {out / 'boards.json'}", soft_wrap=True)
    return 0


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made: {error.strerror}; name another folder") from None


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold cyan", soft_wrap=True)


def _write_charts(folder: Path, runs: list[Run]) -> None:
    """The charts of the report that the README shows, as files."""
    from ls_edge.report.charts import write_comparison_picture, write_picture

    folder.mkdir(exist_ok=True)
    write_comparison_picture(folder / "accuracy.svg", [(name, summary) for name, summary, _, _ in runs])
    _, summary, records, events = runs[0]
    for kind in ("over-time", "served", "stages"):
        write_picture(folder / f"{kind}.svg", kind, summary, records, events)


def _check_installed() -> None:
    import importlib.util

    missing = [
        name
        for name in ("torch", "timm", "onnx", "onnxruntime", "altair", "jinja2", "vl_convert")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        from ls_edge.device.requirements import install_command

        raise UsageError(
            f"the demo trains, exports and draws a report, which needs {', '.join(missing)}; to install them: "
            f"{install_command('export', 'report', 'cpu')}"
        )


def _models(out: Path, console: Console, *, fresh: bool) -> dict[str, Any]:
    """Train, evaluate and export both models; return their ``eval`` documents."""
    unshuffled, shuffled = out / "unshuffled", out / "shuffled"
    _heading(console, "1. Train: a vision transformer as usual, then fine-tune it with its block order shuffled")
    if fresh or not (shuffled / "metrics.jsonl").exists():
        train = ["train", "--data", "digits", "--overwrite"]
        _ls_edge(console, *train, "--method", "sequential", "--epochs", str(PRETRAIN_EPOCHS), "--out", str(unshuffled))
        _ls_edge(
            console, *train, "--method", "shuffle", "--epochs", str(SHUFFLE_EPOCHS), "--init", str(unshuffled),
            "--out", str(shuffled),
        )  # fmt: skip
    else:
        console.print(f"the models of an earlier demo are used again: {unshuffled}, {shuffled}")
    _heading(console, "2. Evaluate: blocks in trained order, in 64 random orders, and with some missing")
    accuracy = {}
    for run in (unshuffled, shuffled):
        accuracy[run.name] = json.loads(_ls_edge(console, "eval", str(run), "--data", "digits", "--json", quiet=True))
        a = accuracy[run.name]
        console.print(
            f"   {run.name}: trained order {a['sequential']['top1']:.1%}, random order "
            f"{a['arbitrary']['top1_mean']:.1%} ± {a['arbitrary']['top1_std']:.1%}"
        )
    _heading(console, "3. Export: one ONNX engine for the stem, the head and each block, verified against PyTorch")
    for run in (unshuffled, shuffled):
        _ls_edge(console, "export", str(run), "--out", str(out / f"{run.name}-bundle"), "--per-block")
    _heading(console, "4. Run: three peer processes, real images over ZeroMQ")
    return accuracy


def _ls_edge(console: Console, *arguments: str, quiet: bool = False) -> str:
    """Run a command as a user would; return what it printed to standard output."""
    console.print(f"$ ls-edge {shlex.join(arguments)}", style="bold", soft_wrap=True)
    done = subprocess.run(  # noqa: S603  our own interpreter and arguments
        [sys.executable, "-m", "ls_edge", *arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise LsEdgeError(f"'ls-edge {arguments[0]}' ended with exit code {done.returncode}; its messages are above")
    if not quiet and done.stdout.strip():
        console.print(done.stdout.rstrip(), soft_wrap=True)
    return done.stdout


def _run_scene(scene: Scene, out: Path, limit: int, console: Console) -> Run:
    """Serve the scene's model and answer ``limit`` images."""
    from ls_edge.data.datasets import open_data
    from ls_edge.evaluation.run_summary import summarise
    from ls_edge.report.progress import RunProgress
    from ls_edge.runtime.fleet.local_cluster import LocalCluster
    from ls_edge.runtime.source.run_dataset import run_dataset
    from ls_edge.runtime.source.source import Source

    bundle = out / f"{scene.model}-bundle"
    folder = out / "peers" / scene.name.replace(",", "").replace(" ", "-")
    console.print(f"\n{scene.name}", style="bold")
    with LocalCluster(folder, bundle, PLACEMENT) as peers:
        peers.wait_warm()
        images = open_data("digits", "eval").take(limit * scene.rounds)
        progress = RunProgress(len(images), PLACEMENT, console=console, label=scene.name)
        with Source.open(
            peers.path, bundle, policy=scene.policy, max_skips=scene.max_skips, budget_ms=10_000,
            on_event=progress.event,
        ) as source:  # fmt: skip
            source.wait_ready()
            for name in scene.lost:
                peers.kill(name)
            on_answer = _fault_schedule(scene, peers, len(images), progress.note)

            def on_record(record: Any) -> None:
                progress.record(record)
                on_answer()

            with progress:
                measured = run_dataset(source, images, concurrency=2, on_record=on_record)
    if measured.error is not None:
        raise measured.error
    summary = summarise(measured.records, measured.events, measured.context)
    return scene.name, summary, measured.records, measured.events


def _fault_schedule(scene: Scene, peers: LocalCluster, limit: int, note: Callable[[str], None]) -> Callable[[], None]:
    """Return what is called after each answer; it kills the scene's peer and starts it again."""
    answers = 0

    def step() -> None:
        nonlocal answers
        answers += 1
        if scene.kill and answers == limit // 3:
            peers.signal(scene.kill, signal.SIGKILL)
            note(f"SIGKILL to {scene.kill} after {answers} answers")
        elif scene.kill and answers == limit // 2:
            peers.processes[scene.kill].wait(5)
            peers.start(scene.kill)
            note(f"{scene.kill} started again after {answers} answers")

    return step


def _headline(accuracy: dict[str, Any]) -> str:
    shuffled, unshuffled = accuracy["shuffled"], accuracy["unshuffled"]
    return (
        f"In random block order the model fine-tuned with shuffling keeps {shuffled['arbitrary']['top1_mean']:.1%} of "
        f"{shuffled['sequential']['top1']:.1%}; the same model without it falls from "
        f"{unshuffled['sequential']['top1']:.1%} to {unshuffled['arbitrary']['top1_mean']:.1%}."
    )


def _print_accuracy(accuracy: dict[str, Any]) -> None:
    from ls_edge.report.terminal import PlainTable, print_table

    table = PlainTable("ls-edge eval", box=None)
    for heading in ("model", "trained order", "random order", "worst order"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, document in accuracy.items():
        arbitrary = document["arbitrary"]
        table.add_row(
            name, f"{document['sequential']['top1']:.1%}",
            f"{arbitrary['top1_mean']:.1%} ± {arbitrary['top1_std']:.1%}", f"{arbitrary['top1_worst']:.1%}",
        )  # fmt: skip
    print_table(table)
