"""The planning problem: measured devices and links, blocks in bands, and the number of replicas.

The source is one more device, which sends images and receives logits. It has no room for blocks, and holds stem and
head unless other devices do (:func:`with_ends`).

Blocks of a vision transformer are alike: on a device, each takes the same time and memory (the mean of its profile). A
device costs the same to reach from everywhere (:func:`visit_times`), as at a switch or an access point. So the value of
a placement depends on how many blocks each device holds, not on which. The functions at the end turn these numbers into
a placement: they assign blocks in the order of the bands, so each device gets consecutive blocks and a request visits
it once.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import ENDS, HEAD, STEM
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE

Objective = Literal["latency", "throughput", "energy", "survival"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "energy", "survival")
Placement = Mapping[str, tuple[int, ...]]
"""Parts by device, including devices without any."""
Count = tuple[int, ...]
"""Number of blocks of each device, in the order of the problem's devices."""


_ROUNDS = 20
"""Rounds of medians, each over all processes."""
MOST_BLOCKS = 10_000
"""Upper limit for the blocks of a model."""


@dataclass(frozen=True)
class PlannedDevice:
    """A device that can hold parts of the model; times in milliseconds."""

    name: str
    block_ms: float
    """Time of a block for a single image."""
    capacity: float
    """Memory for parts, in blocks."""
    ends_size: float = math.inf
    """Memory of stem and head, in blocks; infinite if the device cannot hold them."""
    stem_ms: float = 0.0
    head_ms: float = 0.0
    visit_ms: float = 0.0
    """Cost of a visit of a request: the device's share of the transfers in and out, and :attr:`runtime_ms`."""
    wire_ms: float = 0.0
    """Time for which tokens occupy its link, one way."""
    watts: float | None = None
    """Power while it computes, including idle power."""
    idle_watts: float | None = None
    battery_wh: float | None = None
    loss: float = 0.0
    """Probability that it is lost."""
    zone: str | None = None
    """Failure domain: rack, power supply, access point."""
    runtime_ms: float = 0.0
    """Median overhead of an engine call, which delays a single request."""
    runtime_mean_ms: float = 0.0
    """Mean overhead of an engine call, for which the engine waits between calls."""
    max_batch: int = 1
    """Maximum number of images per engine call."""
    calls_ms: tuple[tuple[int, float], ...] = ()
    """Time of a call for one block by number of images, ascending; empty if each image takes ``block_ms``."""

    def part_ms(self, part: int) -> float:
        """Return the time of a part for a single image."""
        return {STEM: self.stem_ms, HEAD: self.head_ms}.get(part, self.block_ms)

    def weight(self, parts: Iterable[int]) -> float:
        """Return the time of parts relative to a block; batches speed up stem and head as much as a block."""
        return sum(self.part_ms(part) / self.block_ms if part in ENDS and self.block_ms else 1.0 for part in parts)

    def call_ms(self, images: int) -> float:
        """Return the time of an engine call for one block, interpolated between the measured sizes."""
        sizes = self.calls_ms
        if not sizes:
            return self.block_ms * images
        if images >= sizes[-1][0]:
            return sizes[-1][1] * images / sizes[-1][0]
        for (low, low_ms), (high, high_ms) in itertools.pairwise(sizes):
            if low <= images < high:
                return low_ms + (high_ms - low_ms) * (images - low) / (high - low)
        return sizes[0][1] * images / sizes[0][0]

    @property
    def busy_ms(self) -> float:
        """Time of a block for an image in a full batch."""
        return self.call_ms(self.max_batch) / self.max_batch

    @property
    def beyond_ms(self) -> float:
        """Overhead of an engine call per image of a full batch."""
        return self.runtime_mean_ms / self.max_batch

    @property
    def blocks_a_call(self) -> int:
        """Maximum number of blocks in an engine call for a full batch (:attr:`Limits.chain`)."""
        call_ms = self.call_ms(self.max_batch)
        return max(1, int(Limits().chain * 1e3 / call_ms)) if call_ms > 0 else MOST_BLOCKS

    def taken_ms(self, blocks: float) -> float:
        """Return how long a visit that runs ``blocks`` occupies the device, per image of a full batch.

        The engine has ``Limits.engine_calls`` calls at the same time, so the overhead of a call counts only if it takes
        longer than the other calls.
        """
        engine = blocks * self.busy_ms
        calls = math.ceil(blocks / self.blocks_a_call - 1e-9)
        return max(engine, (engine + calls * self.beyond_ms) / Limits.engine_calls)

    @property
    def block_mj(self) -> float | None:
        """Energy of a block in millijoules."""
        return None if self.watts is None else self.watts * self.busy_ms


