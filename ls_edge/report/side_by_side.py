"""Runs, plans, simulations, profiles, benchmarks and evaluations side by side, from the JSON of their commands.

What was planned stands beside what was measured where a plan and a run are of the same bundle. A plan's latency is that
of one request alone, so it is compared with runs of one request at a time, and its throughput with runs of several.
Figures that a document does not have are None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.errors import DataError, UsageError
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.report.formatting import distinct_names


class ComparedDocument(msgspec.Struct, frozen=True):
    """The figures of one document; a row of the comparison."""

    name: str
    kind: str
    """``run``, ``plan``, ``simulate``, ``profile``, ``bench`` or ``eval``."""
    about: str
    """Policy, device, objective, and how many requests at once."""
    bundle_id: str | None
    accuracy: float | None
    latency_ms: float | None
    """Median; of a plan, what is expected of one request alone."""
    throughput: float | None
    energy_mj: float | None
    """An image."""
    at_once: int | None = None
    """Requests at once, of a run."""


class PlannedAgainstMeasured(msgspec.Struct, frozen=True):
    """One figure of a plan and of a run of the same bundle."""

    plan: str
    run: str
    figure: str
    """``latency_ms`` or ``throughput``."""
    planned: float
    measured: float
    ratio: float
    """Measured over planned."""


class SideBySide(msgspec.Struct, frozen=True):
    """The document of ``ls-edge report --json``."""

    rows: list[ComparedDocument]
    planned_against_measured: list[PlannedAgainstMeasured]


def side_by_side(paths: Sequence[str | Path]) -> SideBySide:
    """Read documents and compare them; raises :class:`DataError` for a file that is none of those."""
    rows = [row for name, path in zip(distinct_names(paths), paths, strict=True) for row in _rows_of(name, Path(path))]
    pairs = [
        pair
        for plan in rows if plan.kind == "plan"
        for run in rows if run.kind == "run" and run.bundle_id == plan.bundle_id
        for pair in _compared(plan, run)
    ]  # fmt: skip
    return SideBySide(rows, pairs)


def evaluations_with_freedom(paths: Sequence[str | Path]) -> list[Evaluation]:
    """The evaluations of ``eval --freedom --json`` among the documents, named after their files.

    Raises :class:`UsageError` where there are none, and :class:`DataError` for a file that is no document.
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
                    raise DataError(f"{path} is no evaluation of this version: {error}; make it again") from None
                called = evaluation.name if several else name
                found.append(msgspec.structs.replace(evaluation, name=called))
    if not found:
        raise UsageError("none of the files is an evaluation within bands; make one with eval --freedom --json")
    return found


