"""``ls_edge.simulate``: a fleet of devices that fail and return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from rich.console import Console

from ls_edge.core.bundle import Bundle
from ls_edge.core.logs import OnProgress, ignore_progress
from ls_edge.core.parts import shown_parts
from ls_edge.core.validation import Settings, flag
from ls_edge.evaluation.simulation_summary import (
    FleetSettings,
    SimulationContext,
    SimulationSummary,
    SiteOutcome,
    summarize_simulation,
)
from ls_edge.report.shown import Shown
from ls_edge.report.simulation import print_simulation
from ls_edge.runtime.fleet.planning.from_profiles import (
    MBIT,
    MeasuredRun,
    PlanningInputs,
    problem_of,
    read_profiles,
)
from ls_edge.runtime.fleet.simulation.site_run import simulate_site
from ls_edge.runtime.fleet.simulation.sites import sites_of
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.simulator.churn import Churn
from ls_edge.runtime.source.settings import Settings as SourceSettings
from ls_edge.runtime.source.settings import check_policy


class SimulationSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``ls-edge simulate``; those without a :func:`flag` are options that other commands share."""

    devices: Annotated[int, Meta(ge=1, le=1_000_000), flag("Number of devices.")]
    requests: Annotated[int, Meta(ge=1, le=10_000_000), flag("Images to classify, at all sites together.")]
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        flag("Holders of a block at a site.  [default: at least 2, or 1 if memory is short]"),
    ] = None
    rate: Annotated[float, Meta(gt=0)] | None = None
    churn: Annotated[
        str | None, flag("Mean times until a device is lost and until it is back, such as up=10m,down=30s.", "SPEC")
    ] = None
    policy: str = "nearest"
    seed: int = 0
    source: str | None = None
    run: str | None = None
    mbit: Annotated[float, Meta(gt=0)] = MBIT


class SimulationResult(Shown, SimulationSummary, frozen=True):
    """Outcome of a simulated fleet; see :class:`SimulationSummary`."""

    def show(self, console: Console) -> None:
        """Print the answer, and the facts behind it."""
        print_simulation(self, console)


def simulate(
    bundle: str | Path, profiles: Sequence[str], *, on_progress: OnProgress = ignore_progress, **settings: Any
) -> SimulationResult:
    """Simulate a fleet, as ``ls-edge simulate``.

    ``profiles`` are files, or ``"NAME,NAME=FILE"``; ``settings`` are :class:`SimulationSettings`.
    """
    return simulate_sites(bundle, profiles, on_progress, **settings)[0]


def simulate_sites(
    bundle: str | Path, profiles: Sequence[str], on_progress: OnProgress, **settings: Any
) -> tuple[SimulationResult, list[SiteOutcome]]:
    """Simulate a fleet; return its result, and the outcomes of the sites."""
    asked = SimulationSettings.of(settings)
    churn = None if asked.churn is None else Churn.parse(asked.churn)
    opened = Bundle.open(bundle)
    check_policy(opened, find_policy(asked.policy))
    run = None if asked.run is None else MeasuredRun.read(Path(asked.run))
    source = None if asked.source is None else read_profiles([asked.source])[0]
    inputs = PlanningInputs(read_profiles(profiles), source, run, asked.mbit, objective="throughput")
    problem, assumptions = problem_of(opened, inputs)
    fleet = FleetSettings(
        devices=asked.devices,
        requests=asked.requests,
        policy=asked.policy,
        max_skips=SourceSettings.of({"policy": asked.policy}).skips_of(opened.num_blocks),
        rate=asked.rate,
        seed=asked.seed,
    )
    on_progress(0, asked.requests, "planning the sites")
    sites = sites_of(problem, fleet, asked.replicas, churn)
    if len(sites) > 1:
        most = max(len(site.kinds) for site in sites)
        assumptions.append(f"{len(sites):,} sites of up to {most} devices, each with its own source")
    if churn is None:
        assumptions.append("no device is lost (--churn)")
    outcomes: list[SiteOutcome] = []
    for site in sites:
        before = sum(len(outcome.states) for outcome in outcomes)
        report = partial(lambda before, over: on_progress(before + over, asked.requests, "requests"), before)
        outcomes.append(simulate_site(site, report))
    context = SimulationContext(
        **msgspec.structs.asdict(fleet),
        bundle_id=opened.manifest.bundle_id,
        replicas=min(site.problem.replicas for site in sites),
        concurrency=max(site.concurrency for site in sites),
        churn=asked.churn,
        sites=len(sites),
        placement={name: shown_parts(parts) for name, parts in sites[0].placement.items()},
        assumptions=assumptions,
    )
    return SimulationResult(**msgspec.structs.asdict(summarize_simulation(outcomes, context))), outcomes
