"""A simulated fleet: sites of devices that come and go, each with a source.

A site is a source and the devices of its ``peers.yaml``, all linked to each other. Sites are independent, so a large
fleet is many small simulations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ls_edge.core.errors import UsageError
from ls_edge.core.text import counted
from ls_edge.evaluation.simulation_summary import FleetSettings
from ls_edge.runtime.fleet.planning.document import requests_at_once
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.simulator.churn import Churn

SITE_SIZE = 16
"""Maximum number of devices of a site, unless the model needs more. All peers of a site exchange their states, so the
cost grows with the square."""
REPLICAS = 2
"""Default number of holders of a block, if memory allows; with a single holder, each loss costs blocks."""
MOST_LOSSES = 1_000_000
"""Maximum expected number of losses at a site times its devices: 0.2 to 0.3 ms each."""


@dataclass(frozen=True)
class Site:
    """One site: its devices, their blocks, and its requests."""

    number: int
    problem: PlanningProblem
    placement: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    """Name of the profile, by device."""
    requests: int
    rate: float | None
    """Images per second."""
    settings: FleetSettings
    churn: Churn | None = None

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight, which keeps the devices busy."""
        return requests_at_once(self.problem, self.placement)


def sites_of(
    problem: PlanningProblem, settings: FleetSettings, replicas: int | None = None, churn: Churn | None = None
) -> list[Site]:
    """Divide a fleet into sites of about equal size, and plan each for throughput.

    ``problem`` has one device for each profile; the fleet repeats them in turn, so all sites are similar. Sites without
    requests are left out. Raise :class:`UsageError` if a site has no room for the model.
    """
    count = len(problem.devices)
    rounds = math.ceil(problem.num_blocks * (replicas or 1) / max(1, sum(map(problem.room, problem.devices))))
    number = max(1, min(math.ceil(settings.devices / SITE_SIZE), settings.devices // (count * rounds)))
    if settings.devices < count:
        raise UsageError(
            f"--devices {settings.devices} is less than the number of profiles ({count}); raise it, or leave profiles "
            "out"
        )
    kinds = itertools.cycle(range(count))
    plan = functools.cache(functools.partial(_plan_site, problem, replicas))
    sites: list[Site] = []
    for site in range(number):
        chosen = tuple(sorted(itertools.islice(kinds, _part(settings.devices, number, site))))
        requests = _part(settings.requests, number, site)
        if requests:
            rate = None if settings.rate is None else settings.rate * requests / settings.requests
            sites.append(Site(site, *plan(chosen), requests, rate, settings, churn))
    _check_losses(sites[0])
    return sites


def _part(total: int, number: int, index: int) -> int:
    """Return an equal part of a total."""
    return total // number + (index < total % number)


def _check_losses(site: Site) -> None:
    """Raise :class:`UsageError` if requests at this rate take too long to simulate."""
    if site.churn is None or site.rate is None:
        return
    losses = site.requests / site.rate / (site.churn.up + site.churn.down) * len(site.kinds)
    if losses * len(site.kinds) > MOST_LOSSES:
        raise UsageError(
            f"{site.requests:,} requests at {site.rate:g} per second see about {losses:.3g} losses of devices at a "
            "site, too many to simulate; raise --rate, or give fewer --requests"
        )


def _plan_site(
    problem: PlanningProblem, replicas: int | None, chosen: tuple[int, ...]
) -> tuple[PlanningProblem, Mapping[str, tuple[int, ...]], Mapping[str, str]]:
    """Return the problem of a site with a copy of each chosen device, its placement, and each device's profile name.

    Further devices of a profile are called ``NAME-2`` and so on.
    """
    devices: list[PlannedDevice] = []
    kinds: dict[str, str] = {}
    taken = {device.name for device in problem.devices}
    copies: Counter[int] = Counter()
    for index in chosen:
        copies[index] += 1
        name = kind = problem.devices[index].name
        if copies[index] > 1:
            name = next(n for i in itertools.count(copies[index]) if (n := f"{kind}-{i}") not in taken)
            taken.add(name)
        devices.append(dataclasses.replace(problem.devices[index], name=name))
        kinds[name] = kind
    site = dataclasses.replace(problem, devices=tuple(devices), replicas=REPLICAS if replicas is None else replicas)
    if replicas is None and site.most_replicas < REPLICAS:
        site = dataclasses.replace(site, replicas=1)
    try:
        return site, plan_placement(site, "throughput", exactly=replicas is not None).best.placement, kinds
    except UsageError as error:
        raise UsageError(f"a site of {counted(len(devices), 'device')}: {error}") from None