@dataclass(frozen=True)
class PlanningProblem:
    """Devices, and a model of ``num_blocks`` blocks, each of which needs at least ``replicas`` holders."""

    devices: tuple[PlannedDevice, ...]
    num_blocks: int
    replicas: int = 1
    max_replicas: int | None = None
    """Maximum number of holders of a block; None for as many as memory allows."""
    bands: tuple[tuple[int, ...], ...] = ()
    """Bands of the model; empty for one band of all blocks."""
    source: PlannedDevice = PlannedDevice(SOURCE, 1.0, 0, watts=0.0)
    """Process that has the images; its visit is its share of the transfers out and back in."""
    image_share: float = 0.0
    """Size of an image as JPEG, relative to its tokens."""
    logits_share: float = 0.0
    """Size of logits, relative to tokens."""
    token_bytes: int = 0
    """Size of tokens on a link."""
    zone_losses: Mapping[str, float] = field(default_factory=dict)
    """Probability that a whole zone is lost."""
    links_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured transfers by sender and receiver (``source`` for the source); empty if none was measured."""

    @property
    def processes(self) -> dict[str, PlannedDevice]:
        """Devices and source by name."""
        return {process.name: process for process in (*self.devices, self.source)}

    def held(self, placement: Placement) -> Placement:
        """Return the parts of all processes; the source holds the stem or head that no device holds."""
        given = set(itertools.chain.from_iterable(placement.values()))
        return {**placement, SOURCE: tuple(end for end in ENDS if end not in given)}

    def source_ms(self, placement: Placement) -> float:
        """Return the time of the parts that the source holds."""
        return sum(self.source.part_ms(part) for part in self.held(placement)[SOURCE])

    def sizes(self, placement: Placement) -> tuple[float, float]:
        """Return the sizes of the payloads that leave the source and return to it, relative to tokens."""
        parts = self.held(placement)[SOURCE]
        return 1.0 if STEM in parts else self.image_share, 1.0 if HEAD in parts else self.logits_share

    @property
    def part_bands(self) -> tuple[tuple[int, ...], ...]:
        """Bands of all parts, with the stem in the first and the head in the last."""
        bands = list(self.bands or (tuple(range(self.num_blocks)),))
        bands[0] = (STEM, *bands[0])
        bands[-1] = (*bands[-1], HEAD)
        return tuple(bands)

    @property
    def band_order(self) -> tuple[int, ...]:
        """All blocks in the order of the bands."""
        return tuple(block for band in self.bands for block in band) or tuple(range(self.num_blocks))

    @property
    def may_reorder(self) -> bool:
        """Whether a band leaves a choice of order."""
        return not self.bands or any(len(band) > 1 for band in self.bands)

    @property
    def most_replicas(self) -> int:
        """Largest number of holders that every block can have; 0 if the model does not fit."""
        bound = len(zones_of(self.devices)) if self.max_replicas is None else self.max_replicas
        return next((r for r in range(bound, 0, -1) if self.fits(r)), 0)

    def fits(self, replicas: int) -> bool:
        """Return whether each block can have ``replicas`` holders, all in different zones.

        No zone holds a block twice, so the zones need room for all copies: ``sum(min(B, room of the zone)) >= R B``.
        This is sufficient, since a circle of blocks gives each zone different ones.
        """
        return sum(self.zone_rooms().values()) >= replicas * self.num_blocks

    def allows(self, placement: Placement) -> bool:
        """Return whether each part has an allowed number of holders, all in different zones."""
        zone_of = {self.devices[i].name: zone for zone, members in zones_of(self.devices).items() for i in members}
        holders = holders_of(self, placement).values()
        most = len(self.devices) if self.max_replicas is None else self.max_replicas
        return all(self.replicas <= len({zone_of[name] for name in held}) == len(held) <= most for held in holders)

    def zone_rooms(self) -> dict[str, int]:
        """Return the number of different blocks that each zone has room for."""
        rooms: dict[str, int] = {}
        for zone, devices in zones_of(self.devices).items():
            rooms[zone] = min(self.num_blocks, sum(self.room(self.devices[index]) for index in devices))
        return rooms

    def room(self, device: PlannedDevice) -> int:
        """Return the number of different blocks that a device has room for."""
        return int(min(self.num_blocks, device.capacity))

    def check(self, objective: Objective) -> None:
        """Raise :class:`UsageError` if no placement exists or the profiles lack what the objective needs."""
        if not self.fits(self.replicas):
            room = sum(self.zone_rooms().values())
            zones = "" if all(device.zone is None for device in self.devices) else ", no zone a block twice"
            raise UsageError(
                f"{self.num_blocks} blocks with {self.replicas} holders each are {self.num_blocks * self.replicas} "
                f"copies; the memory of the devices has room for {room}{zones}; add devices, or lower --replicas"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(f"--max-replicas {self.max_replicas} is below --replicas {self.replicas}; raise it")
        if objective == "energy":
            missing = [device.name for device in self.devices if device.watts is None]
            if missing:
                raise UsageError(
                    f"the objective energy needs the power of every device, which {', '.join(missing)} did not report; "
                    "leave those profiles out, or plan for another objective"
                )


def zones_of(devices: Sequence[PlannedDevice]) -> dict[str, list[int]]:
    """Return the indices of the devices by zone; a device without a zone is its own zone."""
    found: dict[str, list[int]] = {}
    for index, device in enumerate(devices):
        found.setdefault(f"device {device.name}" if device.zone is None else f"zone {device.zone}", []).append(index)
    return found


def holders_of(problem: PlanningProblem, placement: Placement) -> dict[int, list[str]]:
    """Return the processes that hold each block, and each of stem and head that is in the placement."""
    holders: dict[int, list[str]] = {block: [] for block in range(problem.num_blocks)}
    for name, parts in placement.items():
        for part in parts:
            holders.setdefault(part, []).append(name)
    return holders


def with_ends(problem: PlanningProblem, placement: Placement) -> Placement | None:
    """Add the stem to holders of the first band, and the head to holders of the last; None if memory is short.

    No request then visits a device for the stem or the head alone.
    """
    ends = ((STEM, set(problem.part_bands[0])), (HEAD, set(problem.part_bands[-1])))
    found = dict(placement)
    for device in problem.devices:
        held = placement.get(device.name)
        if held and len(held) + device.ends_size <= device.capacity:
            found[device.name] = (*held, *(end for end, band in ends if not band.isdisjoint(held)))
    return None if problem.held(found)[SOURCE] else found


def visit_times(names: Sequence[str], links_ms: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return the cost of a visit of each process: ``2 h`` if transfers take ``l(a, b) = h(a) + h(b)``.

    ``h`` is fitted to all measured transfers. With ``m(a)`` the mean of the transfers from and to ``a`` and ``n``
    processes, ``sum(h) = sum(m) / 2`` and ``h(a) = ((n - 1) m(a) - sum(h)) / (n - 2)``, at least 0. Starting there,
    each ``h(a)`` moves to the median of ``l(a, b) - h(b)``, which a few noisy links do not affect.
    """
    means: dict[str, float] = {}
    for name in names:
        taken = [ms for (origin, to), ms in links_ms.items() if name in (origin, to) and {origin, to} <= set(names)]
        means[name] = sum(taken) / len(taken) if taken else math.nan
    known = [mean for mean in means.values() if not math.isnan(mean)]
    usual = sum(known) / len(known) if known else 0.0
    means = {name: usual if math.isnan(mean) else mean for name, mean in means.items()}
    count = len(names)
    if count <= 2:
        return means  # two processes, each with half of the round trip
    total = sum(means.values()) / 2
    half = {name: max(0.0, ((count - 1) * mean - total) / (count - 2)) for name, mean in means.items()}
    others: dict[str, list[tuple[str, float]]] = {name: [] for name in names}
    for (origin, to), ms in links_ms.items():
        if origin in half and to in half:
            others[origin].append((to, ms))
            others[to].append((origin, ms))
    for _ in range(_ROUNDS):
        for name, ways in others.items():
            if ways:
                half[name] = max(0.0, statistics.median(ms - half[other] for other, ms in ways))
    return {name: 2 * ms for name, ms in half.items()}


