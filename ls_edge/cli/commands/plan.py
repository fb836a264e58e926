"""``ls-edge plan``: assign blocks to devices, and tell whether distribution pays off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.profile_options import planning_inputs, profile_options
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import check_writable, write_output
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.text import format_ranges
from ls_edge.report.formatting import NOTHING, show, show_ms
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.fleet.planning.document import Expected, PlanDocument, plan_document
from ls_edge.runtime.fleet.planning.from_profiles import problem_of
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import Objective

PORT = 5555
"""Port of peers without an address."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge plan --bundle bundle --profiles orin-0.json nano-0.json --objective latency",
        "ls-edge plan --bundle bundle --profiles orin-0,orin-1=orin.json --objective energy --out p.yaml",
        "ls-edge plan --bundle b --profiles a.json c.json --objective survival --loss-probability 0.05",
    ),
)
@profile_options
@options.choice("--objective", ["latency", "throughput", "energy", "survival"], "Quantity to optimize.", required=True)
@options.count("--replicas", "Minimum holders of a block.", most=256, default=1, show_default=True)
@options.count("--max-replicas", "Maximum holders of a block.  [default: as memory allows]", most=256)
@click.option(
    "--loss-probability",
    "losses",
    multiple=True,
    metavar="P|NAME=P",
    help="Probability that a device is lost: of all, or of a device or zone; may be repeated.",
)
@click.option(
    "--zones",
    multiple=True,
    metavar="ZONE=NAME,...",
    help="Devices that fail together; holders of a block are in different zones. May be repeated.",
)
@options.count("--batch", "Largest engine call.  [default: from --peers, or the best one in the profiles]", most=1024)
@options.path("--out", "peers.yaml to write.")
@options.path("--peers", "peers.yaml whose addresses and keys --out keeps.")
@click.option("--no-simulation", is_flag=True, help="Use analytical estimates only.")
@options.JSON
def command(
    bundle: Path, objective: Objective, replicas: int, max_replicas: int | None, losses: tuple[str, ...],
    zones: tuple[str, ...], batch: int | None, out: Path | None, peers: Path | None,
    no_simulation: bool, as_json: bool, **measured: Any,
) -> None:  # fmt: skip
    """Assign blocks to devices, and tell whether that pays off.

    Assigns blocks by the measured speed of the devices and their links, and compares the result with the best device
    alone, round robin, equal parts, and a pipeline in trained order. If one device alone is as good, that is the
    recommendation.
    """
    if peers is not None and out is None:
        raise UsageError("--peers says what --out keeps; give --out FILE as well")
    if out is not None:
        check_writable(out)
    opened = Bundle.open(bundle)
    known = None if peers is None else load_peers(peers)  # finds mistakes, with line and column
    inputs = planning_inputs(
        **measured, replicas=replicas, max_replicas=max_replicas, losses=_losses(losses), zones=_zones(zones),
        objective=objective, batch=batch,
        batches={} if known is None else {peer.name: peer.max_batch for peer in known.peers},
    )  # fmt: skip
    problem, assumptions = problem_of(opened, inputs)
    entries = None if known is None else _known_entries(known, [device.name for device in problem.devices])
    with StepProgress("plan") as progress:
        planned = plan_placement(problem, objective)
        document = plan_document(
            problem, objective, planned, assumptions, bundle_id=opened.manifest.bundle_id, simulate=not no_simulation,
            on_step=lambda done, total, text: progress(done, total, f"simulating {text}" if done < total else text),
        )  # fmt: skip
    if out is not None:
        _write_peers(out, document, inputs.codec, peers, entries)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
    else:
        _print(document)
        if out is not None:
            click.echo(f"written to {out}" + _next_step(peers))


