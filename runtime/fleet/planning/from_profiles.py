"""The planning problem for a bundle, profiles of devices, and measured links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import ENDS
from ls_edge.core.peers_file import is_name
from ls_edge.core.text import counted, short_id
from ls_edge.device.profile import DeviceProfile, LinksDocument, load_links, load_profile
from ls_edge.runtime.fleet.planning.problem import Objective, PlannedDevice, PlanningProblem, visit_times
from ls_edge.runtime.protocol.codecs import wire_bytes
from ls_edge.runtime.simulator.simulation import SOURCE

MEMORY_SHARE = 0.8
"""Fraction of the free memory for engines; the rest is for tokens in flight and other processes."""
MBIT, LATENCY_MS = 1000.0, 0.3
"""Assumed speed and latency of links that were not measured: gigabit Ethernet."""
CALL_MS = 0.6
"""Assumed overhead of an engine call where it was not measured: the cost of a hop in docs/measurements.md, "A chain of
peers"."""
JPEG_BITS_PER_PIXEL = 2.0
"""Assumed size of images sent as JPEG."""


@dataclass(frozen=True)
class NamedProfile:
    """A profile, and the name of the device in the plan."""

    name: str
    path: Path
    profile: DeviceProfile


@dataclass(frozen=True)
class PlanningInputs:
    """Inputs of a plan in addition to the bundle."""

    profiles: tuple[NamedProfile, ...]
    source: NamedProfile | None = None
    """Profile of the process that has the images; None for one as fast as the fastest device."""
    links: LinksDocument | None = None
    codec: str = "raw"
    mbit: float = MBIT
    latency_ms: float = LATENCY_MS
    replicas: int = 1
    max_replicas: int | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    """Loss probability by device or zone; the empty name is for all other devices."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Zone by device."""
    throttled: bool = False
    """Whether to accept profiles of devices that throttled."""
    objective: Objective = "latency"
    batch: int | None = None
    """Maximum number of images per engine call of all devices; None for ``batches``, or the best size."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """Maximum by device, from ``peers.yaml``."""


@dataclass(frozen=True)
class _PlannedLinks:
    """Links between the processes of a plan, in milliseconds."""

    transfers: Mapping[tuple[str, str], float]
    """Transfers of tokens by sender and receiver."""
    wire: Mapping[str, float]
    """Time for which tokens occupy the link of each process."""
    calls: Mapping[str, tuple[float, float]]
    """Median and mean overhead of an engine call by device, where it was measured."""
    visits: Mapping[str, float]
    """Cost of a visit of each process (:func:`visit_times`)."""


def read_profiles(arguments: Sequence[str]) -> tuple[NamedProfile, ...]:
    """Read ``FILE``, or ``NAME,NAME=FILE`` for several devices with the same profile.

    Raise :class:`DataError` for a file that is not a profile, and :class:`UsageError` for a repeated name.
    """
    found: list[NamedProfile] = []
    for argument in arguments:
        names, equals, path = argument.rpartition("=")
        profile = load_profile(path)
        for name in names.split(",") if equals else (profile.device.name,):
            if not is_name(name):
                raise UsageError(
                    f"{argument!r}: {name!r} cannot name a device; write FILE, or orin-0,orin-1=FILE for several "
                    "devices with the same profile"
                )
            if any(other.name == name for other in found):
                raise UsageError(
                    f"two profiles have the name {name!r}; rename one, for example {name}-b={path}, or leave it out"
                )
            found.append(NamedProfile(name, Path(path), profile))
    return tuple(found)


def read_inputs(
    profiles: Sequence[str],
    *,
    source: str | None = None,
    links: str | Path | None = None,
    link_ms: float = LATENCY_MS,
    allow_throttled: bool = False,
    **others: Any,
) -> PlanningInputs:
    """Read the files of a plan; parameters are named as the options of ``ls-edge plan``, or as fields of the inputs."""
    return PlanningInputs(
        profiles=read_profiles(profiles),
        source=None if source is None else read_profiles([source])[0],
        links=None if links is None else load_links(links),
        latency_ms=link_ms,
        throttled=allow_throttled,
        **others,
    )


@dataclass(frozen=True)
class ModelSizes:
    """Properties of a model that a plan needs, with or without a bundle; sizes in bytes."""

    num_blocks: int
    token_bytes: int
    """Size of the tokens of an image on a link."""
    image_bytes: float = 224 * 224 * JPEG_BITS_PER_PIXEL / 8
    logits_bytes: int = 4 * 1000
    bands: tuple[tuple[int, ...], ...] = ()
    bundle: Bundle | None = None
    """Bundle that profiles and links must belong to; None for a model that does not exist yet."""

    @classmethod
    def of(cls, bundle: Bundle, codec: str) -> ModelSizes:
        """Return the sizes of a bundle."""
        (height, width), tokens = bundle.manifest.image.size, bundle.manifest.tokens
        return cls(
            bundle.num_blocks,
            wire_bytes(codec, tokens.count, tokens.dim),
            height * width * JPEG_BITS_PER_PIXEL / 8,
            4 * len(bundle.manifest.classes),
            () if bundle.bands.is_one else tuple(map(tuple, bundle.bands.groups)),
            bundle,
        )


def problem_of(model: Bundle | ModelSizes, inputs: PlanningInputs) -> tuple[PlanningProblem, list[str]]:
    """Return the planning problem, and assumptions in place of missing measurements.

    Raise :class:`DataError` for profiles of another model or of devices that throttled, and :class:`UsageError` for
    names that no device has.
    """
    assumed: list[str] = []
    sizes = model if isinstance(model, ModelSizes) else ModelSizes.of(model, inputs.codec)
    everybody = (*inputs.profiles, *((inputs.source,) if inputs.source is not None else ()))
    for one in everybody:
        _check_profile(sizes.bundle, one, throttled=inputs.throttled)
    network = _network(sizes, inputs, assumed)
    _check_names(inputs)
    measured, source = _source(inputs, network, assumed)
    missing = [one.name for one in inputs.profiles if one.name not in network.calls]
    if missing:
        assumed.append(
            f"around each engine call, {', '.join(missing)} spends another {CALL_MS:g} ms: not measured (--links FILE)"
        )
    assumed.append(
        f"where devices run the stem, images are sent as JPEG with {JPEG_BITS_PER_PIXEL:g} bits per pixel, and "
        "decoding takes no time"
    )
    problem = PlanningProblem(
        devices=tuple(_device(sizes, one, inputs, network, measured, assumed) for one in inputs.profiles),
        num_blocks=sizes.num_blocks,
        replicas=inputs.replicas,
        max_replicas=inputs.max_replicas,
        bands=sizes.bands,
        source=source,
        image_share=sizes.image_bytes / sizes.token_bytes,
        logits_share=sizes.logits_bytes / sizes.token_bytes,
        token_bytes=sizes.token_bytes,
        zone_losses={zone: inputs.losses[zone] for zone in set(inputs.zones.values()) if zone in inputs.losses},
        links_ms={} if inputs.links is None else network.transfers,
    )
    return problem, assumed


def _check_profile(bundle: Bundle | None, one: NamedProfile, *, throttled: bool) -> None:
    profile = one.profile
    if bundle is not None and profile.model_id != bundle.manifest.model_id:
        manifest = bundle.manifest
        raise DataError(
            f"{one.path} is of model {short_id(profile.model_id)} ({profile.model}), --bundle is "
            f"{short_id(manifest.model_id)} ({manifest.model}); profile this bundle on that device"
        )
    if bundle is not None and len(profile.one_at_a_time.blocks_ms) != bundle.num_blocks:
        raise DataError(
            f"{one.path} has {counted(len(profile.one_at_a_time.blocks_ms), 'block')}, --bundle has "
            f"{bundle.num_blocks}; profile this bundle on that device"
        )
    if profile.throttled and not throttled:
        raise DataError(
            f"{one.path}: {one.name} throttled while it was measured ({'; '.join(profile.throttled_by)}); measure "
            "again when it is cool and has enough power, or accept this profile with --allow-throttled"
        )


def _check_names(inputs: PlanningInputs) -> None:
    names, zones = {one.name for one in inputs.profiles}, set(inputs.zones.values())
    if SOURCE in names:
        raise UsageError(f"{SOURCE!r} names the process that has the images; give that profile another name, NAME=FILE")
    for name in inputs.zones:
        if name not in names:
            raise UsageError(f"--zones names {name!r}, which has no profile; profiles name {', '.join(sorted(names))}")
    for name in inputs.losses:
        if name and name not in names | zones:
            known = ", ".join(sorted(names | zones))
            raise UsageError(
                f"--loss-probability names {name!r}, which is neither a device nor a zone; there are {known}"
            )
    both = names & zones
    if both:
        raise UsageError(f"{', '.join(sorted(both))} names both a zone and a device; rename the zone")


def _source(inputs: PlanningInputs, network: _PlannedLinks, assumed: list[str]) -> tuple[NamedProfile, PlannedDevice]:
    """Return the profile of the source, and the source as a device without room for blocks."""
    known = {
        one.name: (one, ends)
        for one in ((inputs.source,) if inputs.source is not None else inputs.profiles)
        if (ends := _ends_ms(one.profile)) is not None
    }
    if not known:
        raise UsageError(
            "stem and head were not measured: peers have none; profile the machine that has the images with "
            "'ls-edge bench BUNDLE --out FILE', and give --source FILE"
        )
    one, (stem_ms, head_ms) = min(known.values(), key=lambda found: sum(found[1]))
    if inputs.source is None:
        assumed.append(f"stem and head run where the images are, as fast as on {one.name} (--source FILE)")
    return one, PlannedDevice(
        SOURCE,
        max(one.profile.block_ms, 1e-9),  # the times of stem and head are divided by it
        0,
        stem_ms=stem_ms,
        head_ms=head_ms,
        visit_ms=network.visits[SOURCE],
        wire_ms=network.wire[SOURCE],
        watts=one.profile.power_watts,
    )


def _ends_ms(profile: DeviceProfile) -> tuple[float, float] | None:
    """Return the milliseconds of stem and head for one image; None if they were not measured."""
    size = min(map(int, profile.batch))
    times = profile.batch[str(size)]
    if times.stem_ms is None or times.head_ms is None:
        return None
    return times.stem_ms.p50 / size, times.head_ms.p50 / size


def _device(
    sizes: ModelSizes,
    one: NamedProfile,
    inputs: PlanningInputs,
    network: _PlannedLinks,
    source: NamedProfile,
    assumed: list[str],
) -> PlannedDevice:
    profile = one.profile
    images = min(map(int, profile.batch))
    calls = {int(size): timed.block_ms for size, timed in profile.batch.items()}
    max_batch = _max_batch(one, inputs, calls)
    if max_batch not in calls:
        near = ", ".join(map(str, sorted(calls)))
        assumed.append(f"{one.name} runs batches of up to {max_batch}: their time is estimated from batches of {near}")
    if images > 1:
        assumed.append(
            f"on {one.name}, a single image takes as long as one in a batch of {images}: none was measured alone"
        )
    copies_ms = profile.one_at_a_time.visit_ms
    runtime_ms, runtime_mean_ms = (ms + copies_ms for ms in network.calls.get(one.name, (CALL_MS, CALL_MS)))
    full_images = min(calls, key=lambda size: (abs(size - max_batch), size))
    full = profile.batch[str(full_images)]
    ends = _ends_ms(profile)
    if ends is None:
        slower = profile.block_ms / max(source.profile.block_ms, 1e-9)
        stem, head = _ends_ms(source.profile) or (0.0, 0.0)
        ends = stem * slower, head * slower
        assumed.append(f"stem and head are slower on {one.name} than on {source.name} by the same factor as a block")
    free = profile.device.available_bytes
    if free is None:
        assumed.append(f"{one.name} has memory for every block: its profile does not say how much")
    block_bytes, parts = max(1, profile.block_memory_bytes), {part.part for part in profile.parts}
    missing = {*ENDS.values()} - parts  # a peer may have neither stem nor head
    taken = profile.memory_bytes + sum(part.taken_bytes for part in source.profile.parts if part.part in missing)
    room = block_bytes * sizes.num_blocks + taken if free is None else free * MEMORY_SHARE
    return PlannedDevice(
        name=one.name,
        block_ms=profile.block_ms,
        capacity=room / block_bytes,
        ends_size=max(0.0, taken / block_bytes - len(parts - set(ENDS.values()))),
        stem_ms=ends[0],
        head_ms=ends[1],
        visit_ms=network.visits[one.name] + runtime_ms,
        wire_ms=network.wire[one.name],
        watts=profile.power_watts if full.power_watts is None else full.power_watts,
        idle_watts=profile.idle_watts,
        battery_wh=profile.device.battery_wh,
        loss=inputs.losses.get(one.name, inputs.losses.get("", 0.0)),
        zone=inputs.zones.get(one.name),
        runtime_ms=runtime_ms,
        runtime_mean_ms=runtime_mean_ms,
        max_batch=max_batch,
        calls_ms=tuple(sorted(calls.items())),
    )


def _max_batch(one: NamedProfile, inputs: PlanningInputs, calls: Mapping[int, float]) -> int:
    """Return ``batch``, else the size in ``peers.yaml``, else the best measured size for the objective.

    Only throughput and energy benefit from several images per call.
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


