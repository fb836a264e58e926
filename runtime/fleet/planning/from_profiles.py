"""The planning problem for a bundle, profiles of devices, and a run that shows the times of the links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import ENDS
from ls_edge.core.peers_file import is_name
from ls_edge.core.text import counted, short_id
from ls_edge.core.validation import InvalidDocument, read_json
from ls_edge.device.hardware import memory_for_engines
from ls_edge.device.profile import DeviceProfile, load_profile
from ls_edge.runtime.fleet.planning.problem import Objective, PlannedDevice, PlanningProblem
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.simulator.simulation import SOURCE

MBIT, LATENCY_MS = 1000.0, 0.3
"""Assumed speed and latency of links that were not measured: gigabit Ethernet."""
CALL_MS = 0.6
"""Assumed overhead of an engine call: about that of a hop in docs/results.md, "What does a hop cost?"."""
JPEG_BITS_PER_PIXEL = 2.0
"""Assumed size of images sent as JPEG."""


@dataclass(frozen=True)
class NamedProfile:
    """A profile, and the name of the device in the plan."""

    name: str
    path: Path
    profile: DeviceProfile


class HopTimes(msgspec.Struct, frozen=True):
    """Times of hops in a run; null without any."""

    wire_ms_p50: float | None = None
    codec_ms_p50: float | None = None


class MeasuredRun(msgspec.Struct, frozen=True):
    """Links in the document of ``ls-edge run --json``."""

    bundle_id: str
    hops: HopTimes
    peers: dict[str, HopTimes]

    @classmethod
    def read(cls, path: Path) -> MeasuredRun:
        """Read a run; raise :class:`DataError` for any other file."""
        try:
            return read_json(path, cls)
        except InvalidDocument as error:
            raise DataError(f"{path} is not a run{error}; make it with 'ls-edge run --json > {path}'") from None


@dataclass(frozen=True)
class PlanningInputs:
    """Inputs of a plan in addition to the bundle."""

    profiles: tuple[NamedProfile, ...]
    source: NamedProfile | None = None
    """Profile of the process that has the images; None for one as fast as the fastest device."""
    run: MeasuredRun | None = None
    mbit: float = MBIT
    replicas: int = 1
    objective: Objective = "latency"
    batches: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of images per engine call by device, from ``peers.yaml``; others get the best size."""
    codecs: Mapping[str, str] = field(default_factory=dict)
    """Encoding of the tokens that are sent to a device, from ``peers.yaml``; ``raw`` for others and the source."""

    def token_bytes(self, bundle: Bundle, name: str) -> int:
        """Return the size of the tokens of an image that are sent to a process."""
        codec = codec_of(self.codecs.get(name, "raw"))
        return codec.wire_bytes(bundle.manifest.tokens.count, bundle.manifest.tokens.dim)

    def link(self, bundle: Bundle, name: str) -> tuple[float, float]:
        """Return the milliseconds of a transfer, and those for which it occupies the link of a device."""
        wire_ms = self.token_bytes(bundle, name) * 8e-3 / self.mbit
        if (ms := self.measured_ms(name)) is None:
            return LATENCY_MS + wire_ms, wire_ms
        return ms, min(ms, wire_ms)

    def measured_ms(self, name: str) -> float | None:
        """Return the milliseconds of a hop in the run; None for a device that it did not use."""
        if self.run is None:
            return None
        wire_ms = (self.run.hops if name == SOURCE else self.run.peers.get(name, HopTimes())).wire_ms_p50
        return None if wire_ms is None else wire_ms + (self.run.hops.codec_ms_p50 or 0.0)


def read_profiles(arguments: Sequence[str]) -> tuple[NamedProfile, ...]:
    """Read ``FILE``, or ``NAME,NAME=FILE`` for several devices with the same profile.

    Raise :class:`DataError` for a file that is not a profile, and :class:`UsageError` for a repeated name.
    """
    found: list[NamedProfile] = []
    for argument in arguments:
        names, equals, path = argument.rpartition("=")
        if not path:
            raise UsageError(f"{argument!r} names no file; write FILE, or NAME=FILE")
        profile = load_profile(path)
        for name in names.split(",") if equals else (profile.device.name,):
            if not is_name(name):
                raise UsageError(
                    f"{argument!r}: {name!r} cannot name a device; write FILE, or orin-0,orin-1=FILE for several "
                    "devices with the same profile"
                )
            if name == SOURCE or any(other.name == name for other in found):
                other = "the process that has the images" if name == SOURCE else "another profile"
                raise UsageError(f"{name!r} names {other}, too; rename one, for example {name}-b={path}")
            found.append(NamedProfile(name, Path(path), profile))
    return tuple(found)


