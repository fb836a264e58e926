"""The planning problem of a bundle, profiles of devices and measured links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.peers_file import is_name
from ls_edge.device.profile import BatchTimes, DeviceProfile, LinksDocument, load_profile
from ls_edge.runtime.fleet.planning.problem import Objective, PlannedDevice, PlanningProblem, visit_times
from ls_edge.runtime.fleet.simulation.simulator import SOURCE
from ls_edge.runtime.protocol.codecs import wire_bytes

MEMORY_SHARE = 0.8
"""Fraction of the free memory that engines may take; the rest is for tokens in flight and other processes."""
MBIT, LATENCY_MS = 1000.0, 0.3
"""Assumed speed and latency of links that were not measured: gigabit Ethernet."""


@dataclass(frozen=True)
class NamedProfile:
    """A profile, and the name of the device in the plan."""

    name: str
    path: Path
    profile: DeviceProfile


@dataclass(frozen=True)
class PlanningInputs:
    """Inputs of a plan besides the bundle."""

    profiles: tuple[NamedProfile, ...]
    source: NamedProfile | None = None
    """Profile of the process that has the images; None for one as fast as the fastest device."""
    links: LinksDocument | None = None
    codec: str = "raw"
    mbit: float = MBIT
    latency_ms: float = LATENCY_MS
    replicas: int = 1
    max_replicas: int | None = None
    losses: Mapping[str, float] | None = None
    """Loss probability by device or zone; the empty name stands for all other devices."""
    zones: Mapping[str, str] | None = None
    """Zone by device."""
    throttled: bool = False
    """Whether to accept profiles of devices that throttled."""
    objective: Objective = "latency"
    batch: int | None = None
    """Maximum number of images per engine call of all devices; None for ``batches``, or the best size."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """The same by device, from ``peers.yaml``."""


def read_profiles(arguments: Sequence[str]) -> tuple[NamedProfile, ...]:
    """Read ``FILE``, or ``NAME,NAME=FILE`` for several devices like the one that was measured.

    Raise :class:`DataError` for a file that is not a profile, and :class:`UsageError` for a repeated name.
    """
    found: list[NamedProfile] = []
    for argument in arguments:
        names, equals, path = argument.rpartition("=")
        profile = load_profile(path)
        for name in names.split(",") if equals else (profile.device.name,):
            if not is_name(name):
                raise UsageError(
                    f"{argument!r}: {name!r} is no name of a device; write FILE, or orin-0,orin-1=FILE for several "
                    "like it"
                )
            if any(other.name == name for other in found):
                raise UsageError(
                    f"two profiles are of {name!r}; call one otherwise, for example {name}-b={path}, or leave it out"
                )
            found.append(NamedProfile(name, Path(path), profile))
    return tuple(found)


def problem_of(bundle: Bundle, inputs: PlanningInputs) -> tuple[PlanningProblem, list[str]]:
    """Return the planning problem, and the assumptions about what was not measured.

    Raise :class:`DataError` for profiles of another model or of devices that throttled, and :class:`UsageError` for
    names that no device has.
    """
    assumed: list[str] = []
    everybody = (*inputs.profiles, *((inputs.source,) if inputs.source is not None else ()))
    for one in everybody:
        _check_profile(bundle, one, throttled=inputs.throttled)
    links, wire = _links(bundle, inputs, assumed)
    visits = visit_times([SOURCE, *(one.name for one in inputs.profiles)], links)
    losses = dict(inputs.losses or {})
    zones = dict(inputs.zones or {})
    _check_names(inputs, losses, zones)
    if inputs.source is None:
        quickest = min(inputs.profiles, key=lambda one: _ends_ms(one.profile))
        source_ms, watts = _ends_ms(quickest.profile), quickest.profile.power_watts
        assumed.append(f"stem and head run where the images are, as fast as on {quickest.name} (--source FILE)")
    else:
        source_ms, watts = _ends_ms(inputs.source.profile), inputs.source.profile.power_watts
    runtime = _runtime_times(inputs, assumed)
    devices = tuple(
        _device(
            bundle, one, inputs, visits[one.name], wire[one.name], losses.get(one.name, losses.get("", 0.0)), zones,
            runtime.get(one.name, (0.0, 0.0)), assumed,
        )
        for one in inputs.profiles
    )  # fmt: skip
    problem = PlanningProblem(
        devices=devices,
        num_blocks=bundle.num_blocks,
        replicas=inputs.replicas,
        max_replicas=inputs.max_replicas,
        bands=() if bundle.bands.is_one else tuple(map(tuple, bundle.bands.groups)),
        source_ms=source_ms,
        source_visit_ms=visits[SOURCE],
        source_wire_ms=wire[SOURCE],
        source_mj=None if watts is None else watts * source_ms,
        zone_losses={zone: losses[zone] for zone in set(zones.values()) if zone in losses},
        links_ms={} if inputs.links is None else links,
    )
    return problem, assumed


def _check_profile(bundle: Bundle, one: NamedProfile, *, throttled: bool) -> None:
    profile, manifest = one.profile, bundle.manifest
    if profile.model_id != manifest.model_id:
        raise DataError(
            f"{one.path} is of model {profile.model_id[:16]} ({profile.model}), --bundle is "
            f"{manifest.model_id[:16]} ({manifest.model}); profile this bundle on that device"
        )
    if len(profile.one_at_a_time.blocks_ms) != bundle.num_blocks:
        raise DataError(
            f"{one.path} has {len(profile.one_at_a_time.blocks_ms)} blocks, --bundle has {bundle.num_blocks}; profile "
            "this bundle on that device"
        )
    if profile.throttled and not throttled:
        raise DataError(
            f"{one.path}: {one.name} throttled while it was measured ({'; '.join(profile.throttled_by)}); measure "
            "again when it is cool and well supplied, or take it as it is with --allow-throttled"
        )


def _check_names(inputs: PlanningInputs, losses: Mapping[str, float], zones: Mapping[str, str]) -> None:
    names = {one.name for one in inputs.profiles}
    for name in zones:
        if name not in names:
            raise UsageError(f"--zones names {name!r}, which no profile is of; there are {', '.join(sorted(names))}")
    for name in losses:
        if name and name not in names and name not in zones.values():
            known = ", ".join(sorted({*names, *zones.values()}))
            raise UsageError(f"--loss-probability names {name!r}, which is no device or zone; there are {known}")
    both = names & set(zones.values())
    if both:
        raise UsageError(f"{', '.join(sorted(both))}: a zone is called like a device; call it otherwise")


def _ends_ms(profile: DeviceProfile) -> float:
    times = profile.one_at_a_time
    return (times.stem_ms.p50 + times.head_ms.p50) / min(map(int, profile.batch))


def _device(
    bundle: Bundle, one: NamedProfile, inputs: PlanningInputs, visit_ms: float, wire_ms: float, loss: float,
    zones: Mapping[str, str], runtime: tuple[float, float], assumed: list[str],
) -> PlannedDevice:  # fmt: skip
    profile = one.profile
    images, times = min(map(int, profile.batch)), profile.one_at_a_time
    calls = {int(size): _mean_ms(timed) for size, timed in profile.batch.items()}
    max_batch = _max_batch(one, inputs, calls)
    if max_batch not in calls:
        near = ", ".join(map(str, sorted(calls)))
        assumed.append(f"{one.name} runs batches of up to {max_batch}; what those take is taken from those of {near}")
    if images > 1:
        assumed.append(f"an image alone takes {one.name} what one of {images} takes: none was measured alone")
    full_images = min(calls, key=lambda size: (abs(size - max_batch), size))
    full = profile.batch[str(full_images)]
    free = profile.device.available_bytes
    if free is None:
        assumed.append(f"{one.name} has memory for every block: its profile does not say how much it has")
    room = None if free is None else free * MEMORY_SHARE
    if profile.device.emulated is not None:
        assumed.append(f"{one.name} is emulated, by {profile.device.emulated}")
    return PlannedDevice(
        name=one.name,
        block_ms=profile.block_ms,
        capacity=bundle.num_blocks if room is None else int(room // max(1, profile.block_memory_bytes)),
        stem_ms=times.stem_ms.p50 / images,
        head_ms=times.head_ms.p50 / images,
        visit_ms=visit_ms + runtime[0],
        wire_ms=wire_ms,
        watts=profile.power_watts if full.power_watts is None else full.power_watts,
        idle_watts=profile.idle_watts,
        battery_wh=profile.device.battery_wh,
        loss=loss,
        zone=zones.get(one.name),
        whole=room is None or profile.memory_bytes <= room,
        runtime_ms=runtime[0],
        runtime_mean_ms=runtime[1],
        max_batch=max_batch,
        calls_ms=tuple(sorted(calls.items())),
        ends_ms=(full.stem_ms.p50 + full.head_ms.p50) / full_images,
    )


def _mean_ms(times: BatchTimes) -> float:
    """Return the mean over blocks of the median time of a call."""
    return sum(block.p50 for block in times.blocks_ms) / len(times.blocks_ms)


def _max_batch(one: NamedProfile, inputs: PlanningInputs, calls: Mapping[int, float]) -> int:
    """Return the size that was asked for, else that of ``peers.yaml``, else the best measured one for the objective.

    Only throughput and energy gain from several images per call.
    """
    asked = inputs.batch if inputs.batch is not None else inputs.batches.get(one.name)
    if asked is not None:
        return asked
    if inputs.objective == "throughput":
        return min(calls, key=lambda size: (round(calls[size] / size, 6), size))
    if inputs.objective == "energy":
        energy = {size: one.profile.batch[str(size)].energy_mj_per_image for size in calls}
        known = {size: mj for size, mj in energy.items() if mj is not None}
        if known:
            return min(known, key=lambda size: (known[size], size))
    return min(calls)


def _runtime_times(inputs: PlanningInputs, assumed: list[str]) -> dict[str, tuple[float, float]]:
    """Return the median and mean overhead of an engine call by device, where it was measured."""
    found = {} if inputs.links is None else {call.peer: (call.p50_ms, call.mean_ms) for call in inputs.links.calls}
    missing = [one.name for one in inputs.profiles if one.name not in found]
    if missing:
        assumed.append(
            f"engine calls take nothing beyond the engine on {', '.join(missing)}: that was not measured (--links FILE)"
        )
    return found


def _links(
    bundle: Bundle, inputs: PlanningInputs, assumed: list[str]
) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Return the milliseconds of transfers by pair of processes, and the time that tokens occupy each link."""
    names = [SOURCE, *(one.name for one in inputs.profiles)]
    tokens = bundle.manifest.tokens
    size = wire_bytes(inputs.codec, tokens.count, tokens.dim)
    usual_wire = size * 8e-3 / inputs.mbit
    usual = inputs.latency_ms + usual_wire
    links = {(one, other): usual for one in names for other in names if one != other}
    wire = dict.fromkeys(names, usual_wire)
    if inputs.links is None:
        assumed.append(
            f"links of {inputs.mbit:g} Mbit/s and {inputs.latency_ms:g} ms: none was measured (--links FILE)"
        )
        return links, wire
    if inputs.links.model_id != bundle.manifest.model_id:
        raise DataError("the links were measured with another model's tokens; measure them with this bundle")
    called = {inputs.links.source: SOURCE}
    measured = {
        (called.get(link.origin, link.origin), called.get(link.to, link.to)): link.p50_ms
        for link in inputs.links.transfers
        if link.codec == inputs.codec
    }
    links.update({pair: ms for pair, ms in measured.items() if pair in links})
    missing = sorted({name for pair in links if pair not in measured for name in pair if name != SOURCE})
    if missing:
        assumed.append(
            f"links of {inputs.mbit:g} Mbit/s and {inputs.latency_ms:g} ms where none was measured as {inputs.codec}: "
            f"some of {', '.join(missing)}"
        )
    for name in names:
        fits = (fit for fit in inputs.links.fits if name in {called.get(end, end) for end in (fit.origin, fit.to)})
        known = [fit.mbit_per_s for fit in fits if fit.mbit_per_s]
        taken = [ms for pair, ms in measured.items() if name in pair]
        if known:
            wire[name] = size * 8e-3 / max(known)
        elif taken:
            wire[name] = min(taken)  # at most: latency is in it
    return links, wire
