"""Comparison of runs, plans, simulations, profiles, benchmarks and evaluations, from the JSON of their commands.

A plan is compared with runs of the same bundle and placement: its latency, which is that of a single request, with
runs of one request at a time, and its throughput with runs of several.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import ShownPart
from ls_edge.core.text import distinct_names, format_ranges
from ls_edge.evaluation.evaluate import Evaluation


class ComparedDocument(msgspec.Struct, frozen=True):
    """Numbers of one document, a row of the comparison; None if a document has no such number."""

    name: str
    kind: str
    """``run``, ``plan``, ``simulate``, ``profile``, ``bench`` or ``eval``."""
    about: str
    bundle_id: str | None = None
    accuracy: float | None = None
    latency_ms: float | None = None
    """Median; for a plan, the expected latency of a single request."""
    throughput: float | None = None
    energy_mj: float | None = None
    at_once: int | None = None
    placement: dict[str, tuple[ShownPart, ...]] | None = None
    """Blocks of each peer of a plan or run; None if unknown."""


class PlannedAgainstMeasured(msgspec.Struct, frozen=True):
    """One quantity of a plan and of a run of the same bundle."""

    plan: str
    run: str
    figure: str
    """``latency_ms`` or ``throughput``."""
    planned: float
    measured: float
    ratio: float


class NotCompared(msgspec.Struct, frozen=True):
    """A plan and a run of the same bundle that cannot be compared."""

    plan: str
    run: str
    reason: str


class FleetAgainstAlone(msgspec.Struct, frozen=True):
    """One quantity of a run through a fleet and of one device alone with the same bundle."""

    run: str
    alone: str
    """Document with the measurement of one device: a run through one peer, a profile, or a benchmark."""
    figure: str
    """``latency_ms`` or ``throughput``."""
    fleet: float
    one: float
    ratio: float
    """Fleet over one device."""


class SideBySide(msgspec.Struct, frozen=True):
    """Document of ``ls-edge report --json``."""

    rows: list[ComparedDocument]
    planned_against_measured: list[PlannedAgainstMeasured]
    not_compared: list[NotCompared] = []
    fleet_against_alone: list[FleetAgainstAlone] = []


def side_by_side(paths: Sequence[str | Path]) -> SideBySide:
    """Read documents and compare them; raise :class:`DataError` for any other file."""
    rows = [row for name, path in zip(distinct_names(paths), paths, strict=True) for row in _rows_of(name, Path(path))]
    runs = [row for row in rows if row.kind == "run"]
    found = SideBySide(rows, [], [], [])
    for plan, run in itertools.product((row for row in rows if row.kind == "plan"), runs):
        if run.bundle_id == plan.bundle_id:
            if reason := _difference(plan.placement or {}, run.placement or {}):
                found.not_compared.append(NotCompared(plan.name, run.name, reason))
            else:
                found.planned_against_measured.extend(
                    PlannedAgainstMeasured(plan.name, run.name, figure, planned, measured, round(measured / planned, 4))
                    for figure, measured, planned in _quantities(run, plan)
                )
    by_one = [run for run in runs if len(run.placement or ()) == 1]
    alone = [row for row in rows if row.kind in ("profile", "bench") or row in by_one]
    for run, one in itertools.product((run for run in runs if run not in by_one), alone):
        if one.bundle_id is not None and one.bundle_id == run.bundle_id:
            found.fleet_against_alone.extend(
                FleetAgainstAlone(run.name, one.name, figure, fleet, single, round(fleet / single, 4))
                for figure, fleet, single in _quantities(run, one)
            )
    return found


def _quantities(run: ComparedDocument, other: ComparedDocument) -> list[tuple[str, float, float]]:
    """Return what a run and another document have in common: latency for one request at a time, else throughput."""
    figure = "latency_ms" if run.at_once == 1 else "throughput"
    measured, value = getattr(run, figure), getattr(other, figure)
    return [(figure, measured, value)] if measured is not None and value else []


def _difference(planned: Mapping[str, Sequence[ShownPart]], run: Mapping[str, Sequence[ShownPart]]) -> str:
    """Return why a run was not one of the planned placement, or an empty string."""
    for name in sorted({*planned, *run}):
        if name not in run:
            return f"the plan has peer {name}, which the run did not use"
        if name not in planned:
            return f"the run used peer {name}, which has no blocks in the plan"
        if set(planned[name]) != set(run[name]):
            return (
                f"{name} has blocks {format_ranges(planned[name])} in the plan, {format_ranges(run[name])} in the run"
            )
    return ""


def evaluations_with_freedom(paths: Sequence[str | Path]) -> list[Evaluation]:
    """Return the evaluations of ``eval --freedom --json`` among the documents, named after their files.

    Raises :class:`UsageError` if there are none, and :class:`DataError` for a file that is not a document.
    """
    found: list[Evaluation] = []
    for name, path in zip(distinct_names([Path(path).with_suffix("") for path in paths]), paths, strict=True):
        document = _read(Path(path))
        several = document.get("evaluations") if isinstance(document, dict) else None
        for one in several if isinstance(several, list) else [document]:
            if isinstance(one, dict) and one.get("freedom"):
                try:
                    evaluation = msgspec.convert(one, Evaluation)
                except msgspec.ValidationError as error:
                    raise DataError(f"{path} is not an evaluation of this version: {error}; make it again") from None
                called = evaluation.name if several else name
                found.append(msgspec.structs.replace(evaluation, name=called))
    if not found:
        raise UsageError("no file is an evaluation within bands; make one with eval --freedom --json")
    return found


def _rows_of(name: str, path: Path) -> list[ComparedDocument]:
    document = _read(path)
    if isinstance(document, dict):
        for keys, read in _READERS:
            if keys <= document.keys():
                try:
                    rows = [{"bundle_id": document.get("bundle_id"), **row} for row in read(name, document)]
                    return msgspec.convert(rows, list[ComparedDocument])
                except (KeyError, TypeError, ValueError, AttributeError, IndexError, msgspec.ValidationError):
                    raise DataError(f"{path} has the keys of a known document, not its values; make it again") from None
    raise DataError(
        f"{path} is not a document that can be compared; give JSON of run, plan, simulate, bench or eval, or a file of "
        "profile"
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give what a command printed with --json, or a profile") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check the path") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON; give what a command printed with --json, or a profile") from None


_Rows = list[dict[str, Any]]


def _run(name: str, document: Mapping[str, Any]) -> _Rows:
    about, simulated = f"policy {document['policy']}", "devices" in document
    if simulated:
        about = f"simulated, {document['devices']} devices, {about}"
    at_once = None if simulated else document.get("settings", {}).get("concurrency")
    if at_once is not None:
        about += f", {at_once} at a time"
    if document["degraded"] or document["failed"]:
        about += f", {document['degraded']} degraded, {document['failed']} failed"
    row = {
        "name": name,
        "kind": "simulate" if simulated else "run",
        "about": about,
        "latency_ms": document["latency_ms"]["p50"],
        "throughput": document["throughput"],
    }
    if not simulated:
        held = {peer: one["blocks"] for peer, one in document.get("peers", {}).items() if one["blocks"]}
        row |= {"accuracy": document["top1"], "at_once": at_once, "placement": held}
    return [row]


def _plan(name: str, document: Mapping[str, Any]) -> _Rows:
    used = {name: blocks for name, blocks in document["placement"].items() if blocks}
    about = f"for {document['objective']}, {len(used)} devices"
    if document["policy"]:
        about += f", policy {document['policy']}"
    rows = [{"name": name, "kind": "plan", "about": about, "placement": used, **_expected(document["expected"])}]
    single = document["baselines"].get("single")
    if single is not None:
        alone = {"name": f"{name}: alone", "kind": "plan, alone", "about": f"{single['device']} alone"}
        rows.append(alone | _expected(single))
    return rows


def _expected(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("latency_ms", "throughput", "energy_mj")}


def _profile(name: str, document: Mapping[str, Any]) -> _Rows:
    rows = []
    for size, times in document["batch"].items():
        about = f"{document['device']['name']}, {document['precision']}, batch {size}"
        about += ", throttled" if document["throttled"] else ""
        called = f"{name}: {size}" if len(document["batch"]) > 1 else name
        energy = {"energy_mj": times["energy_mj_per_image"]}
        rows.append({"name": called, "kind": "profile", "about": about, **_timed(times, size), **energy})
    return rows


def _bench(name: str, document: Mapping[str, Any]) -> _Rows:
    size = document["batch"]
    about = f"chain, {document['precision']}, batch {size}, {document['threads']} threads"
    return [{"name": name, "kind": "bench", "about": about, **_timed(document, size)}]


def _timed(times: Mapping[str, Any], size: Any) -> dict[str, Any]:
    chain = (times["chain_ms"] or {}).get("p50")  # null for a peer, which has no stem and head
    return {"latency_ms": chain, "throughput": int(size) * 1e3 / chain if chain else None}


def _eval(name: str, document: Mapping[str, Any]) -> _Rows:
    arbitrary = document["arbitrary"]
    shown = (
        (name, "trained order", document["sequential"]["top1"]),
        (f"{name}: any order", f"any order, mean of {arbitrary['orders']}", arbitrary["top1_mean"]),
    )
    return [{"name": called, "kind": "eval", "about": about, "accuracy": top1} for called, about, top1 in shown]


def _evals(name: str, document: Mapping[str, Any]) -> _Rows:
    return [
        {"bundle_id": one.get("bundle_id"), **row}
        for one in document["evaluations"]
        for row in _eval(f"{name}: {one['name']}", one)
    ]


_READERS: tuple[tuple[frozenset[str], Callable[[str, Mapping[str, Any]], _Rows]], ...] = (
    (frozenset({"policy", "requests", "answered", "latency_ms"}), _run),
    (frozenset({"objective", "recommendation", "expected", "baselines"}), _plan),
    (frozenset({"device", "batch", "throttled", "parts"}), _profile),
    (frozenset({"chain_ms", "monolith_ms"}), _bench),
    (frozenset({"sequential", "arbitrary"}), _eval),
    (frozenset({"evaluations"}), _evals),
)
"""Keys that identify each kind of document, and its reader."""