def problem_of(bundle: Bundle, inputs: PlanningInputs) -> tuple[PlanningProblem, list[str]]:
    """Return the planning problem, and assumptions in place of missing measurements.

    Raise :class:`DataError` for profiles or a run of another model.
    """
    assumed: list[str] = []
    for one in (*inputs.profiles, *((inputs.source,) if inputs.source is not None else ())):
        _check_profile(bundle, one)
        if one.profile.throttled:
            why = "; ".join(one.profile.throttled_by)
            assumed.append(f"{one.name} is as slow as measured, although it throttled ({why}): measure it again")
    if inputs.objective == "energy" and len({one.profile.power_scope for one in inputs.profiles}) > 1:
        measured = ", ".join(f"{one.name} ({one.profile.power_scope})" for one in inputs.profiles)
        assumed.append(f"power is compared although the sensors measure different things: {measured}")
    if inputs.run is not None and inputs.run.bundle_id != bundle.manifest.bundle_id:
        raise DataError(
            f"--run is of bundle {short_id(inputs.run.bundle_id)}, --bundle is {short_id(bundle.manifest.bundle_id)}; "
            "run this bundle"
        )
    if unknown := [one.name for one in inputs.profiles if inputs.measured_ms(one.name) is None]:
        assumed.append(
            f"links of {inputs.mbit:g} Mbit/s and {LATENCY_MS:g} ms for {', '.join(unknown)}: not measured (--run FILE)"
        )
    assumed.append(f"around each engine call, a device spends another {CALL_MS:g} ms")
    assumed.append(
        f"where devices run the stem, images are sent as JPEG with {JPEG_BITS_PER_PIXEL:g} bits per pixel, and "
        "decoding takes no time"
    )
    fastest, source = _source(bundle, inputs, assumed)
    (height, width), token_bytes = bundle.manifest.image.size, inputs.token_bytes(bundle, SOURCE)
    problem = PlanningProblem(
        devices=tuple(_device(bundle, one, inputs, fastest, assumed) for one in inputs.profiles),
        num_blocks=bundle.num_blocks,
        replicas=inputs.replicas,
        bands=() if bundle.bands.is_one else tuple(map(tuple, bundle.bands.groups)),
        source=source,
        image_share=height * width * JPEG_BITS_PER_PIXEL / 8 / token_bytes,
        logits_share=4 * len(bundle.manifest.classes) / token_bytes,
    )
    return problem, assumed


def _check_profile(bundle: Bundle, one: NamedProfile) -> None:
    manifest, profile, again = bundle.manifest, one.profile, "measure this bundle on that device"
    if (profile.model_id, profile.precision) != (manifest.model_id, manifest.precision):
        raise DataError(
            f"{one.path} is of model {short_id(profile.model_id)} ({profile.model}, {profile.precision}), --bundle is "
            f"{short_id(manifest.model_id)} ({manifest.model}, {manifest.precision}); {again}"
        )
    if len(profile.one_at_a_time.blocks_ms) != bundle.num_blocks:
        blocks = counted(len(profile.one_at_a_time.blocks_ms), "block")
        raise DataError(f"{one.path} has {blocks}, --bundle has {bundle.num_blocks}; {again}")


