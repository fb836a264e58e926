"""``ls-edge demo --boards``: profile, push, plan, run and compare on boards that are emulated on this machine."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ls_edge.core.errors import LsEdgeError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ls_edge.runtime.chaos.cpu_quota import CpuQuota
    from ls_edge.runtime.fleet.emulated_boards import EmulatedBoard
    from ls_edge.runtime.fleet.local_cluster import PeerCluster

MBIT = 1000
"""Of the cables between emulated boards."""
SOURCE = "laptop"
START_S = 60.0
"""Longest start of a peer, on a machine that does other things too."""


def board_demo(
    out: Path, kinds: Sequence[str], bundle: Path | None, limit: int, console: Console, *, slowdown: float = 1.0
) -> dict[str, Any]:
    """Plan for emulated boards, push to them, run the plan, and return what was planned and measured.

    Without a ``bundle`` an untrained one is made. The boards stand in network namespaces with cables of a gigabit where
    this user may make them, else on the loopback. ``slowdown`` makes boards and cables this many times slower.
    """
    from ls_edge.core.bundle import Bundle
    from ls_edge.engines.profiling import profile_bundle
    from ls_edge.runtime.fleet.emulated_boards import emulated_boards, emulated_profile

    boards = emulated_boards(kinds, slowdown)
    folder = bundle or _untrained_bundle(out, console)
    console.print("\nemulated boards: engines on this machine, paced to the figures of others", style="bold cyan")
    for board in boards:
        console.print(f"   {board.name}: {board.block_ms:.2f} ms a block, by {board.source}", soft_wrap=True)
    opened = Bundle.open(folder)
    measured = profile_bundle(opened, name="here", duration=1.0, threads=1)
    profiles = []
    for board in boards:
        profiles.append(out / f"{board.name}.json")
        profiles[-1].write_bytes(msgspec.json.encode(emulated_profile(measured, board)))
    mbit = max(1, round(MBIT / slowdown))
    plan, links, planned = out / "plan.json", out / "links.json", out / "planned.yaml"
    files = [plan]
    if (out / "boards").is_dir():  # of an earlier demo, with its keys and stores
        shutil.rmtree(out / "boards")
    with _cluster(out / "boards", folder, _spread(boards, opened.num_blocks), boards, mbit, console) as fleet:
        push = ["push", "--bundle", folder, *fleet.keys, "--peers"]
        _command(console, fleet.prefix, *push, fleet.cluster.path)
        words = ["profile", folder, "--links", "--peers", fleet.cluster.path, "--out", links, *fleet.keys]
        _command(console, fleet.prefix, *words)
        words = ["plan", "--bundle", folder, "--profiles", *profiles, "--links", links, "--objective", "throughput"]
        words += ["--peers", fleet.cluster.path, "--out", planned, "--json"]
        plan.write_text(_command(console, [sys.executable, "-m", "ls_edge"], *words), encoding="utf-8")
        document = json.loads(plan.read_text(encoding="utf-8"))
        console.print(f"plan: {document['recommendation']}, {document['reason']}", soft_wrap=True)
        console.print("the boards start again with the peers.yaml of the plan")
        fleet.take(planned)
        _command(console, fleet.prefix, *push, planned)
        for name, at_once in (("run-alone", 1), ("run-many", document["concurrency"])):
            words = ["run", "--peers", planned, "--bundle", folder, "--data", "digits", "--limit", limit, "--json"]
            words += ["--policy", document["policy"] or "nearest", "--concurrency", at_once, *fleet.keys]
            files.append(out / f"{name}.json")
            files[-1].write_text(_command(console, fleet.prefix, *words), encoding="utf-8")
    from ls_edge.report.side_by_side import side_by_side

    found = side_by_side(files)
    return {
        "plan": document, "compared": msgspec.to_builtins(found), "files": [str(path) for path in files],
        "cpu_quota": fleet.cores,
    }  # fmt: skip


def _spread(boards: Sequence[EmulatedBoard], num_blocks: int) -> dict[str, range]:
    """Blocks of each board before there is a plan: equal parts, one that is left over to the first ones."""
    each, more = divmod(num_blocks, len(boards))
    if not each:
        raise UsageError(f"{len(boards)} boards for {num_blocks} blocks; name at most {num_blocks} boards")
    ends = [0]
    for place in range(len(boards)):
        ends.append(ends[-1] + each + (place < more))
    return {board.name: range(ends[place], ends[place + 1]) for place, board in enumerate(boards)}


def _untrained_bundle(out: Path, console: Console) -> Path:
    """Export the small vision transformer of the demo as it starts: it knows nothing, and takes as long."""
    run, bundle = out / "untrained", out / "untrained-bundle"
    start = [sys.executable, "-m", "ls_edge"]
    if not (bundle / "manifest.json").is_file():
        train = ["train", "--data", "digits", "--epochs", 0, "--method", "shuffle", "--overwrite", "--out", run]
        _command(console, start, *train)
        _command(console, start, "export", run, "--out", bundle, "--per-block")
    return bundle


@dataclass(eq=False)
class _Fleet:
    """Peers on emulated boards that begin with empty stores."""

    cluster: PeerCluster
    prefix: list[str]
    """The words that start ``ls-edge`` beside them, and :attr:`keys` those of its key."""
    keys: list[object]
    quota: CpuQuota | None

    @property
    def cores(self) -> float | None:
        """Cores that each board may use; None for no limit."""
        return None if self.quota is None else self.quota.cores

    def limit(self) -> None:
        """Wait until the peers have started and put them under their limits."""
        self.cluster.wait_settled(timeout=START_S)
        for name, process in self.cluster.processes.items():
            if self.quota is not None and process.poll() is None:
                self.quota.add(name, process.pid)

    def take(self, path: Path) -> None:
        """Start the boards again with another ``peers.yaml``."""
        self.cluster.take(path)
        self.limit()


@contextlib.contextmanager
def _cluster(
    folder: Path, bundle: Path, placement: Mapping[str, Sequence[int]], boards: Sequence[EmulatedBoard],
    mbit: int, console: Console,
) -> Iterator[_Fleet]:  # fmt: skip
    """Peers of a placement, paced from their first engine call on, by which a peer warms up."""
    from ls_edge.device.hardware import cores
    from ls_edge.runtime.chaos import cpu_quota, namespaces
    from ls_edge.runtime.fleet.local_cluster import LocalCluster

    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_quota.raised_priority())
        no_net, no_quota = namespaces.reason_to_skip(), cpu_quota.reason_to_skip()
        quota = None
        if no_quota:
            console.print(f"boards share all cores, without a limit: {no_quota}", soft_wrap=True)
        else:
            quota = stack.enter_context(cpu_quota.CpuQuota(cores() / (len(boards) + 1), *placement))
            console.print(f"each board may use {quota.cores:.2f} cores of this machine")
        cluster: PeerCluster
        if no_net:
            console.print(f"links are the loopback, without a rate: {no_net}", soft_wrap=True)
            cluster = LocalCluster(folder, bundle, placement, sources=[SOURCE], keys=True, stores=True, faults=True)
        else:
            net = stack.enter_context(namespaces.Net(*placement, SOURCE))
            net.rate(mbit)
            cluster = namespaces.NamespaceCluster(
                net, folder, bundle, placement, source=SOURCE, stores=True, faults=True
            )
        for board in boards:
            cluster.set_faults(board.name, board.pace)
        stack.enter_context(cluster)
        fleet = _Fleet(cluster, cluster.command(SOURCE), ["--secret-key", cluster.secret_key(SOURCE)], quota)
        fleet.limit()
        yield fleet


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
