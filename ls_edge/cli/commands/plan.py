"""``ls-edge plan``: assign blocks to devices, and tell whether distribution pays off."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.text import NOTHING, format_ranges, show, show_ms, show_nines
from ls_edge.evaluation.simulation_summary import FleetSettings
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.fleet.planning.document import Expected, PlanDocument, plan_document
from ls_edge.runtime.fleet.planning.from_profiles import problem_of, read_inputs
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import Objective, PlanningProblem
from ls_edge.runtime.fleet.simulation.site_pool import process_pool
from ls_edge.runtime.fleet.simulation.targets import FleetSearch, Target, answer_text, search_fleets
from ls_edge.runtime.simulator.churn import Churn, any_of, read_losses
from ls_edge.runtime.source.settings import Settings as SourceSettings

PORT = 5555
_WITH_TARGET = ("rate", "budget_ms", "max_skips")
_WITHOUT_TARGET = (
    "objective", "out", "peers", "overwrite", "replicas", "max_replicas", "loss_probability", "zones", "no_simulation",
)  # fmt: skip
_RESULTS = {"whole": ">whole answers", "answered": ">answered", "p99": ">p99"}
_VERDICTS = {
    "single": "One device is best",
    "copies": "Independent copies of the whole model are best",
    "distribute": "Distribute",
}


@click.command(
    cls=Command,
    examples=(
        "ls-edge plan --bundle bundle --profiles orin-0.json nano-0.json --objective latency",
        "ls-edge plan --bundle bundle --profiles orin-0,orin-1=orin.json --objective energy --out p.yaml",
        "ls-edge plan --bundle b --profiles a.json c.json --objective survival --loss-probability 0.05",
        "ls-edge plan --bundle b --profiles a.json --target 0.999 --churn up=1h,down=3m",
    ),
)
@options.BUNDLE
@options.PROFILES
@options.choice("--objective", ["latency", "throughput", "energy", "survival"], "Quantity to optimize.")
@options.names(
    "--target",
    "Find the smallest fleet with this share of whole answers; answered=0.999, p99=80ms; may be repeated.",
    "SHARE",
)
@options.names("--churn", "Mean up and down times of every device, such as up=1h,down=3m; may be repeated.", "SPEC")
@options.number("--rate", "Images per second; for --target.  [default: seldom]", "IMAGES", above=True)
@options.number("--budget-ms", "Time limit of a request; for --target.", "MS", 1, 600_000, default=10_000.0)
@options.count("--max-skips", "Blocks that an answer may skip; for --target.", least=0, most=65_536, default=0)
@options.count("--replicas", "Minimum holders of a block.", most=256, default=1)
@options.count("--max-replicas", "Maximum holders of a block.  [default: as memory allows]", most=256)
@options.names(
    "--loss-probability",
    "Loss probability of every device, or of one device or zone; may be repeated.",
    "P|NAME=P",
)
@options.names(
    "--zones",
    "Devices that fail together; holders of a block are in different zones. May be repeated.",
    "ZONE=NAME,...",
)
@options.count("--batch", "Largest engine call.  [default: from --peers, or the best one in the profiles]", most=1024)
@options.output("--out", "peers.yaml to write.")
@options.flag("--overwrite", "Replace the file of --out.")
@options.path("--peers", "peers.yaml whose addresses and keys --out keeps.")
@options.flag("--no-simulation", "Use analytical estimates only.")
@options.JSON
def command(
    bundle: Path,
    profiles: tuple[str, ...],
    more: tuple[str, ...],
    objective: Objective | None,
    target: tuple[str, ...],
    churn: tuple[str, ...],
    rate: float | None,
    budget_ms: float,
    max_skips: int,
    loss_probability: tuple[str, ...],
    zones: tuple[str, ...],
    out: Path | None,
    peers: Path | None,
    overwrite: bool,
    no_simulation: bool,
    as_json: bool,
    **inputs: Any,
) -> None:
    """Assign blocks to devices, and tell whether that pays off.

    Assigns the blocks by the measured speed of the devices and their links, and stem and head too if they run better
    there than on the source. Compares the result with the best device alone, independent copies of the whole model,
    round robin, equal parts, and a pipeline in trained order. The first line tells whether one device, copies, or
    distribution is best, and by how much.

    With --target, finds the smallest fleet of devices like the profiles that reaches it, by formula and by simulation.
    """
    targets = [Target.parse(text) for text in target]
    losses = _churn(churn)
    unused = [name for name in (_WITHOUT_TARGET if targets else _WITH_TARGET) if options.is_typed(name)]
    if unused:
        flag = "--" + unused[0].replace("_", "-")
        why = "--target tries numbers of devices and copies" if targets else f"{flag} is for --target"
        raise UsageError(f"{why}; leave {flag} out")
    chances = _losses(loss_probability)
    alone = [loss.loss for loss in losses if loss.zone == 1 and not loss.is_source]
    if alone and chances.setdefault("", any_of(alone)) != any_of(alone):
        raise UsageError("--churn and --loss-probability both give the probability of every device; leave one out")
    if peers is not None and out is None:
        raise UsageError("--peers has the addresses and keys for --out; give --out FILE as well")
    if out is not None and out.is_file() and not overwrite:
        raise UsageError(f"{out} exists; name another file with --out, or replace it with --overwrite")
    opened = Bundle.open(bundle)
    profiles += more
    if targets:
        if not losses:
            raise UsageError("--target needs --churn up=1h,down=3m")
        given = read_inputs(profiles, **inputs, losses=chances, objective="survival")
        settings = FleetSettings(
            devices=1, requests=1, max_skips=SourceSettings.of({"max_skips": max_skips}).skips_of(opened.num_blocks),
            budget_ms=budget_ms, rate=rate, outage_s=max(loss.down for loss in losses),
        )  # fmt: skip
        _search(*problem_of(opened, given), targets, settings, churn, losses, as_json=as_json)
        return
    if any(loss.zone > 1 or loss.is_source for loss in losses):
        raise UsageError(
            "zones and sources in --churn are for --target; with --objective, give --zones and --loss-probability"
        )
    if objective is None:
        raise UsageError("give --objective latency, throughput, energy or survival, or --target 0.999 with --churn")
    known = None if peers is None else load_peers(peers)  # reports mistakes with line and column
    found = read_inputs(
        profiles,
        **inputs,
        losses=chances,
        zones=_zones(zones),
        objective=objective,
        batches={peer.name: peer.max_batch for peer in known.peers} if known is not None else {},
    )
    problem, assumptions = problem_of(opened, found)
    if known is not None:
        for device in problem.devices:
            known.peer(device.name)  # refuses a device that is not in the file
    with StepProgress("plan") as progress:
        planned = plan_placement(problem, objective)
        document = plan_document(
            problem,
            objective,
            planned,
            assumptions,
            bundle_id=opened.manifest.bundle_id,
            simulate=not no_simulation,
            on_step=lambda done, total, text: progress(done, total, f"simulating {text}" if done < total else text),
        )
    try:
        if out is not None:
            _write_peers(out, document, found.codec, known)
    finally:
        print_json(document) if as_json else _print(document)
    if out is not None and not as_json:
        next_step = "" if known is not None else "; next: addresses and keys, then copy it to every machine"
        click.echo(f"written to {out}{next_step}")


def _search(
    problem: PlanningProblem,
    assumptions: list[str],
    targets: Sequence[Target],
    settings: FleetSettings,
    churn: Sequence[str],
    losses: Sequence[Churn],
    *,
    as_json: bool,
) -> None:
    with StepProgress("plan") as progress, process_pool(len(os.sched_getaffinity(0))) as pool:
        found = search_fleets(
            problem,
            targets,
            settings,
            losses,
            executor=pool,
            on_step=progress,
        )
    answer = answer_text(targets, found)
    if as_json:
        print_json(
            FleetSearch(
                answer=answer,
                targets=list(targets),
                churn=list(churn),
                budget_ms=settings.budget_ms,
                rate=settings.rate,
                seed=settings.seed,
                fleets=found,
                assumptions=assumptions,
            )
        )
        return
    console = open_console()
    console.print(f"{answer[0].upper()}{answer[1:]}.")
    kinds = list(dict.fromkeys(one.kind for one in targets))
    results = (name for kind in kinds for name in (_RESULTS[kind], "interval"))
    table = PlainTable.of(">devices", ">copies", "target", *results, ">formula", ">images / s", ">watts")
    for one in found:
        table.add_row(
            str(one.devices),
            str(one.replicas),
            one.verdict,
            *(text for kind in kinds for text in one.shown(kind)),
            show_nines(one.formula),
            show(one.throughput),
            show(one.watts),
        )
    if found:
        print_table(table, console)
    for line in assumptions:
        console.print(f"assumed: {line}")


def _churn(texts: Sequence[str]) -> list[Churn]:
    losses = [loss for loss in read_losses(texts) if isinstance(loss, Churn)]
    if len(losses) < len(texts):
        raise UsageError("a trace as --churn is for simulate; give mean times, such as up=1h,down=3m")
    if any(math.isnan(loss.up) for loss in losses):
        raise UsageError("--churn up=battery is for simulate; give mean times, such as up=8h,down=2h")
    return losses


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


def _write_peers(out: Path, plan: PlanDocument, codec: str, known: PeersFile | None) -> None:
    """Write the peers that hold blocks, and name the others in a comment.

    With a ``known`` file, only the blocks and the batch sizes differ from it.
    """
    idle = [name for name, blocks in plan.placement.items() if not blocks]
    text = "# Written by 'ls-edge plan'.\n"
    if idle:
        text += f"# Without blocks, so left out: {', '.join(idle)}\n"
    document: dict[str, Any]
    if known is None:
        peers = [
            {"name": name, "address": f"tcp://{name}:{PORT}", "bind": f"tcp://0.0.0.0:{PORT}", "codec": codec}
            for name in plan.placement
        ]
        document = {"sources": [], "peers": peers}
        text += (
            f"# Addresses are the names of the devices, port {PORT}. Create keys for each device and the source with\n"
            "# 'ls-edge keys new NAME'; see docs/peers.md.\n"
        )
    else:
        document = yaml.safe_load(Path(known.path).read_text(encoding="utf-8"))
        text += f"# Addresses and keys come from {known.path}.\n"
    kept = []
    for entry in document["peers"]:
        blocks = plan.placement.get(entry["name"], ())
        if blocks:
            kept.append({**entry, "blocks": format_ranges(blocks)})
            if (batch := plan.max_batch.get(entry["name"], 1)) > 1 or "max_batch" in entry:
                kept[-1]["max_batch"] = batch
    write_output(out, text + yaml.safe_dump({**document, "peers": kept}, sort_keys=False))


def _print(document: PlanDocument) -> None:
    console = open_console()
    console.print(f"{_VERDICTS[document.winner]}: {document.reason}.")
    if document.advantages:
        console.print(f"Distribution offers: {'; '.join(document.advantages)}.")
    held = [
        (name, format_ranges(blocks) or NOTHING, str(document.max_batch[name]) if blocks else NOTHING)
        for name, blocks in document.placement.items()
    ]
    print_table(PlainTable.of("device", "blocks", ">batch", rows=held), console)
    table = PlainTable.of("", ">latency", ">images / s", ">energy", ">battery", ">whole answers", "policy")
    table.add_row("plan", *_cells(document.expected))
    for name, expected in document.baselines.items():
        if name == "copies" and len(document.placement) == 1:
            continue
        device = f": {expected.device}" if expected is not None and expected.device else ""
        table.add_row(f"{name.replace('_', ' ')}{device}", *_cells(expected))
    print_table(table, console)
    if document.policy is not None:
        where = ", and without --bundle" if any("stem" in parts for parts in document.placement.values()) else ""
        console.print(f"run it with --policy {document.policy} --concurrency {document.concurrency}{where}")
    if document.chosen != "plan":
        console.print(f"the placement comes from the baseline {document.chosen.replace('_', ' ')}")
    proof = "no placement is better by the formulas" if document.solver == "exact" else "not proven to be the best"
    console.print(proof)
    for line in document.assumptions:
        console.print(f"assumed: {line}")
    for line in document.warnings:
        console.print(f"warning: {line}", style="yellow")


def _cells(expected: Expected | None) -> tuple[str, ...]:
    """Return the cells of a placement; None for a baseline without room for the model."""
    if expected is None:
        return (*[NOTHING] * 5, "no room")
    return (
        show_ms(expected.latency_ms),
        show(expected.throughput),
        show(expected.energy_mj, " mJ"),
        show(expected.battery_h, " h"),
        NOTHING if expected.whole_share is None else f"{100 * expected.whole_share:.3f} %",
        expected.policy or "",
    )