def _source(bundle: Bundle, inputs: PlanningInputs, assumed: list[str]) -> tuple[NamedProfile, PlannedDevice]:
    """Return the profile with the fastest stem and head, and the source as a device without room for blocks."""
    profiles = inputs.profiles if inputs.source is None else (inputs.source,)
    known = [(sum(ends), number, ends) for number, one in enumerate(profiles) if (ends := _ends_ms(one.profile))]
    if not known:
        assumed.append(
            f"stem and head take as long as a block each: not measured on {', '.join(one.name for one in profiles)}"
        )
        known = [(one.profile.block_ms, number, (one.profile.block_ms,) * 2) for number, one in enumerate(profiles)]
    _, number, (stem_ms, head_ms) = min(known)
    one = profiles[number]
    if inputs.source is None:
        assumed.append(f"stem and head run where the images are, as fast as on {one.name} (--source FILE)")
    visit_ms, wire_ms = inputs.link(bundle, SOURCE)
    return one, PlannedDevice(
        SOURCE,
        max(one.profile.block_ms, 1e-9),  # the times of stem and head are divided by it
        0,
        stem_ms=stem_ms,
        head_ms=head_ms,
        visit_ms=visit_ms,
        wire_ms=wire_ms,
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
    bundle: Bundle, one: NamedProfile, inputs: PlanningInputs, fastest: NamedProfile, assumed: list[str]
) -> PlannedDevice:
    profile = one.profile
    calls = {int(size): timed.block_ms for size, timed in profile.batch.items()}
    if (least := min(calls)) > 1:
        assumed.append(f"{one.name} takes 1/{least} of the time of {least} images for one: measure it with --batch 1")
    max_batch = _max_batch(one, inputs, calls)
    full = profile.batch[str(min(calls, key=lambda size: (abs(size - max_batch), size)))]
    ends = _ends_ms(profile)
    if ends is None:
        slower = profile.block_ms / max(fastest.profile.block_ms, 1e-9)
        stem, head = _ends_ms(fastest.profile) or (fastest.profile.block_ms,) * 2
        ends = stem * slower, head * slower
        if _ends_ms(fastest.profile) is not None:
            assumed.append(
                f"stem and head are slower on {one.name} than on {fastest.name} by the same factor as a block"
            )
    free = profile.device.available_bytes
    if free is None:
        assumed.append(f"{one.name} has memory for every block: its profile does not say how much")
    block_bytes, parts = max(1, profile.block_memory_bytes), {part.part for part in profile.parts}
    files = sum(part.file_bytes > 0 for part in profile.parts if part.part not in ENDS.values())
    missing = {*ENDS.values()} - parts  # a peer may have neither stem nor head
    known = {part.part: part.taken_bytes for part in fastest.profile.parts}
    taken = profile.memory_bytes + sum(known.get(part, bundle.part(part).bytes) for part in missing)
    room: float = block_bytes * bundle.num_blocks + taken
    if free is not None:  # a block that is being loaded takes its size twice
        room = max(0.0, min(memory_for_engines(free, profile.device.l4t), free - block_bytes))
    link_ms, wire_ms = inputs.link(bundle, one.name)
    copies_ms = profile.one_at_a_time.visit_ms
    around_ms = 0.0 if inputs.measured_ms(one.name) is not None else CALL_MS  # hops of a run include it
    return PlannedDevice(
        name=one.name,
        block_ms=profile.block_ms,
        capacity=room / block_bytes,
        ends_size=max(0.0, taken / block_bytes - files),
        stem_ms=ends[0],
        head_ms=ends[1],
        visit_ms=link_ms + around_ms + copies_ms,
        wire_ms=wire_ms,
        watts=profile.power_watts if full.power_watts is None else full.power_watts,
        runtime_ms=CALL_MS + copies_ms,
        max_batch=max_batch,
        block_bytes=block_bytes,
        files=len(set(bundle.owners)),
        calls_ms=tuple(sorted(calls.items())),
    )


def _max_batch(one: NamedProfile, inputs: PlanningInputs, calls: Mapping[int, float]) -> int:
    """Return the size in ``peers.yaml``, else the best measured size for the objective.

    Only throughput and energy benefit from several images per call.
    """
    if one.name in inputs.batches:
        return inputs.batches[one.name]
    if inputs.objective == "throughput":
        return min(calls, key=lambda size: (round(calls[size] / size, 6), size))
    if inputs.objective == "energy":
        energy = {size: one.profile.batch[str(size)].energy_mj_per_image for size in calls}
        known = {size: mj for size, mj in energy.items() if mj is not None}
        if known:
            return min(known, key=lambda size: (known[size], size))
    return min(calls)
