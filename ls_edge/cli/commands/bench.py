"""``ls-edge bench``: time the engines of a bundle on this machine, or those of a running peer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.inputs import peers_to_ask
from ls_edge.cli.output import print_json, warn, write_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError, VerificationError, printable
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.text import NOTHING, counted, show
from ls_edge.core.validation import InvalidDocument, decode_json
from ls_edge.device import hardware
from ls_edge.device.profile import SCHEMA, BatchTimes, DeviceProfile, Times
from ls_edge.engines.benchmark import Bench, bench
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.protocol.messages import MAX_MEASURE_MS

_ANSWER_S = 60.0
"""Seconds for the answer of a peer in addition to the measurement, which waits for running engine calls."""
_MERGING = 6  # memory for merging parts, in multiples of their size; measured: 5.0
_SLOWER = 1.15
"""Slowdown during a measurement above which it is reported; caching effects are smaller."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge bench bundle",
        "ls-edge bench bundle --threads 1 --batch 4 --json",
        "ls-edge bench bundle --out orin-0.json --name orin-0 --batch 1,4",
        "ls-edge bench --peers peers.yaml --name orin-0 --out orin-0.json",
    ),
)
@click.argument("bundle", required=False, type=options.FILE)
@options.threads("Threads of the engines.  [default: all cores]")
@options.text("--batch", "Images at a time; several sizes with --out.", "N,N", type=options.counts(1024), default="1")
@options.number("--duration", "Time to run chains at each batch size.", "SECONDS", most=10**6, above=True, default=4.0)
@options.choice("--engine", options.ENGINES, "Engine of the parts.", default="auto")
@options.text("--provider", "cpu, cuda, or an ONNX Runtime execution provider.", "NAME")
@options.output("--out", "Profile to write, for 'ls-edge plan'.", ours=options.JSON_FILE)
@options.text("--name", "Name of the device in plans, or peer to measure.  [default: the host name]", "NAME")
@options.peers("peers.yaml, to measure the running peer --name.")
@options.SECRET_KEY
@options.JSON
def command(
    bundle: Path | None,
    out: Path | None,
    batch: tuple[int, ...],
    engine: EngineKind,
    name: str | None,
    peers: Path | None,
    secret_key: Path | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Time the engines of a bundle on this device.

    Times the stem, each block, and the head of the folder BUNDLE, all of them as a chain, the whole model in one
    engine, and visits of 1, 2, and all blocks as a peer runs them.

    With --out, writes the profile of this device for 'ls-edge plan' instead: times, memory, load times, clocks,
    temperatures, power, and energy per image; values that the device does not report are null. If the device throttled,
    the file is marked and the exit code is 3.

    With --peers and --name instead of BUNDLE, a running peer measures the blocks that it serves, between requests, for
    one image and for its max_batch. Such a profile has no stem and head: give 'ls-edge plan' a --source.
    """
    if bundle is None:
        own = [option for option in ("batch", "threads", "engine", "provider") if options.is_typed(option)]
        if peers is None or name is None:
            raise UsageError("name the folder of a bundle, or a running peer with --peers FILE --name NAME")
        if own:
            raise UsageError(f"--{own[0]}: a peer measures the engines that it serves with; leave it out")
        profile = _ask_peer(peers, name, secret_key, asked["duration"])
    elif options.is_typed("peers"):
        raise UsageError("--peers is for measuring a running peer; leave out BUNDLE or --peers")
    elif out is None:
        if len(batch) > 1:
            raise UsageError("--batch takes several sizes only for a profile; give --out FILE or one size")
        if name is not None:
            raise UsageError("--name is the device's name in a profile; give --out FILE too, or leave it out")
        opened = Bundle.open(bundle)
        result = bench(opened, batch=batch[0], kind=engine, monolith=_monolith(opened), **asked)
        (print_json if as_json else _print)(result)
        return 0
    else:
        device = MeasuredDevice(name)
        with StepProgress("bench") as progress:
            profile = profile_bundle(Bundle.open(bundle), device, batches=batch, kind=engine, on_step=progress, **asked)
    try:
        if out is not None:
            write_json(out, profile)
    finally:
        (print_json if as_json else _print_profile)(profile)
    if out is not None and not as_json:
        click.echo(f"written to {out}")
    if profile.throttled:
        warn(f"the device throttled, so these times cannot be used: {'; '.join(profile.throttled_by)}")
        return DEGRADED
    return 0


def _ask_peer(peers: Path, name: str, secret_key: Path | None, duration: float) -> DeviceProfile:
    """Make a peer measure its engines over its link."""
    file, keys = peers_to_ask(peers, secret_key)
    file.peer(name)
    if duration * 1e3 > MAX_MEASURE_MS:
        raise UsageError(f"--duration {duration:g}: a peer measures for at most {MAX_MEASURE_MS / 1e3:g} seconds")
    with (
        open_console(stderr=True).status(f"{name} measures its engines", spinner="line"),
        Observer(file, keys=keys) as observer,
    ):
        raw = observer.profile(name, duration, 2 * duration + _ANSWER_S)
    try:
        return decode_json(raw, DeviceProfile, SCHEMA)
    except InvalidDocument as error:
        raise LinkError(f"{name} sent an unreadable profile{error}; install the same ls-edge there") from None


def _monolith(bundle: Bundle) -> tuple[bytes | None, str]:
    """Return the model as one file and its origin, or None and the reason."""
    if bundle.manifest.parts.whole is not None:
        return bundle.read("whole"), "whole.onnx"
    try:
        from ls_edge.export.merge import merge
    except ImportError:
        return None, "the bundle has no whole.onnx, and merging its parts needs onnx: pip install onnx"
    size, memory = sum(part.bytes for _, part in bundle.manifest.part_names()), hardware.memory_gib()
    if size >= 2**31 or (memory is not None and _MERGING * size > memory[1] * 2**30):
        return (
            None,
            f"merging its {size / 2**20:,.0f} MiB takes {_MERGING} times as much memory, and a file holds 2 GB",
        )
    blocks = [bundle.read(f"block {index}") for index in range(bundle.num_blocks)]
    try:
        return merge(bundle.read("stem"), blocks, bundle.read("head")), "merged from the parts"
    except VerificationError as error:
        return None, str(error)


def _print_times(title: str, found: BatchTimes, wholes: Mapping[str, Times | None], console: Console) -> None:
    """Print the times of stem, blocks, and head, followed by the times in ``wholes`` that are not None."""
    console.print(printable(title))  # a title of the table would be wrapped at its width
    table = PlainTable("", ">median ms", ">p95 ms", ">min ms", box=None)
    parts = {"stem": found.stem_ms, **{f"block {index}": one for index, one in enumerate(found.blocks_ms)}}
    for group in ({**parts, "head": found.head_ms}, wholes):
        for name, times in group.items():
            if times is not None:
                table.add_row(name, f"{times.p50:.2f}", f"{times.p95:.2f}", f"{times.min:.2f}")
        table.add_section()
    print_table(table, console)


def _print(result: Bench) -> None:
    console = open_console()
    wholes = {
        "chain": result.chain_ms,
        "monolith": result.monolith_ms,
        "monolith, default options": result.monolith_default_ms,
        **{f"visit of {counted(int(count), 'block')}": times for count, times in result.visits_ms.items()},
    }
    _print_times(f"{result.model}, {result.precision}, batch {result.batch}", result, wholes, console)
    console.print(
        f"{result.engine}, {result.provider}, {counted(result.threads, 'thread')}, {counted(result.repeats, 'run')}"
    )
    console.print(f"memory {result.memory_bytes / 2**20:.0f} MiB")
    if result.chain_over_monolith is not None:
        console.print(f"chain / monolith: {result.chain_over_monolith:.3f} (monolith: {result.monolith})")
    else:
        console.print(f"no monolith: {result.monolith_reason}")


def _print_profile(found: DeviceProfile) -> None:
    console = open_console()
    for size, times in found.batch.items():
        title = f"{found.device.name}: {found.model}, {found.precision}, batch {size}"
        _print_times(title, times, {"chain": times.chain_ms}, console)
        if times.slowdown > _SLOWER:
            console.print(
                f"the last third took {times.slowdown:.2f} times as long as the first; was something else running?"
            )
    console.print(f"{found.engine}, {found.provider}, {counted(found.threads, 'thread')}")
    loaded = sum(part.load_ms for part in found.parts) / 1e3
    console.print(f"memory {found.memory_bytes / 2**20:.0f} MiB, loaded in {loaded:.1f} s")
    power, energy = show(found.power_watts, f" W ({found.power_scope})"), show(found.energy_mj_per_image, " mJ")
    console.print(f"power {power}, {energy} per image")
    all_limits = found.after.limits_mhz
    cores = [mhz for name, mhz in all_limits.items() if name.startswith("cpu")]
    highest = {"cores": max(cores, default=0.0)} | {n: mhz for n, mhz in all_limits.items() if n.startswith("gpu")}
    limits = [f"{name} up to {mhz:.0f} MHz" for name, mhz in highest.items() if mhz]
    if found.device.multiprocessors:
        limits.append(f"{found.device.multiprocessors} multiprocessors")
    console.print(f"power mode {found.device.power_mode or NOTHING}; in force: {', '.join(limits) or NOTHING}")