def _network(sizes: ModelSizes, inputs: PlanningInputs, assumed: list[str]) -> _PlannedLinks:
    """Return the links, with assumed values where none were measured."""
    names = [SOURCE, *(one.name for one in inputs.profiles)]
    size = sizes.token_bytes
    usual_wire = size * 8e-3 / inputs.mbit
    transfers = dict.fromkeys(itertools.permutations(names, 2), inputs.latency_ms + usual_wire)
    wire = dict.fromkeys(names, usual_wire)
    usual = f"links of {inputs.mbit:g} Mbit/s and {inputs.latency_ms:g} ms"
    if inputs.links is None:
        assumed.append(f"{usual}: none was measured (--links FILE)")
        return _PlannedLinks(transfers, wire, {}, visit_times(names, transfers))
    if sizes.bundle is None or inputs.links.model_id != sizes.bundle.manifest.model_id:
        raise DataError("the links were measured with another model's tokens; measure them with this bundle")
    assumed += [link.noise for link in inputs.links.transfers if link.codec == inputs.codec and link.noise]
    called = {inputs.links.source: SOURCE}
    measured = {
        (called.get(link.origin, link.origin), called.get(link.to, link.to)): link.p50_ms
        for link in inputs.links.transfers
        if link.codec == inputs.codec
    }
    missing = sorted({name for pair in transfers if pair not in measured for name in pair if name != SOURCE})
    transfers.update({pair: ms for pair, ms in measured.items() if pair in transfers})
    if missing:
        assumed.append(f"{usual} where none was measured as {inputs.codec}: some of {', '.join(missing)}")
    for name in names:
        fits = (fit for fit in inputs.links.fits if name in {called.get(end, end) for end in (fit.origin, fit.to)})
        known = [fit.mbit_per_s for fit in fits if fit.mbit_per_s]
        taken = [ms for pair, ms in measured.items() if name in pair]
        if known or taken:  # no transfer is shorter than its time on the wire
            wire[name] = min([*taken, *(size * 8e-3 / mbit for mbit in known)])
    calls = {call.peer: (call.p50_ms, call.mean_ms) for call in inputs.links.calls}
    return _PlannedLinks(transfers, wire, calls, visit_times(names, transfers))
