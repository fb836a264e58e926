"""``ls-edge profile``: what a bundle takes on this device, and what links between peers take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ls_edge.cli.command import DEGRADED, Command
from ls_edge.errors import UsageError

if TYPE_CHECKING:
    from ls_edge.device_profile import DeviceProfile, Times

SLOWER = 1.15
"""How much slower the end of a measurement may be than its begin until that is mentioned: caches alone make less."""


@click.command(
    cls=Command,
    short_help="Measure what a bundle takes on this device.",
    examples=(
        "ls-edge profile bundle --out profile.json",
        "ls-edge profile bundle --out orin-0.json --name orin-0 --engine tensorrt --batch 1,4",
    ),
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write, for 'ls-edge plan'.")
@click.option("--name", help="What the device is called in plans and peers.yaml; its host name where left out.")
@click.option("--batch", default="1", show_default=True, help="Images at a time, several with commas: 1,4.")
@click.option(
    "--duration", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True,
    help="Seconds that chains run at each batch size.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the engines; all cores where it is left out.")
@click.option("--engine", type=click.Choice(["auto", "onnx", "tensorrt"]), default="auto", help="What runs the parts.")
@click.option("--provider", help="cpu, cuda, or an execution provider of ONNX Runtime; cuda where it loads, else cpu.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as well.")
def command(
    bundle: Path,
    out: Path,
    name: str | None,
    batch: str,
    duration: float,
    threads: int | None,
    engine: Literal["auto", "onnx", "tensorrt"],
    provider: str | None,
    as_json: bool,
) -> int:
    """Measure on this device what each part of the folder BUNDLE takes, and write it to a file: times, memory, loading,
    clocks, temperatures, power and energy an image, as far as the device tells them; null where it does not.

    Exit code 3 where the device throttled: the file is written and marked, and 'ls-edge plan' does not take it.
    """  # noqa: D205
    import msgspec

    from ls_edge.bundle import Bundle
    from ls_edge.engines.profiling import profile_bundle
    from ls_edge.report.files import check_whole, write_whole
    from ls_edge.report.step_progress import StepProgress

    sizes = _sizes(batch)
    check_whole(out)
    opened = Bundle.open(bundle)
    with StepProgress("profile") as progress:
        found = profile_bundle(
            opened, name=name, batches=sizes, duration=duration, threads=threads, provider=provider, kind=engine,
            on_step=progress,
        )  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    write_whole(out, text + "\n")
    if as_json:
        click.echo(text)
    else:
        _print(found, out)
    if found.throttled:
        click.echo(f"ls-edge: throttled, so these times are no good: {'; '.join(found.throttled_by)}", err=True)
        return DEGRADED
    return 0


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise UsageError(f"--batch {text!r} cannot be read; write whole numbers with commas, for example 1,4") from None
    if not all(1 <= size <= 1024 for size in sizes):
        raise UsageError(f"--batch {text!r}: each size has to be from 1 to 1024")
    return sizes


def _print(found: DeviceProfile, out: Path) -> None:
    from ls_edge.report.formatting import NOTHING, counted, show
    from ls_edge.report.terminal import PlainTable, open_console, print_table

    console = open_console()
    for size, times in found.batch.items():
        table = PlainTable(f"{found.device.name}: {found.model}, {found.precision}, batch {size}", box=None)
        for heading in ("", "median ms", "95 % ms", "least ms"):
            table.add_column(heading, justify="left" if not heading else "right")

        def row(name: str, one: Times, table: PlainTable = table) -> None:
            table.add_row(name, f"{one.p50:.2f}", f"{one.p95:.2f}", f"{one.min:.2f}")

        row("stem", times.stem_ms)
        for index, one in enumerate(times.blocks_ms):
            row(f"block {index}", one)
        row("head", times.head_ms)
        table.add_section()
        row("chain", times.chain_ms)
        print_table(table, console)
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