def assign_in_circle(problem: PlanningProblem, counts: Count, devices: Sequence[int] | None = None) -> Placement:
    """Give each device consecutive blocks, going around the circle of all blocks.

    With ``sum(counts) = R B``, each block gets ``R`` holders. The devices of a zone are consecutive and hold at most
    ``B`` blocks together, so a zone holds no block twice. ``devices`` is another order of the devices.
    """
    order = problem.band_order
    placement: dict[str, tuple[int, ...]] = {device.name: () for device in problem.devices}
    place = 0
    place_of = {index: number for number, index in enumerate(devices or ())}
    for members in sorted(zones_of(problem.devices).values(), key=lambda members: place_of.get(members[0], 0)):
        for index in members:
            stretch = [order[(place + step) % len(order)] for step in range(counts[index])]
            placement[problem.devices[index].name] = tuple(sorted(stretch))
            place += counts[index]
    return placement


def assign_route(problem: PlanningProblem, counts: Count, replicas: int) -> Placement | None:
    """Give the devices of a route consecutive blocks, and find ``replicas - 1`` further holders for each block.

    ``counts`` add up to the number of blocks. Return None if there is no memory for the further holders.
    """
    first = assign_in_circle(problem, counts)
    if replicas == 1:
        return first
    held = [set(first[device.name]) for device in problem.devices]
    zone_of = {index: zone for zone, devices in enumerate(zones_of(problem.devices).values()) for index in devices}
    if not _add_holders(problem, held, zone_of, replicas):
        return None
    return {device.name: tuple(sorted(blocks)) for device, blocks in zip(problem.devices, held, strict=True)}


