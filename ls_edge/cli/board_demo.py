"""``ls-edge demo --boards``: profile, plan, serve, run and compare on boards that are emulated on this machine."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ls_edge.errors import LsEdgeError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ls_edge.runtime.emulated_boards import EmulatedBoard
    from ls_edge.runtime.local_cluster import PeerCluster

MBIT = 1000
"""Of the cables between emulated boards."""
SOURCE = "laptop"


def board_demo(
    out: Path, kinds: Sequence[str], bundle: Path | None, limit: int, console: Console, *, slowdown: float = 1.0
) -> dict[str, Any]:
    """Plan for emulated boards, serve the plan on them, run it, and return what was planned and measured.

    Without a ``bundle`` an untrained one is made. The boards stand in network namespaces with cables of a gigabit where
    this user may make them, else on the loopback. ``slowdown`` makes boards and cables this many times slower.
    """
    from ls_edge.bundle import Bundle
    from ls_edge.engines.profiling import profile_bundle
    from ls_edge.runtime.emulated_boards import emulated_boards, emulated_profile

    boards = emulated_boards(kinds, slowdown)
    folder = bundle or _untrained_bundle(out, console)
    console.print("\nemulated boards: engines on this machine, paced to the figures of others", style="bold cyan")
    for board in boards:
        console.print(f"   {board.name}: {board.block_ms:.2f} ms a block, by {board.source}", soft_wrap=True)
    measured = profile_bundle(Bundle.open(folder), name="here", duration=1.0, threads=1)
    profiles = []
    for board in boards:
        profiles.append(out / f"{board.name}.json")
        profiles[-1].write_bytes(msgspec.json.encode(emulated_profile(measured, board)))
    plan = out / "plan.json"
    words = ["plan", "--bundle", folder, "--profiles", *profiles, "--objective", "throughput", "--json"]
    mbit = max(1, round(MBIT / slowdown))
    words += ["--mbit", mbit]
    plan.write_text(_command(console, [sys.executable, "-m", "ls_edge"], *words), encoding="utf-8")
    document = json.loads(plan.read_text(encoding="utf-8"))
    placement = {name: blocks for name, blocks in document["placement"].items() if blocks}
    console.print(f"plan: {document['recommendation']}, {document['reason']}", soft_wrap=True)
    files = [plan]
    if (out / "boards" / "peers.yaml").is_file():  # of an earlier demo, with its keys
        shutil.rmtree(out / "boards")
    with _cluster(out / "boards", folder, placement, boards, mbit, console) as (cluster, prefix, keys):
        for name, at_once in (("run-alone", 1), ("run-many", 4 * len(placement))):
            words = ["run", "--peers", cluster.path, "--bundle", folder, "--data", "digits", "--limit", limit, "--json"]
            words += ["--policy", document["policy"] or "nearest", "--concurrency", at_once, *keys]
            files.append(out / f"{name}.json")
            files[-1].write_text(_command(console, prefix, *words), encoding="utf-8")
    from ls_edge.report.side_by_side import side_by_side

    found = side_by_side(files)
    return {"plan": document, "compared": msgspec.to_builtins(found), "files": [str(path) for path in files]}


def _untrained_bundle(out: Path, console: Console) -> Path:
    """Export the small vision transformer of the demo as it starts: it knows nothing, and takes as long."""
    run, bundle = out / "untrained", out / "untrained-bundle"
    start = [sys.executable, "-m", "ls_edge"]
    if not (bundle / "manifest.json").is_file():
        train = ["train", "--data", "digits", "--epochs", 0, "--method", "shuffle", "--overwrite", "--out", run]
        _command(console, start, *train)
        _command(console, start, "export", run, "--out", bundle, "--per-block")
    return bundle


@contextlib.contextmanager
def _cluster(
    folder: Path, bundle: Path, placement: Mapping[str, Sequence[int]], boards: Sequence[EmulatedBoard],
    mbit: int, console: Console,
) -> Iterator[tuple[PeerCluster, list[str], list[object]]]:  # fmt: skip
    """Peers of the placement, paced; the words that start ``ls-edge`` beside them, and those of its key."""
    from ls_edge.runtime.chaos.namespaces import NamespaceCluster, Net, reason_to_skip
    from ls_edge.runtime.local_cluster import LocalCluster

    def paced(cluster: PeerCluster) -> PeerCluster:
        for board in boards:
            if board.name in placement:
                cluster.set_faults(board.name, board.pace)  # from the first call on, by which a peer warms up
        return cluster

    reason = reason_to_skip()
    if reason:
        console.print(f"links are the loopback, without a rate: {reason}", soft_wrap=True)
        with paced(LocalCluster(folder, bundle, placement)) as local:
            local.wait_warm()
            yield local, [sys.executable, "-m", "ls_edge"], []
        return
    with Net(*placement, SOURCE) as net:
        net.rate(mbit)
        with paced(NamespaceCluster(net, folder, bundle, placement, source=SOURCE)) as cluster:
            words = cluster.command(SOURCE)
            yield cluster, words, ["--secret-key", cluster.secret_key(SOURCE)]


def _command(console: Console, start: Sequence[str], *words: object) -> str:
    """Run ``ls-edge`` and return what it printed; its messages go to standard error."""
    text = [str(word) for word in words]
    console.print(f"$ ls-edge {shlex.join(text)}", style="bold", soft_wrap=True)
    done = subprocess.run([*start, *text], stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603  our own
    if done.returncode not in (0, 3):
        raise LsEdgeError(f"'ls-edge {text[0]}' ended with exit code {done.returncode}; its messages are above")
    return done.stdout


def check_boards(text: str) -> list[str]:
    """Split ``--boards``; raises :class:`UsageError` for none."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    if not kinds:
        raise UsageError("--boards names no board; write for example orin-nano,orin-nano,orin-nano-super")
    return kinds
