"""``ls-edge plan``: assign blocks to devices, and tell whether that pays off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import open_peers
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.parts import ENDS
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import NOTHING, format_ranges, show, show_ms
from ls_edge.core.validation import dump_yaml, load_yaml
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.fleet.planning.document import Expected, PlanDocument, plan_document
from ls_edge.runtime.fleet.planning.from_profiles import MeasuredRun, PlanningInputs, problem_of, read_profiles
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import OBJECTIVES, Objective

PORT = 5555
_VERDICTS = {
    "one": "One device",
    "replicate": "Replicate (every device holds all blocks)",
    "split": "Split",
}


@click.command(
    cls=Command,
    examples=(
        "ls-edge plan --bundle b --profiles a.json c.json --objective latency",
        "ls-edge plan --bundle b --profiles a,c=o.json --objective energy --out p.yaml",
        "ls-edge plan --bundle b --profiles a.json --run r.json --objective throughput",
    ),
)
@options.BUNDLE
@options.PROFILES
@options.choice("--objective", OBJECTIVES, "Quantity to optimize.", required=True)
@options.count("--replicas", "Minimum holders of a block.", most=256, default=1)
@options.output("--out", "peers.yaml to write.")
@options.flag("--overwrite", "Replace the file of --out.")
@options.path("--peers", "peers.yaml whose addresses and keys --out keeps.")
@options.JSON
def command(
    bundle: Path,
    profiles: tuple[str, ...],
    more: tuple[str, ...],
    source: str | None,
    run: Path | None,
    mbit: float,
    objective: Objective,
    replicas: int,
    out: Path | None,
    overwrite: bool,
    peers: Path | None,
    as_json: bool,
) -> None:
    """Assign blocks to devices, and tell whether that pays off.

    Assigns the blocks by the measured speed of the devices and their links, and stem and head too if they run better
    there than on the source. Compares the result with the best device alone, replicas, round robin, and equal parts.
    The first line says One device, Replicate (every device holds all blocks), or Split, and by how much it is better.
    """
    if peers is not None and out is None:
        raise UsageError("--peers has the addresses and keys for --out; give --out FILE as well")
    if out is not None and out.is_file() and not overwrite:
        raise UsageError(f"{out} exists; name another file with --out, or replace it with --overwrite")
    known = None if peers is None else open_peers(peers)  # reports mistakes with line and column
    opened = Bundle.open(bundle)
    inputs = PlanningInputs(
        profiles=read_profiles((*profiles, *more)),
        source=None if source is None else read_profiles([source])[0],
        run=None if run is None else MeasuredRun.read(run),
        mbit=mbit,
        replicas=replicas,
        objective=objective,
        batches={} if known is None else {peer.name: peer.max_batch for peer in known.peers if peer.max_batch > 1},
        codecs={} if known is None else {peer.name: peer.codec for peer in known.peers},
    )
    problem, assumptions = problem_of(opened, inputs)
    if known is not None:
        for device in problem.devices:
            known.peer(device.name)  # refuses a device that is not in the file
    planned = plan_placement(problem, objective)
    document = plan_document(problem, objective, planned, assumptions, bundle_id=opened.manifest.bundle_id)
    try:
        if out is not None:
            boards = {one.name for one in inputs.profiles if one.profile.engine == "tensorrt"}
            _write_peers(out, document, known, boards)
    finally:
        print_json(document) if as_json else _print(document)
    if out is not None and not as_json:
        next_step = "" if known is not None else "; next: addresses and keys, then copy it to every machine"
        click.echo(f"written to {out}{next_step}")


def _write_peers(out: Path, plan: PlanDocument, known: PeersFile | None, boards: set[str]) -> None:
    """Write the peers that hold blocks, and name the others in a comment; ``boards`` were measured with TensorRT.

    With a ``known`` file, only the blocks and the batch sizes differ from it; peers without a profile stay as they are.
    """
    idle = [name for name, blocks in plan.placement.items() if not blocks]
    text = "# Written by 'ls-edge plan'.\n"
    if idle:
        text += f"# Without blocks, so left out: {', '.join(idle)}\n"
    document: dict[str, Any]
    if known is None:
        peers = [
            {"name": name, "address": f"tcp://{name}:{PORT}", "bind": f"tcp://0.0.0.0:{PORT}"}
            | ({"engine": "tensorrt"} if name in boards else {})
            for name in plan.placement
        ]
        document = {"sources": [], "peers": peers}
        text += (
            f"# Addresses are the names of the devices, port {PORT}. Create keys for each device and the source with\n"
            "# 'ls-edge keys new NAME'; see docs/peers.md.\n"
        )
    else:
        document, _ = load_yaml(known.path, dict, known.raw)
        text += f"# Addresses and keys come from {known.path}.\n"
    kept = []
    for entry in document["peers"]:
        blocks = plan.placement.get(entry["name"])
        if blocks is None or blocks:
            kept.append({**entry, "blocks": format_ranges(blocks) if blocks else entry["blocks"]})
            if (batch := plan.max_batch.get(entry["name"], entry.get("max_batch", 1))) > 1 or "max_batch" in entry:
                kept[-1]["max_batch"] = batch
    write_output(out, text + dump_yaml({**document, "peers": kept}))


def _print(document: PlanDocument) -> None:
    console = open_console()
    console.print(f"{_VERDICTS[document.recommendation]}: {document.reason}.")
    held = [
        (name, format_ranges(blocks) or NOTHING, str(document.max_batch[name]) if blocks else NOTHING)
        for name, blocks in document.placement.items()
    ]
    source = {*ENDS.values()}.difference(*document.placement.values())
    held.append(("source", format_ranges(source) or NOTHING, "1" if source else NOTHING))
    print_table(PlainTable("device", "runs", ">batch", rows=held), console)
    table = PlainTable("", ">latency", ">images / s", ">energy")
    table.add_row("plan", *_cells(document.expected))
    for name, expected in document.baselines.items():
        device = f": {next(iter(expected.placement))}" if expected is not None and name == "single" else ""
        table.add_row(f"{name.replace('_', ' ')}{device}", *_cells(expected))
    print_table(table, console)
    where = ", and without --bundle" if any("stem" in parts for parts in document.placement.values()) else ""
    console.print(f"run it with --policy {document.policy} --concurrency {document.concurrency}{where}")
    console.print(
        "no placement with as many holders of each block is better by the formulas"
        if document.solver == "exact"
        else "not proven to be the best"
    )
    for line in document.assumptions:
        console.print(f"assumed: {line}")


def _cells(expected: Expected | None) -> tuple[str, ...]:
    """Return the cells of a placement; None for a baseline without room for the model."""
    if expected is None:
        return "no room", NOTHING, NOTHING
    return show_ms(expected.latency_ms), show(expected.throughput), show(expected.energy_mj, " mJ")