def _rows_of(name: str, path: Path) -> list[ComparedDocument]:
    document = _read(path)
    if isinstance(document, dict):
        for keys, read in _READERS:
            if keys <= document.keys():
                try:
                    return read(name, document)
                except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                    raise DataError(f"{path} has the keys of a known document, not its values; make it again") from None
    raise DataError(
        f"{path} is no document that can be compared; give JSON of run, plan, simulate, bench or eval, or a file of "
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


def _run(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    at_once = document.get("settings", {}).get("concurrency")
    about = f"policy {document['policy']}" + ("" if at_once is None else f", {at_once} at once")
    if document["degraded"] or document["failed"]:
        about += f", {document['degraded']} degraded, {document['failed']} failed"
    return [
        ComparedDocument(
            name, "run", about, document["bundle_id"], _figure(document["top1"]),
            _figure(document["latency_ms"]["p50"]), _figure(document["throughput"]), None,
            at_once if isinstance(at_once, int) else None,
        )
    ]  # fmt: skip


def _plan(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    used = sum(bool(blocks) for blocks in document["placement"].values())
    about = f"for {document['objective']}, {used} devices"
    if document["policy"]:
        about += f", policy {document['policy']}"
    rows = [_expected(name, about, document, document["expected"])]
    single = document["baselines"].get("single")
    if single is not None:
        rows.append(_expected(f"{name}: alone", f"{single['device']} alone", document, single, kind="plan, alone"))
    return rows


def _simulation(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    about = f"simulated, {document['devices']} devices, policy {document['policy']}"
    if document["degraded"] or document["failed"]:
        about += f", {document['degraded']} degraded, {document['failed']} failed"
    return [
        ComparedDocument(
            name, "simulate", about, document["bundle_id"], None, _figure(document["latency_ms"]["p50"]),
            _figure(document["throughput"]), None,
        )
    ]  # fmt: skip


def _expected(
    name: str, about: str, document: Mapping[str, Any], figures: Mapping[str, Any], kind: str = "plan"
) -> ComparedDocument:
    return ComparedDocument(
        name, kind, about, document["bundle_id"], None, _figure(figures["latency_ms"]),
        _figure(figures["throughput"]), _figure(figures["energy_mj"]),
    )  # fmt: skip


def _profile(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    rows = []
    for size, times in document["batch"].items():
        chain, images = _figure(times["chain_ms"]["p50"]), int(size)
        about = f"{document['device']['name']}, {document['precision']}, batch {size}"
        about += ", throttled" if document["throttled"] else ""
        rows.append(
            ComparedDocument(
                name if len(document["batch"]) == 1 else f"{name}: {size}", "profile", about, document["bundle_id"],
                None, chain, images * 1e3 / chain if chain else None, _figure(times["energy_mj_per_image"]),
            )
        )  # fmt: skip
    return rows


def _bench(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    chain, images = _figure(document["chain_ms"]["p50"]), int(document["batch"])
    about = f"chain, {document['precision']}, batch {images}, {document['threads']} threads"
    return [
        ComparedDocument(
            name, "bench", about, document["bundle_id"], None, chain, images * 1e3 / chain if chain else None, None
        )
    ]


def _eval(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    arbitrary, bundle_id = document["arbitrary"], document.get("bundle_id")
    shown = (
        (name, "trained order", document["sequential"]["top1"]),
        (f"{name}: any order", f"any order, mean of {arbitrary['orders']}", arbitrary["top1_mean"]),
    )
    return [
        ComparedDocument(called, "eval", about, bundle_id, _figure(top1), None, None, None)
        for called, about, top1 in shown
    ]


def _evals(name: str, document: Mapping[str, Any]) -> list[ComparedDocument]:
    return [row for one in document["evaluations"] for row in _eval(f"{name}: {one['name']}", one)]


_READERS: tuple[tuple[frozenset[str], Callable[[str, Mapping[str, Any]], list[ComparedDocument]]], ...] = (
    (frozenset({"devices", "sites", "losses", "latency_ms"}), _simulation),
    (frozenset({"policy", "requests", "answered", "latency_ms"}), _run),
    (frozenset({"objective", "recommendation", "expected", "baselines"}), _plan),
    (frozenset({"device", "batch", "throttled", "parts"}), _profile),
    (frozenset({"chain_ms", "monolith_ms"}), _bench),
    (frozenset({"sequential", "arbitrary"}), _eval),
    (frozenset({"evaluations"}), _evals),
)
"""How each document is known, and read."""


def _figure(value: Any) -> float | None:
    """A number of a document, which may be null; raises TypeError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    return float(value)


def _compared(plan: ComparedDocument, run: ComparedDocument) -> list[PlannedAgainstMeasured]:
    found = []
    alone = run.at_once == 1
    pairs = (("latency_ms", plan.latency_ms, run.latency_ms, alone),
             ("throughput", plan.throughput, run.throughput, not alone))  # fmt: skip
    for figure, planned, measured, comparable in pairs:
        if comparable and planned and measured is not None:
            found.append(
                PlannedAgainstMeasured(plan.name, run.name, figure, planned, measured, round(measured / planned, 4))
            )
    return found