def _losses(texts: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        for piece in text.split(","):
            name, _, value = piece.rpartition("=")
            try:
                probability = float(value)
            except ValueError:
                probability = -1.0
            if not 0 <= probability < 1:
                raise UsageError(
                    f"--loss-probability {piece!r} cannot be read; write 0.05 for all devices or orin-0=0.1 for one, "
                    "from 0 to below 1"
                )
            found[name] = probability
    return found


def _zones(texts: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        zone, equals, names = text.partition("=")
        if not equals or not zone or not names:
            raise UsageError(f"--zones {text!r} cannot be read; write ZONE=NAME,NAME, for example rack=orin-0,orin-1")
        for name in names.split(","):
            if found.get(name, zone) != zone:
                raise UsageError(f"--zones puts {name!r} into {found[name]!r} and {zone!r}; a device is in one zone")
            found[name] = zone
    return found


def _known_entries(file: PeersFile, names: list[str]) -> dict[str, Any]:
    """Return an existing ``peers.yaml``, in which the plan changes only the blocks."""
    for name in names:
        file.peer(name)
    document = yaml.safe_load(Path(file.path).read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def _write_peers(
    out: Path, plan: PlanDocument, codec: str, known: Path | None, document: dict[str, Any] | None
) -> None:
    """Write the peers that hold blocks, and name the others in a comment."""
    idle = [name for name, blocks in plan.placement.items() if not blocks]
    text = "# Written by 'ls-edge plan'.\n"
    if idle:
        text += f"# Without blocks, so left out: {', '.join(idle)}\n"
    if document is None:
        document = {
            "sources": [],
            "peers": [
                {"name": name, "address": f"tcp://{name}:{PORT}", "bind": f"tcp://0.0.0.0:{PORT}", "codec": codec}
                for name in plan.placement
            ],
        }
        text += (
            f"# Addresses are the names of the devices, port {PORT}. Keys are still to be made, for each device and\n"
        )
        text += "# the source: 'ls-edge keys new NAME'; see docs/peers.md.\n"
    else:
        text += f"# Addresses and keys are those of {known}.\n"
    kept = []
    for entry in document["peers"]:
        blocks = plan.placement.get(entry["name"], ())
        if blocks:
            kept.append({**entry, "blocks": format_ranges(blocks)})
            if (batch := plan.max_batch.get(entry["name"], 1)) > 1 or "max_batch" in entry:
                kept[-1]["max_batch"] = batch
    write_output(out, text + yaml.safe_dump({**document, "peers": kept}, sort_keys=False))


def _next_step(peers: Path | None) -> str:
    return "" if peers is not None else "; next: addresses and keys, then copy it to every machine"


def _print(document: PlanDocument) -> None:

    console = open_console()
    if document.recommendation == "single":
        console.print(f"One device is better. {document.reason}.", soft_wrap=True)
    else:
        console.print(f"Distribute: {document.reason}.", soft_wrap=True)
    placement = PlainTable.of("device", "blocks", ">batch")
    for name, blocks in document.placement.items():
        placement.add_row(name, format_ranges(blocks) or NOTHING, str(document.max_batch[name]) if blocks else NOTHING)
    print_table(placement, console)
    table = PlainTable.of("", ">latency", ">images / s", ">energy", ">battery", ">whole answers", "policy")

    def row(name: str, figures: Expected | None) -> None:
        if figures is None:
            table.add_row(name, *[NOTHING] * 5, "no room")
            return
        table.add_row(
            name,
            show_ms(figures.latency_ms),
            show(figures.throughput),
            NOTHING if figures.energy_mj is None else f"{show(figures.energy_mj)} mJ",
            NOTHING if figures.battery_h is None else f"{show(figures.battery_h)} h",
            NOTHING if figures.whole_share is None else f"{100 * figures.whole_share:.3f} %",
            figures.policy or "",
        )

    row("plan", document.expected)
    for name, figures in document.baselines.items():
        called = name.replace("_", " ")
        row(f"{called}: {figures.device}" if figures is not None and figures.device else called, figures)
    print_table(table, console)
    if document.policy is not None:
        console.print(f"run it with --policy {document.policy} --concurrency {document.concurrency}")
    if document.chosen != "plan":
        console.print(f"the placement is that of the baseline {document.chosen.replace('_', ' ')}", soft_wrap=True)
    proof = "no placement is better by the formulas" if document.solver == "exact" else "not proven to be the best"
    console.print(proof)
    for line in document.assumptions:
        console.print(f"assumed: {line}", soft_wrap=True)
    for line in document.warnings:
        console.print(f"warning: {line}", style="yellow", soft_wrap=True)
