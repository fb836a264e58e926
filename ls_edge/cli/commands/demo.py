"""``ls-edge demo``: train, export, serve and measure on the embedded digits, with the commands that a user would type.

Training, evaluation and export run as commands, which are shown. The peers are processes on the loopback, and one of
them is killed during the run. No process is left behind, not even after Ctrl-C.
"""

from __future__ import annotations

import itertools
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import write_json
from ls_edge.core.errors import LsEdgeError
from ls_edge.core.records import RequestRecord
from ls_edge.core.text import counted, show_percent
from ls_edge.device.child import module_command
from ls_edge.device.requirements import require
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.report.evaluation import print_evaluations
from ls_edge.report.tables import comparison_table
from ls_edge.report.terminal import open_console, print_table

if TYPE_CHECKING:
    from ls_edge.report.html import Run

PLACEMENT = {"anna": [0, 1, 2, 3, 4], "ben": [3, 4, 5, 6, 7], "cleo": [0, 1, 2, 5, 6, 7]}
"""Blocks of three peers: each block has two holders, and no peer holds all blocks."""

EPOCHS = 20
"""Epochs of each of the two trainings."""


@dataclass(frozen=True)
class Scene:
    """A run of images through the peers."""

    name: str
    model: str
    policy: str = "nearest"
    kill: str = ""
    """Peer that is killed after a third of the answers and restarted after half of them."""
    lost: tuple[str, ...] = ()
    """Peers that are killed before the first image."""
    max_skips: int | None = None
    rounds: int = 1
    """Number of times that all images are answered."""


SCENES = (
    Scene("fine-tuned, a peer killed", "fine-tuned", kill="ben", rounds=5),
    Scene("fine-tuned, random order", "fine-tuned", policy="random"),
    Scene("fine-tuned, one peer left", "fine-tuned", lost=("ben", "cleo"), max_skips=3),
    Scene("usual, trained order", "usual"),
    Scene("usual, random order", "usual", policy="random"),
)


@click.command(
    cls=Command,
    examples=(
        "ls-edge demo",
        "ls-edge demo --out /tmp/demo --limit 100",
    ),
)
@options.output_folder("Folder for models, bundles, and the report.", default=Path("demo-out"))
@options.count("--limit", "Images per run.", least=10, default=359)
def command(out: Path, limit: int) -> None:
    """Train, export, serve, and measure on embedded data, with a peer killed on the way.

    Trains a small vision transformer as usual, fine-tunes it for any order of its blocks, exports one ONNX file per
    block, and serves the blocks by three peer processes. They classify images while one of them is killed. The model
    that was trained as usual does the same for comparison. Ends with a table and OUT/report.html, after a minute or
    two.
    """
    console = open_console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    require("the demo", "export", "report", "cpu")
    started = time.monotonic()
    accuracy = _models(out, console)
    runs = [_run_scene(scene, out, limit, console) for scene in SCENES]
    from ls_edge.report import charts
    from ls_edge.report.html import write_comparison
    from ls_edge.report.runs.statistics import RunData

    charts.write_svg(out / "over-time.svg", charts.latency_over_time(RunData(*runs[0][1:])))  # of the README
    report, title = out / "report.html", "ls-edge demo: one vision transformer on three peers"
    tuned, usual = (
        (show_percent(found.sequential.top1), show_percent(found.arbitrary.top1_mean))
        for found in (accuracy["fine-tuned"], accuracy["usual"])
    )
    lede = (
        f"In random order of the blocks the fine-tuned model has {tuned[1]} accuracy, in the trained order {tuned[0]}; "
        f"the model that was trained as usual falls from {usual[0]} to {usual[1]}."
    )
    write_comparison(report, runs, title=title, lede=lede)
    summaries = {name: summary for name, summary, _, _ in runs}
    seconds = round(time.monotonic() - started, 1)
    write_json(out / "demo.json", {"accuracy": accuracy, "runs": summaries, "seconds": seconds})
    print_evaluations(list(accuracy.values()), open_console())
    print_table(comparison_table(list(summaries.items())))
    console.print(f"\nreport: {report}    numbers: {out / 'demo.json'}    {seconds:.0f} s")


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold cyan")


def _models(out: Path, console: Console) -> dict[str, Evaluation]:
    """Train, evaluate and export both models; return their ``eval`` documents."""

    def show(*words: object) -> None:
        console.print(_run_command(console, *words).rstrip())

    usual, tuned = out / "usual", out / "fine-tuned"
    _heading(console, "1. Train a vision transformer as usual, then fine-tune it for any order of its blocks")
    if not (tuned / "config.yaml").exists() or (tuned / "resume.safetensors").exists():  # none, or a stopped training
        train = ["train", "--data", "digits", "--overwrite", "--epochs", EPOCHS]
        show(*train, "--method", "sequential", "--out", usual)
        show(*train, "--init", usual, "--out", tuned)
    else:
        console.print(f"using the models of an earlier demo in {out}; to train again, remove it")
    _heading(console, "2. Evaluate: blocks in trained order, in 64 random orders, and with some missing")
    accuracy = {}
    for run in (usual, tuned):
        printed = _run_command(console, "eval", run, "--data", "digits", "--json")
        accuracy[run.name] = msgspec.json.decode(printed, type=Evaluation)
    _heading(console, "3. Export: one ONNX engine for the stem, the head and each block, verified against PyTorch")
    for run in (usual, tuned):
        show("export", run, "--out", out / f"{run.name}-bundle", "--per-block")
    _heading(console, "4. Run: three peer processes, real images over ZeroMQ")
    return accuracy


def _run_scene(scene: Scene, out: Path, limit: int, console: Console) -> Run:
    """Serve the scene's model and answer ``limit`` images."""
    from ls_edge.data.datasets import open_data
    from ls_edge.evaluation.run_summary import summarize
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
            peers.path, bundle, policy=scene.policy, max_skips=scene.max_skips, on_event=progress.event
        ) as source:
            source.wait_ready()
            for name in scene.lost:
                peers.kill(name)
            counts = itertools.count(1)

            def on_record(record: RequestRecord) -> None:
                progress.record(record)
                answers = next(counts)
                if scene.kill and answers == len(images) // 3:
                    peers.kill(scene.kill)
                    progress.note(f"SIGKILL to {scene.kill} after {counted(answers, 'answer')}")
                elif scene.kill and answers == len(images) // 2:
                    peers.start(scene.kill)
                    progress.note(f"{scene.kill} started again after {counted(answers, 'answer')}")

            with progress:
                measured = run_dataset(source, images, concurrency=2, on_record=on_record)
    if measured.error is not None:
        raise measured.error
    summary = summarize(measured.records, measured.events, measured.context)
    return scene.name, summary, measured.records, measured.events


def _run_command(console: Console, *words: object) -> str:
    """Run ``ls-edge`` as a user would and return its standard output; its messages go to standard error."""
    text = [str(word) for word in words]
    console.print(f"$ ls-edge {shlex.join(text)}", style="bold")
    done = subprocess.run(  # noqa: S603  our own interpreter and arguments
        [*module_command("ls_edge"), *text],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise LsEdgeError(f"'ls-edge {text[0]}' ended with exit code {done.returncode}; its messages are above")
    return done.stdout
