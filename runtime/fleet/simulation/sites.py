"""A simulated fleet: sites of devices that come and go, each with a source.

A site is a source and the devices of its ``peers.yaml``, all linked to each other. Sites are independent, so a large
fleet is many small simulations, which may run in several processes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import shown_parts
from ls_edge.evaluation.simulation_summary import FleetSettings, SimulationContext
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import Objective, PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.planning.scoring import requests_at_once
from ls_edge.runtime.simulator.churn import MOST_LOSSES, Battery, Churn, Losses, any_of

SITE_SIZE = 16
"""Devices per site. All peers of a site exchange their states, so the cost grows with the square."""
MOST_S = 1e10
"""Maximum simulated time, which floats resolve to microseconds."""
REPLICAS = 2
"""Default number of holders of a block, if memory allows; with a single holder, each loss costs blocks."""


@dataclass(frozen=True)
class Site:
    """One site: its devices, their blocks, and its requests."""

    number: int
    problem: PlanningProblem
    placement: dict[str, tuple[int, ...]]
    kinds: dict[str, str]
    """Name of the profile, by device."""
    requests: int
    concurrency: int
    rate: float | None
    """Images per second."""
    settings: FleetSettings
    churn: Losses = ()

    def check(self) -> None:
        """Raise :class:`UsageError` if requests at this rate take too long to simulate."""
        seconds = 0.0 if self.rate is None else self.requests / max(self.rate, 1e-300)
        used = sum(map(bool, self.placement.values()))
        losses, most = sum(loss.per_second(used) for loss in self.churn) * seconds, MOST_LOSSES // used
        if seconds > MOST_S or losses > most:
            raise UsageError(
                f"{self.requests:,} requests at {self.rate or 0:g} per second take {seconds:.3g} s, with about "
                f"{losses:.3g} losses of devices at a site; at most {MOST_S:g} s and {most:,} losses are simulated: "
                "raise --rate, or give fewer requests"
            )


def sites_of(
    problem: PlanningProblem,
    settings: FleetSettings,
    *,
    site_size: int = SITE_SIZE,
    churn: Losses = (),
) -> tuple[list[Site], list[str]]:
    """Divide a fleet into sites of about equal size, plan each for throughput, and list the assumptions.

    ``problem`` has one device for each profile; the fleet repeats them in turn, so all sites are similar. Raise
    :class:`UsageError` if a site has no room for the model.
    """
    count = len(problem.devices)
    if settings.devices < count:
        raise UsageError(
            f"--devices {settings.devices} is less than the number of profiles ({count}); raise it, or leave profiles "
            "out"
        )
    if any(isinstance(loss, Churn) and math.isnan(loss.up) for loss in churn):
        for device in problem.devices:
            if battery_of(device) is None:
                raise UsageError(
                    f"--churn up=battery: the profile of {device.name} has no capacity or power of its battery; "
                    "measure it on battery, or give mean times, up=8h,down=2h"
                )
    number = math.ceil(settings.devices / site_size)
    kinds = itertools.cycle(range(count))
    plan = functools.cache(functools.partial(plan_site, problem, settings.replicas, churn=churn))
    sites: list[Site] = []
    for site in range(number):
        size = settings.devices // number + (site < settings.devices % number)
        chosen = tuple(sorted(itertools.islice(kinds, size)))
        requests = settings.requests // number + (site < settings.requests % number)
        if requests:
            own, placement, named = plan(chosen)
            at_once = settings.concurrency or requests_at_once(own, placement)
            rate = None if settings.rate is None else settings.rate * requests / settings.requests
            sites.append(Site(site, own, placement, named, requests, at_once, rate, settings, churn))
    assumed: list[str] = []
    if number > 1:
        assumed.append(f"{number:,} sites of up to {site_size} devices, each with its own source (--site-size)")
    if len(sites) < number:
        assumed.append(f"{number - len(sites):,} sites have no requests and are left out")
    if problem.links_ms and not all(site.problem.links_ms for site in sites):
        assumed.append(
            "each link takes the mean time of the links of both profiles: sites have several devices with a profile"
        )
    if not churn:
        assumed.append("no device is lost (--churn)")
    return sites, assumed


def plan_site(
    problem: PlanningProblem,
    replicas: int | None,
    chosen: tuple[int, ...],
    *,
    churn: Losses = (),
    exactly: bool = False,
) -> tuple[PlanningProblem, dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the problem of a site with a copy of each chosen device, its placement, and each device's profile name.

    Further devices of a profile are called ``NAME-2`` and so on. Measured links apply to a site without copies;
    otherwise a link takes the average of the links of both profiles. The largest zones of ``churn`` are consecutive
    devices, and no zone holds a block twice; devices of smaller zones count as lost independently, so no probability
    of survival is too high. With ``exactly``, no block has more than ``replicas`` holders, and the placement is the one
    most likely to survive.
    """
    devices: list[PlannedDevice] = []
    kinds: dict[str, str] = {}
    taken = {device.name for device in problem.devices}
    copies: Counter[int] = Counter()
    for index in chosen:
        copies[index] += 1
        kind = problem.devices[index].name
        name = kind
        if copies[index] > 1:
            name = next(n for i in itertools.count(copies[index]) if (n := f"{kind}-{i}") not in taken)
            taken.add(name)
        devices.append(dataclasses.replace(problem.devices[index], name=name))
        kinds[name] = kind
    same = len(devices) == len(problem.devices) and not (copies - Counter(range(len(problem.devices))))
    site = dataclasses.replace(problem, devices=tuple(devices), links_ms=problem.links_ms if same else {})
    zoned = [loss for loss in churn if isinstance(loss, Churn) and loss.zone > 1]
    if zoned:
        size = max(loss.zone for loss in zoned)
        apart = [loss.loss for loss in zoned if loss.zone < size]
        devices = [
            dataclasses.replace(one, zone=f"zone-{i // size + 1}", loss=any_of([one.loss, *apart]))
            for i, one in enumerate(devices)
        ]
        together = any_of([loss.loss for loss in zoned if loss.zone == size])
        losses = {str(device.zone): together for device in devices}
        site = dataclasses.replace(site, devices=tuple(devices), zone_losses=losses)
    least = REPLICAS if replicas is None else replicas
    site = dataclasses.replace(site, replicas=least)
    if replicas is None and not (site.fits(least) and least <= (problem.max_replicas or least)):
        site = dataclasses.replace(site, replicas=1)
    objective: Objective = "throughput"
    if exactly:
        site, objective = dataclasses.replace(site, max_replicas=replicas), "survival"
    try:
        site.check(objective)
    except UsageError as error:
        raise UsageError(f"a site of {len(devices)} devices: {error}, or raise --site-size") from None
    best = plan_placement(site, objective).best
    return site, {name: tuple(blocks) for name, blocks in best.placement.items()}, kinds


def battery_of(device: PlannedDevice) -> Battery | None:
    """Return the battery of a device; None if it has none or its power is unknown."""
    if device.battery_wh is None or device.idle_watts is None or not device.watts:
        return None
    return Battery(3600 * device.battery_wh, device.idle_watts, max(device.watts, device.idle_watts))


def simulation_context(
    sites: Sequence[Site], *, bundle_id: str, churn: Sequence[str], assumptions: Sequence[str]
) -> SimulationContext:
    """Return the settings of a simulation, with the replicas and the concurrency of its sites."""
    first = sites[0]
    settings = msgspec.structs.replace(
        first.settings,
        devices=sum(len(site.kinds) for site in sites),
        replicas=min(site.problem.replicas for site in sites),
        concurrency=max(site.concurrency for site in sites),
    )
    return SimulationContext(
        bundle_id=bundle_id,
        sites=len(sites),
        devices_per_site=max(len(site.kinds) for site in sites),
        placement={name: shown_parts(parts) for name, parts in first.placement.items()},
        churn=list(churn),
        assumptions=list(assumptions),
        **msgspec.structs.asdict(settings),
    )
