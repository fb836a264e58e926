"""Comparison of runs, plans, simulations, profiles, benchmarks and evaluations, from the JSON of their commands.

A plan is compared with runs of the same bundle and placement: its latency, which is that of a single request, with
runs of one request at a time, and its throughput with runs of several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import ShownPart
from ls_edge.core.text import counted, distinct_names, format_ranges
from ls_edge.device.profile import DeviceProfile, Times
from ls_edge.engines.benchmark import Bench
from ls_edge.evaluation.evaluate import Evaluation, Evaluations
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.evaluation.simulation_summary import SimulationSummary
from ls_edge.runtime.fleet.planning.document import PlanDocument

Document = RunSummary | SimulationSummary | PlanDocument | DeviceProfile | Bench | Evaluation | Evaluations


class ComparedDocument(msgspec.Struct, frozen=True):
    """Numbers of one document, as a row of the comparison; None if a document lacks a number."""

    name: str
    kind: str
    """``run``, ``plan``, ``simulate``, ``profile``, ``bench`` or ``eval``."""
    about: str
    bundle_id: str | None = None
    accuracy: float | None = None
    images: str = ""
    """Number and source of the images of the accuracy."""
    latency_ms: float | None = None
    """Median; for a plan, the expected latency of a single request."""
    throughput: float | None = None
    energy_mj: float | None = None
    at_once: int | None = None
    placement: dict[str, tuple[ShownPart, ...]] | None = None
    """Blocks of each peer of a plan or run; None if unknown."""


class Comparison(msgspec.Struct, frozen=True):
    """One quantity of a run, and of a plan or a measurement of one device with the same bundle."""

    run: str
    other: str
    """Document of the plan, or of one device: a run through one peer, a profile, or a benchmark."""
    figure: str
    """``latency_ms`` or ``throughput``."""
    measured: float
    """Value of the run."""
    value: float
    """Value of the other document."""
    ratio: float
    """Run over the other document."""


class NotCompared(msgspec.Struct, frozen=True):
    """A run, and a plan or a measurement of one device with the same bundle, that cannot be compared."""

    document: str
    run: str
    reason: str


class SideBySide(msgspec.Struct, frozen=True):
    """Document of ``ls-edge report --json``."""

    rows: list[ComparedDocument]
    planned_against_measured: list[Comparison]
    fleet_against_alone: list[Comparison]
    not_compared: list[NotCompared]


def side_by_side(paths: Sequence[str | Path]) -> SideBySide:
    """Read documents and compare them; raise :class:`DataError` for any other file."""
    documents = [read_document(Path(path)) for path in paths]
    rows = [
        row
        for name, one in zip(distinct_names(paths), documents, strict=True)
        for row in _KINDS[type(one)][1](one, name)
    ]
    plans, runs = ([row for row in rows if row.kind == kind] for kind in ("plan", "run"))
    by_one = [run for run in runs if len(run.placement or ()) == 1]
    alone = [row for row in rows if row.kind in ("profile", "bench") or row in by_one]
    found = SideBySide(rows, [], [], [])
    pairs = [(run, plan, found.planned_against_measured) for plan, run in itertools.product(plans, runs)]
    pairs += [(run, one, found.fleet_against_alone) for run in runs if run not in by_one for one in alone]
    for run, other, compared in pairs:
        if other.bundle_id is None or other.bundle_id != run.bundle_id:
            continue
        if reason := (_difference(other, run) if other.kind == "plan" else "") or _other_load(run, other):
            found.not_compared.append(NotCompared(other.name, run.name, reason))
        else:
            compared += _compare(run, other)
    return found


def _compare(run: ComparedDocument, other: ComparedDocument) -> list[Comparison]:
    """Compare the latency of a run of one request at a time, and the throughput of any other run."""
    figure = "latency_ms" if run.at_once == 1 else "throughput"
    measured, value = getattr(run, figure), getattr(other, figure)
    if measured is None or not value:
        return []
    return [Comparison(run.name, other.name, figure, measured, value, round(measured / value, 4))]


def _other_load(run: ComparedDocument, other: ComparedDocument) -> str:
    """Return why throughputs at different numbers of requests in flight cannot be compared, or an empty string."""
    if run.at_once in (None, 1) or other.at_once in (None, run.at_once):
        return ""
    flight = f"the run had {run.at_once} requests in flight, {other.name} has {other.at_once}"
    if other.kind != "plan":
        return f"{flight}; measure one device with run --local 1 --concurrency {run.at_once}"
    return f"{flight}; run with --concurrency {other.at_once}" if (run.at_once or 0) < (other.at_once or 0) else ""


def _difference(plan: ComparedDocument, run: ComparedDocument) -> str:
    """Return the difference between the placements of a plan and a run, or an empty string."""
    planned, used = plan.placement or {}, run.placement or {}
    for name in sorted({*planned, *used}):
        if name not in used:
            return f"the plan has peer {name}, which the run did not use"
        if name not in planned:
            return f"the run used peer {name}, which has no blocks in the plan"
        if set(planned[name]) != set(used[name]):
            return (
                f"{name} has blocks {format_ranges(planned[name])} in the plan, {format_ranges(used[name])} in the run"
            )
    return ""


def evaluations_with_freedom(paths: Sequence[str | Path]) -> list[Evaluation]:
    """Return the evaluations of ``eval --freedom --json`` among the documents, named after their files.

    Raises :class:`UsageError` if there are none, and :class:`DataError` for a file that is not a document.
    """
    found: list[Evaluation] = []
    for name, path in zip(distinct_names([Path(path).with_suffix("") for path in paths]), paths, strict=True):
        document = read_document(Path(path))
        if isinstance(document, Evaluation):
            found.append(msgspec.structs.replace(document, name=name))
        elif isinstance(document, Evaluations):
            found += document.evaluations
    found = [evaluation for evaluation in found if evaluation.freedom]
    if not found:
        raise UsageError("no file is an evaluation within bands; make one with eval --freedom --json")
    return found


def read_document(path: Path) -> Document:
    """Read a document that can be compared; raise :class:`DataError` for any other file."""
    try:
        raw = path.read_bytes()
        keys = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the --json output of a command, or a profile") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check the path") from None
    except msgspec.ValidationError:  # not an object
        keys = {}.keys()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DataError(f"{path} is not JSON; give the --json output of a command, or a profile") from None
    for kind, (known, _) in _KINDS.items():
        if set(known) <= keys:
            try:
                return msgspec.json.decode(raw, type=kind)
            except msgspec.ValidationError as error:
                raise DataError(
                    f"{path} has the keys of a known document, not its values ({error}); make it again"
                ) from None
    raise DataError(
        f"{path} is not a document that can be compared; give JSON of run, plan, simulate, bench or eval, or a file of "
        "profile"
    )


def _run(document: RunSummary, name: str) -> list[ComparedDocument]:
    about, at_once = f"policy {document.policy}", document.settings.get("concurrency")
    if at_once is not None:
        about += f", {at_once} at a time"
    placement = {peer: one.blocks for peer, one in document.peers.items() if one.blocks}
    images = "" if document.top1 is None else _images(document.images, document.account)
    row = _answered(document, name, "run", about)
    known = {"accuracy": document.top1, "images": images, "at_once": at_once, "placement": placement}
    return [msgspec.structs.replace(row, **known)]


def _simulation(document: SimulationSummary, name: str) -> list[ComparedDocument]:
    about = f"simulated, {counted(document.devices, 'device')}, policy {document.policy}"
    return [msgspec.structs.replace(_answered(document, name, "simulate", about), accuracy=document.top1)]


def _answered(document: RunSummary | SimulationSummary, name: str, kind: str, about: str) -> ComparedDocument:
    """Return the row of a document of requests that were answered, or were not."""
    if document.degraded or document.failed:
        about += f", {document.degraded} degraded, {document.failed} failed"
    return ComparedDocument(
        name,
        kind,
        about,
        bundle_id=document.bundle_id,
        latency_ms=document.latency_ms.p50,
        throughput=document.throughput,
    )


def _plan(document: PlanDocument, name: str) -> list[ComparedDocument]:
    used = {device: blocks for device, blocks in document.placement.items() if blocks}
    about = f"for {document.objective}, {counted(len(used), 'device')}"
    about += f", policy {document.policy}" if document.policy else ""
    row = ComparedDocument(
        name,
        "plan",
        about,
        bundle_id=document.bundle_id,
        latency_ms=document.expected.latency_ms,
        throughput=document.expected.throughput,
        energy_mj=document.expected.energy_mj,
        at_once=document.concurrency,
        placement=used,
    )
    single = document.baselines.get("single")
    if single is None:
        return [row]
    alone = msgspec.structs.replace(
        row,
        name=f"{name}: alone",
        kind="plan, alone",
        about=f"{next(iter(single.placement))} alone",
        latency_ms=single.latency_ms,
        throughput=single.throughput,
        energy_mj=single.energy_mj,
        placement=None,
    )
    return [row, alone]


def _profile(document: DeviceProfile, name: str) -> list[ComparedDocument]:
    return [
        ComparedDocument(
            f"{name}: {size}" if len(document.batch) > 1 else name,
            "profile",
            f"{document.device.name}, {document.precision}, batch {size}{', throttled' * document.throttled}",
            bundle_id=document.bundle_id,
            energy_mj=times.energy_mj_per_image,
            latency_ms=None if times.chain_ms is None else times.chain_ms.p50,
            throughput=_rate(times.chain_ms, int(size)),
            at_once=1,
        )
        for size, times in document.batch.items()
    ]


def _bench(document: Bench, name: str) -> list[ComparedDocument]:
    about = f"chain, {document.precision}, batch {document.batch}, {counted(document.threads, 'thread')}"
    chain = document.chain_ms
    return [
        ComparedDocument(
            name,
            "bench",
            about,
            bundle_id=document.bundle_id,
            latency_ms=None if chain is None else chain.p50,
            throughput=_rate(chain, document.batch),
            at_once=1,
        )
    ]


def _rate(chain: Times | None, size: int) -> float | None:
    """Return the images per second of a chain; None for a peer, which has neither stem nor head."""
    return size * 1e3 / chain.p50 if chain is not None and chain.p50 else None


def _evaluation(document: Evaluation, name: str) -> list[ComparedDocument]:
    arbitrary, images = document.arbitrary, _images(document.images, document.settings)
    rows = [
        (name, "trained order", document.sequential.top1),
        (f"{name}: any order", f"any order, mean of {arbitrary.orders}", arbitrary.top1_mean),
    ]
    return [ComparedDocument(each, "eval", about, accuracy=top1, images=images) for each, about, top1 in rows]


def _images(count: int, about: Mapping[str, Any]) -> str:
    return f"{counted(count, 'image')} of {about.get('data', 'unknown data')}"


def _evaluations(document: Evaluations, name: str) -> list[ComparedDocument]:
    return [row for one in document.evaluations for row in _evaluation(one, f"{name}: {one.name}")]


_KINDS: dict[type, tuple[tuple[str, ...], Callable[[Any, str], list[ComparedDocument]]]] = {
    SimulationSummary: (("policy", "requests", "answered", "devices"), _simulation),
    RunSummary: (("policy", "requests", "answered", "latency_ms"), _run),
    PlanDocument: (("objective", "recommendation", "expected", "baselines"), _plan),
    DeviceProfile: (("device", "batch", "throttled", "parts"), _profile),
    Bench: (("chain_ms", "monolith_ms"), _bench),
    Evaluation: (("sequential", "arbitrary"), _evaluation),
    Evaluations: (("evaluations",), _evaluations),
}
"""Keys that identify each kind of document, and the function that makes its rows; the first match counts."""
