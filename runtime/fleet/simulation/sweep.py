"""A grid of simulations: all combinations of values, each with several seeds, on any executor; it can be resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import msgspec

from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.evaluation.simulation_summary import (
    Cell,
    SimulationContext,
    SiteOutcome,
    SweepDocument,
    summarize_simulation,
)
from ls_edge.runtime.fleet.simulation.site_pool import MOST_REQUESTS, submit_sites
from ls_edge.runtime.fleet.simulation.sites import Site

MOST_CELLS = 1000


def parse_sweep(texts: Sequence[str], known: Sequence[str]) -> dict[str, list[str]]:
    """Read several ``KEY=A,B``; raise :class:`UsageError` for an unknown or repeated key, or too many combinations."""
    found: dict[str, list[str]] = {}
    count = 1
    for text in texts:
        key, equals, values = text.partition("=")
        given = [value.strip() for value in values.split(",")]
        if key not in known or not equals or not all(given) or len(set(given)) < len(given):
            raise UsageError(
                f"--sweep {text!r} cannot be read; write KEY=A,B with different values (keys: {', '.join(known)})"
            )
        if key in found:
            raise UsageError(f"--sweep lists {key} twice; combine the values as {key}=A,B")
        found[key] = given
        count *= len(given)
    if count > MOST_CELLS:
        raise UsageError(f"--sweep has {count:,} combinations; leave values out, at most {MOST_CELLS:,} are simulated")
    return found


def combinations(sweep: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return all combinations of values."""
    return [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]


def run_sweep(
    document: SweepDocument,
    prepared: Sequence[tuple[Sequence[Site], SimulationContext]],
    *,
    path: Path | None = None,
    executor: Executor | None = None,
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
) -> SweepDocument:
    """Simulate all combinations that ``document`` lacks, and write ``path`` after each.

    ``prepared`` has the sites of each of :func:`combinations`, and the context of their document. Each seed is a run of
    all sites with its own random numbers; the runs of a combination count together. All of them are submitted to
    ``executor`` at the start.
    """
    known = {_key(cell.values): cell.summary for cell in document.cells}
    wanted = combinations(document.sweep)
    waits: dict[int, Callable[[Callable[[int], None]], list[SiteOutcome]]] = {}
    for number, (values, (sites, _)) in enumerate(zip(wanted, prepared, strict=True)):
        if _key(values) not in known:
            if (requests := document.seeds * sum(site.requests for site in sites)) > MOST_REQUESTS:
                raise UsageError(
                    f"--seeds {document.seeds:,} gives a combination {requests:,} requests; at most {MOST_REQUESTS:,} "
                    "are simulated: give fewer seeds, or fewer --requests"
                )
            # Sites of their own, which also begin a trace at a time of their own.
            runs = [replace(site, number=own) for own, site in enumerate([*sites] * document.seeds)]
            waits[number] = submit_sites(runs, executor)

    def found() -> SweepDocument:
        cells = [Cell(values, known[_key(values)]) for values in wanted if _key(values) in known]
        return msgspec.structs.replace(document, cells=cells)

    for number in list(waits):
        on_step(number, len(prepared))
        known[_key(wanted[number])] = summarize_simulation(waits.pop(number)(lambda _done: None), prepared[number][1])
        if path is not None:
            write_output(path, msgspec.json.encode(found()).decode() + "\n")
    on_step(len(prepared), len(prepared))
    return found()


def _key(values: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def continued(document: SweepDocument, path: Path) -> SweepDocument:
    """Add the cells of a file; raise :class:`UsageError` if it has other settings, or cells of other values."""
    if not path.exists():
        return document
    try:
        before = msgspec.json.decode(path.read_bytes(), type=SweepDocument)
    except (msgspec.DecodeError, msgspec.ValidationError, OSError) as error:
        raise UsageError(f"{path} is not a sweep that can be continued ({error}); name another file") from None
    if (before.settings, before.seeds) != (document.settings, document.seeds):
        raise UsageError(f"{path} is a sweep with other settings; name another file, or remove it")
    wanted = set(map(_key, combinations(document.sweep)))
    if others := [cell.values for cell in before.cells if _key(cell.values) not in wanted]:
        values = ", ".join(f"{key}={value}" for key, value in others[0].items())
        raise UsageError(f"{path} has results of {values}, which would be lost; name another file, or add the values")
    return msgspec.structs.replace(document, cells=before.cells)
