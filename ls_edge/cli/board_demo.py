"""``ls-edge demo --boards``: profile, push, plan, run and compare on boards that are emulated on this machine."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ls_edge.cli.command import DEGRADED
from ls_edge.core.errors import LsEdgeError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ls_edge.runtime.fleet.emulated_boards import EmulatedBoard

SOURCE = "laptop"


def board_demo(
    out: Path, kinds: Sequence[str], bundle: Path | None, limit: int, console: Console, *, slowdown: float = 1.0
) -> dict[str, Any]:
    """Plan for emulated boards on the loopback, push to them, run the plan, and return plan and measurements.

    Without a ``bundle``, export an untrained one. ``slowdown`` makes the boards this many times slower.
    """
    from ls_edge.api.comparison import side_by_side
    from ls_edge.core.bundle import Bundle
    from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
    from ls_edge.runtime.fleet.emulated_boards import BoardCluster, emulated_boards, emulated_profile
    from ls_edge.runtime.fleet.planning.document import PlanDocument

    boards = emulated_boards(kinds, slowdown)
    folder = bundle or _untrained_bundle(out, console)
    console.print("\nemulated boards: engines on this machine, paced to published results", style="bold cyan")
    for board in boards:
        console.print(f"   {board.name}: {board.block_ms:.2f} ms a block, by {board.source}")
    opened = Bundle.open(folder)
    measured = profile_bundle(opened, MeasuredDevice("here"), duration=1.0, threads=1)
    profiles = []
    for board in boards:
        profiles.append(out / f"{board.name}.json")
        profiles[-1].write_bytes(msgspec.json.encode(emulated_profile(measured, board)))
    plan, links, planned = out / "plan.json", out / "links.json", out / "planned.yaml"
    files = [plan]
    if (out / "boards").is_dir():  # of an earlier demo, with its keys and stores
        shutil.rmtree(out / "boards")
    with BoardCluster(out / "boards", folder, _spread(boards, opened.num_blocks), boards, SOURCE) as cluster:
        keys = ["--secret-key", cluster.secret_key(SOURCE)]
        cluster.wait_settled()
        run_command(console, "push", "--bundle", folder, *keys, "--peers", cluster.path)
        run_command(console, "profile", folder, "--links", "--peers", cluster.path, "--out", links, *keys)
        words = ["plan", "--bundle", folder, "--profiles", *profiles, "--links", links, "--objective", "throughput"]
        words += ["--peers", cluster.path, "--out", planned, "--overwrite", "--json"]
        plan.write_text(run_command(console, *words), encoding="utf-8")
        document = msgspec.json.decode(plan.read_bytes(), type=PlanDocument)
        console.print(f"plan: {document.recommendation}, {document.reason}")
        console.print("restarting the boards with the peers.yaml of the plan")
        cluster.restart_with(planned)
        cluster.wait_settled()
        run_command(console, "push", "--bundle", folder, *keys, "--peers", planned)
        ends_on_boards = any("stem" in parts for parts in document.placement.values())
        model = [] if ends_on_boards else ["--bundle", folder]
        for name, concurrency in (("run-alone", 1), ("run-many", document.concurrency)):
            words = ["run", "--peers", planned, *model, "--data", "digits", "--limit", limit, "--json"]
            words += ["--policy", document.policy or "nearest", "--concurrency", concurrency, *keys]
            files.append(out / f"{name}.json")
            files[-1].write_text(run_command(console, *words), encoding="utf-8")
    return {
        "plan": document,
        "compared": side_by_side(files),
        "files": [str(path) for path in files],
    }


def _spread(boards: Sequence[EmulatedBoard], num_blocks: int) -> dict[str, range]:
    """Return the blocks of each board before there is a plan: about the same number for each."""
    if num_blocks < len(boards):
        raise UsageError(f"{len(boards)} boards are more than the model has blocks; name at most {num_blocks}")
    from ls_edge.runtime.fleet.local_cluster import even_parts

    parts = even_parts(num_blocks, len(boards))
    return {board.name: part for board, part in zip(boards, parts, strict=True)}


def _untrained_bundle(out: Path, console: Console) -> Path:
    """Export the small vision transformer of the demo untrained: accuracy does not matter for timing."""
    run, bundle = out / "untrained", out / "untrained-bundle"
    if not (bundle / "manifest.json").is_file():
        words = ["--epochs", 0, "--method", "shuffle", "--overwrite", "--out", run]
        run_command(console, "train", "--data", "digits", *words)
        run_command(console, "export", run, "--out", bundle, "--per-block")
    return bundle


def run_command(console: Console, *words: object) -> str:
    """Run ``ls-edge`` as a user would and return its standard output; its messages go to standard error."""
    text = [str(word) for word in words]
    console.print(f"$ ls-edge {shlex.join(text)}", style="bold")
    done = subprocess.run(  # noqa: S603  our own interpreter and arguments
        [sys.executable, "-m", "ls_edge", *text],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode not in (0, DEGRADED):
        raise LsEdgeError(f"'ls-edge {text[0]}' ended with exit code {done.returncode}; its messages are above")
    return done.stdout


def check_boards(text: str) -> list[str]:
    """Split ``--boards``; raise :class:`UsageError` if it names no board."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    if not kinds:
        raise UsageError("--boards names no board; write for example orin-nano,orin-nano,orin-nano-super")
    return kinds
