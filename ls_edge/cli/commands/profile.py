"""``ls-edge profile``: measure a bundle on this device, or the links between peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.inputs import peers_to_ask
from ls_edge.cli.output import print_json, warn, write_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.text import NOTHING, counted, show, show_ms
from ls_edge.core.validation import InvalidDocument
from ls_edge.device.profile import DeviceProfile, LinksDocument, read_profile
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table, print_times
from ls_edge.runtime.clients.link_prober import LinkProber
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.protocol.messages import MAX_MEASURE_MS

_Document = TypeVar("_Document", DeviceProfile, LinksDocument)

_ANSWER_S = 60.0
"""Seconds for the answer of a peer in addition to the measurement, which waits for running engine calls."""
SLOWER = 1.15
"""Slowdown during a measurement above which it is reported; caching effects are smaller."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge profile bundle --out profile.json",
        "ls-edge profile bundle --out orin-0.json --name orin-0 --engine tensorrt --batch 1,4",
        "ls-edge profile --peers peers.yaml --name orin-0 --out orin-0.json",
        "ls-edge profile bundle --links --peers peers.yaml --out links.json",
    ),
)
@click.argument("bundle", required=False, type=options.FILE)
@options.output("--out", "File to write, for 'ls-edge plan'.", ours=options.JSON_FILE, required=True)
@options.text("--name", "Name of the device in plans, or peer to measure.  [default: the host name]", "NAME")
@options.text("--batch", "Images at a time.", "N,N", type=options.counts(1024), default="1")
@options.duration("Time to run chains at each batch size.")
@options.threads("Threads of the engines.  [default: all cores]")
@options.ENGINE
@options.PROVIDER
@options.flag("--links", "Measure the links between the peers of --peers instead.")
@options.peers("peers.yaml of all machines, with --links, or with --name and no BUNDLE.")
@options.secret_key("NAME.key_secret of a source, with --peers.")
@options.count("--transfers", "Transfers per link and codec, with --links.", least=3, most=1000, default=20)
@options.JSON
def command(
    bundle: Path | None,
    out: Path,
    batch: tuple[int, ...],
    engine: EngineKind,
    links: bool,
    peers: Path | None,
    secret_key: Path | None,
    transfers: int,
    as_json: bool,
    **asked: Any,
) -> int:
    """Measure a bundle on this device, a peer, or the links between peers.

    Writes times, memory, load times, clocks, temperatures, power, and energy per image to a file; values that the
    device does not report are null. If the device throttled, the file is marked, 'ls-edge plan' refuses it, and the
    exit code is 3.

    With --peers and --name instead of BUNDLE, a running peer measures the blocks that it serves, between requests, for
    one image and for its max_batch. Such a profile has no stem and head: give 'ls-edge plan' a --source.

    With --links, the running peers measure all links between them with real tokens in every codec. BUNDLE defaults to
    the folder 'bundle'. Exit code 3 if a link could not be measured.
    """
    if links:
        if peers is None:
            raise UsageError("--links measures between the peers of a file; give --peers peers.yaml")
        file, keys = peers_to_ask(peers, secret_key)
        opened = Bundle.open(bundle or Path("bundle"))
        with LinkProber(file, opened, keys=keys) as prober, StepProgress("links") as progress:
            measured = prober.measure(transfers=transfers, on_step=progress)
        _write(measured, out, _print_links, as_json=as_json)
        return DEGRADED if measured.missing else 0
    if bundle is None:
        if peers is None or asked["name"] is None:
            raise UsageError(
                "name the folder of a bundle to profile, for example 'ls-edge profile bundle --out FILE', or a peer "
                "with --peers FILE --name NAME"
            )
        own = [name for name in ("batch", "threads", "engine", "provider") if options.is_typed(name)]
        if own:
            raise UsageError(f"--{own[0]}: a peer measures the engines that it serves with; leave it out")
        found = _ask_peer(peers, asked["name"], secret_key, asked["duration"])
    elif options.is_typed("peers"):
        raise UsageError("--peers is for measuring a peer or --links; leave out BUNDLE or --peers")
    else:
        with StepProgress("profile") as progress:
            device = MeasuredDevice(asked.pop("name"))
            found = profile_bundle(Bundle.open(bundle), device, batches=batch, kind=engine, on_step=progress, **asked)
    _write(found, out, _print, as_json=as_json)
    if found.throttled:
        warn(f"the device throttled, so these times cannot be used: {'; '.join(found.throttled_by)}")
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
        return read_profile(raw)
    except InvalidDocument as error:
        raise LinkError(f"{name} sent an unreadable profile{error}; install the same ls-edge there") from None


def _write(found: _Document, out: Path, show_on: Callable[[_Document, Console], None], *, as_json: bool) -> None:
    try:
        write_json(out, found)
    finally:
        if as_json:
            print_json(found)
        else:
            show_on(found, open_console())
    if not as_json:
        click.echo(f"written to {out}")


def _print_links(found: LinksDocument, console: Console) -> None:
    names = list(dict.fromkeys(one.codec for one in found.transfers))
    table = PlainTable.of(
        "from", "to", *(f">{name} p50 (p95)" for name in names), ">latency", ">Mbit / s", ">95 % interval"
    )
    for fit in found.fits:
        times = {one.codec: one for one in found.transfers if (one.origin, one.to) == (fit.origin, fit.to)}
        known = [times.get(name) for name in names]
        cells = [NOTHING if one is None else f"{show_ms(one.p50_ms)} ({show(one.p95_ms)})" for one in known]
        interval = " to ".join(show(end) for end in fit.mbit_per_s_interval or ())
        table.add_row(fit.origin, fit.to, *cells, show_ms(fit.latency_ms), show(fit.mbit_per_s), interval)
    print_table(table, console)
    for noise in (one.noise for one in found.transfers if one.noise):
        console.print(noise, style="yellow")
    for origin, to, why in found.missing:
        console.print(f"not measured: {origin} to {to}: {why}", style="yellow")


def _print(found: DeviceProfile, console: Console) -> None:
    for size, times in found.batch.items():
        title = f"{found.device.name}: {found.model}, {found.precision}, batch {size}"
        print_times(title, times, {"chain": times.chain_ms}, console)
        if times.slowdown > SLOWER:
            console.print(
                f"the last third took {times.slowdown:.2f} times as long as the first; was something else running?"
            )
    console.print(f"{found.engine}, {found.provider}, {counted(found.threads, 'thread')}")
    loaded = sum(part.load_ms for part in found.parts) / 1e3
    console.print(f"memory {found.memory_bytes / 2**20:.0f} MiB, loaded in {loaded:.1f} s")
    power, energy = show(found.power_watts, f" W ({found.power_scope})"), show(found.energy_mj_per_image, " mJ")
    console.print(f"power {power}, {energy} per image")
    limits = [f"{name} up to {mhz:.0f} MHz" for name, mhz in _of_each_kind(found.after.limits_mhz).items()]
    if found.device.multiprocessors:
        limits.append(f"{found.device.multiprocessors} multiprocessors")
    console.print(f"power mode {found.device.power_mode or NOTHING}; in force: {', '.join(limits) or NOTHING}")


def _of_each_kind(limits: Mapping[str, float]) -> dict[str, float]:
    """Return the highest limit of the cores and of each GPU."""
    cores = [mhz for name, mhz in limits.items() if name.startswith("cpu")]
    return ({"cores": max(cores)} if cores else {}) | {n: mhz for n, mhz in limits.items() if n.startswith("gpu")}