def assign_sets(problem: PlanningProblem, sets: Sequence[tuple[frozenset[int], int]]) -> Placement:
    """Give each set of devices its number of consecutive blocks; the numbers add up to all blocks."""
    held: list[list[int]] = [[] for _ in problem.devices]
    blocks = iter(problem.band_order)
    for devices, count in sets:
        for _ in range(count):
            block = next(blocks)
            for index in devices:
                held[index].append(block)
    return {device.name: tuple(sorted(given)) for device, given in zip(problem.devices, held, strict=True)}


def _add_holders(problem: PlanningProblem, held: list[set[int]], zone_of: dict[int, int], replicas: int) -> bool:
    """Add holders until each block has ``replicas``, by augmenting paths: a full device hands a block on."""
    devices = problem.devices
    fixed = [set(blocks) for blocks in held]

    def zones(block: int) -> set[int]:
        return {zone_of[index] for index, blocks in enumerate(held) if block in blocks}

    def give(block: int, tried: set[int]) -> bool:
        taken = zones(block)
        free = [index for index in range(len(devices)) if zone_of[index] not in taken and index not in tried]
        for index in sorted(free, key=lambda index: len(held[index]) / max(1, problem.room(devices[index]))):
            tried.add(index)
            if len(held[index]) < problem.room(devices[index]):
                held[index].add(block)
                return True
            for other in sorted(held[index] - fixed[index] - {block}):
                held[index].discard(other)
                held[index].add(block)
                if give(other, tried):
                    return True
                held[index].discard(block)
                held[index].add(other)
        return False

    for _ in range(replicas - 1):
        for block in problem.band_order:
            if not give(block, set()):
                return False
    return True
