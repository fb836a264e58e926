"""``ls-edge profile``: what a bundle takes on this device, and what links between peers take."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import msgspec

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.descriptor_limit import require_descriptors
from ls_edge.cli.times_table import print_times
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import check_writable, write_output
from ls_edge.core.logs import set_up
from ls_edge.core.peers_file import load_peers
from ls_edge.device.profile import DeviceProfile, LinksDocument
from ls_edge.engines.profiling import profile_bundle
from ls_edge.report.formatting import NOTHING, counted, show, show_ms
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.clients.link_prober import LinkProber
from ls_edge.runtime.transport.keys import load_secret

SLOWER = 1.15
"""Slowdown during a measurement above which it is reported; caches cause less."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge profile bundle --out profile.json",
        "ls-edge profile bundle --out orin-0.json --name orin-0 --engine tensorrt --batch 1,4",
        "ls-edge profile bundle --links --peers peers.yaml --out links.json",
    ),
)
@click.argument("bundle", required=False, type=options.FILE)
@options.path("--out", "File to write, for 'ls-edge plan'.", required=True)
@click.option("--name", help="Name of the device in plans and peers.yaml.  [default: the host name]")
@click.option("--batch", default="1", show_default=True, metavar="N,N", help="Images at a time.")
@click.option(
    "--duration",
    type=options.Number(0, 10**6, min_open=True),
    default=4.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to run chains at each batch size.",
)
@options.threads("Threads of the engines.  [default: all cores]")
@options.ENGINE
@options.PROVIDER
@click.option("--links", is_flag=True, help="Measure the links between the peers of --peers instead.")
@options.path("--peers", "peers.yaml of all machines, with --links.")
@options.path("--secret-key", "NAME.key_secret of a source, with --links.")
@options.count(
    "--transfers", "Transfers per link and codec, with --links.", least=3, most=1000, default=20, show_default=True
)
@options.JSON
def command(
    bundle: Path | None,
    out: Path,
    name: str | None,
    batch: str,
    duration: float,
    threads: int | None,
    engine: Literal["auto", "onnx", "tensorrt"],
    provider: str | None,
    links: bool,
    peers: Path | None,
    secret_key: Path | None,
    transfers: int,
    as_json: bool,
) -> int:
    """Measure a bundle on this device, or the links between peers.

    Writes times, memory, loading, clocks, temperatures, power, and energy per image to a file; null for what the device
    does not tell. Exit code 3 if the device throttled: the file is marked, and 'ls-edge plan' refuses it.

    With --links, the running peers measure the links between each two of them with real tokens in every codec. BUNDLE
    defaults to the folder 'bundle' then. Exit code 3 if a link could not be measured.
    """
    sizes = _sizes(batch)
    check_writable(out)
    if links:
        if peers is None:
            raise UsageError("--links measures between the peers of a file; give --peers peers.yaml")
        return _measure_links(bundle or Path("bundle"), peers, secret_key, transfers, out, as_json=as_json)
    if bundle is None:
        raise UsageError("name the folder of a bundle to profile, for example 'ls-edge profile bundle --out FILE'")
    if peers is not None:
        raise UsageError("--peers is for --links; leave it out, or add --links")
    opened = Bundle.open(bundle)
    with StepProgress("profile") as progress:
        found = profile_bundle(
            opened, name=name, batches=sizes, duration=duration, threads=threads, provider=provider, kind=engine,
            on_step=progress,
        )  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    write_output(out, text + "\n")
    if as_json:
        click.echo(text)
    else:
        _print(found, out)
    if found.throttled:
        click.echo(f"ls-edge: throttled, so these times are no good: {'; '.join(found.throttled_by)}", err=True)
        return DEGRADED
    return 0


def _measure_links(
    folder: Path, peers: Path, secret_key: Path | None, transfers: int, out: Path, *, as_json: bool
) -> int:

    set_up(as_json=False, level=50)  # the table shows what went wrong
    file = load_peers(peers)
    require_descriptors(file)
    opened = Bundle.open(folder)
    keys = None if secret_key is None else load_secret(secret_key)
    with LinkProber(file, opened, keys=keys) as prober, StepProgress("links") as progress:
        found = prober.measure(transfers=transfers, on_step=progress)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    write_output(out, text + "\n")
    if as_json:
        click.echo(text)
    else:
        _print_links(found, out)
    return DEGRADED if found.missing else 0


def _print_links(found: LinksDocument, out: Path) -> None:

    console = open_console()
    names = list(dict.fromkeys(one.codec for one in found.transfers))
    table = PlainTable.of("from", "to", *(f">{name} p50 (p95)" for name in names), ">latency", ">Mbit / s")
    for fit in found.fits:
        times = {one.codec: one for one in found.transfers if (one.origin, one.to) == (fit.origin, fit.to)}
        known = [times.get(name) for name in names]
        cells = [NOTHING if one is None else f"{show_ms(one.p50_ms)} ({show(one.p95_ms)})" for one in known]
        speed = NOTHING if fit.mbit_per_s is None else show(fit.mbit_per_s)
        table.add_row(fit.origin, fit.to, *cells, show_ms(fit.latency_ms), speed)
    print_table(table, console)
    for origin, to, why in found.missing:
        console.print(f"not measured: {origin} to {to}: {why}", style="yellow", soft_wrap=True)
    console.print(f"written to {out}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise UsageError(f"--batch {text!r} cannot be read; write whole numbers with commas, for example 1,4") from None
    if not all(1 <= size <= 1024 for size in sizes):
        raise UsageError(f"--batch {text!r}: each size has to be from 1 to 1024")
    return sizes


def _print(found: DeviceProfile, out: Path) -> None:

    console = open_console()
    for size, times in found.batch.items():
        title = f"{found.device.name}: {found.model}, {found.precision}, batch {size}"
        print_times(title, times, {"chain": times.chain_ms}, console)
        if times.slowdown > SLOWER:
            console.print(
                f"the last third took {times.slowdown:.2f} times as long as the first: did something else run?"
            )
    device = found.device
    console.print(f"{found.engine}, {found.provider}, {counted(found.threads, 'thread')}")
    loaded = sum(part.load_ms for part in found.parts) / 1e3
    console.print(f"memory {found.memory_bytes / 2**20:.0f} MiB, loaded in {loaded:.1f} s")
    power = NOTHING if found.power_watts is None else f"{show(found.power_watts)} W ({found.power_scope})"
    energy = NOTHING if found.energy_mj_per_image is None else f"{show(found.energy_mj_per_image)} mJ"
    console.print(f"power {power}, an image {energy}, power mode {device.power_mode or NOTHING}")
    console.print(f"written to {out}")
