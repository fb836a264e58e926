"""The planning problem: measured devices and links, blocks in bands, and the number of replicas.

The source is one more device, which sends images and receives logits. It has no room for blocks, and holds stem and
head unless other devices do (:func:`with_ends`).

Blocks of a vision transformer are alike: on a device, each takes the same time and memory (the mean of its profile). A
device costs the same to reach from everywhere, as at a switch or an access point. So the value of a placement depends
on how many blocks each device holds, not on which. :func:`assign_in_circle` turns these numbers into a placement: it
assigns blocks in the order of the bands, so each device gets consecutive blocks and a request visits it once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import ENDS, HEAD, STEM
from ls_edge.core.text import counted
from ls_edge.runtime.routing.peer.engine_queue import ENGINE_CALLS
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE

Objective = Literal["latency", "throughput", "energy"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "energy")
Placement = Mapping[str, tuple[int, ...]]
"""Parts by device, including devices without any."""
Count = tuple[int, ...]
"""Number of blocks of each device, in the order of the problem's devices."""


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
    runtime_ms: float = 0.0
    """Overhead of an engine call."""
    max_batch: int = 1
    """Maximum number of images per engine call."""
    block_bytes: int = 0
    """Memory of a block with a file of its own."""
    files: float = math.inf
    """Number of the blocks' files, which blocks may share."""
    calls_ms: tuple[tuple[int, float], ...] = ()
    """Time of a call for one block by number of images, ascending; empty if each image takes ``block_ms``."""

    def memory_of(self, parts: Sequence[int]) -> str:
        """Return the memory that parts take, and the memory that there is."""
        taken = self.taken(len(set(parts) - ENDS.keys())) + (self.ends_size if ENDS.keys() & set(parts) else 0.0)
        return f"{taken * self.block_bytes / 2**20:,.0f} of {self.capacity * self.block_bytes / 2**20:,.0f} MiB"

    def taken(self, blocks: int) -> float:
        """Return the memory that this number of blocks takes at most, in blocks with a file of their own."""
        return min(blocks, self.files)

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

    def taken_ms(self, blocks: float) -> float:
        """Return how long a visit that runs ``blocks`` occupies the device, per image of a full batch.

        An engine call runs blocks for at most :attr:`Limits.chain`. The engine has ``ENGINE_CALLS`` calls at the
        same time, so the overhead of a call counts only if it takes longer than the other calls.
        """
        engine, call_ms = blocks * self.busy_ms, self.call_ms(self.max_batch)
        blocks_a_call = max(1, int(Limits().chain * 1e3 / call_ms)) if call_ms > 0 else math.inf
        calls = math.ceil(blocks / blocks_a_call - 1e-9)
        return max(engine, (engine + calls * self.runtime_ms / self.max_batch) / ENGINE_CALLS)

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
    bands: tuple[tuple[int, ...], ...] = ()
    """Bands of the model; empty for one band of all blocks."""
    source: PlannedDevice = PlannedDevice(SOURCE, 1.0, 0, watts=0.0)
    """Process that has the images; its visit is its share of the transfers out and back in."""
    image_share: float = 0.0
    """Size of an image as JPEG, relative to its tokens."""
    logits_share: float = 0.0
    """Size of logits, relative to tokens."""

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
        return sum(map(self.room, self.devices)) // self.num_blocks

    def room(self, device: PlannedDevice) -> int:
        """Return the number of different blocks that a device has room for."""
        most = self.num_blocks
        return most if device.taken(most) <= device.capacity else int(device.capacity)

    def check(self, objective: Objective) -> None:
        """Raise :class:`UsageError` if no placement exists or the profiles lack what the objective needs."""
        if len(self.devices) < self.replicas:
            raise UsageError(
                f"{self.replicas} holders of each block need as many devices, there "
                f"{'is' if len(self.devices) == 1 else 'are'} {counted(len(self.devices), 'device')}; add devices, or "
                "lower --replicas"
            )
        if self.most_replicas < self.replicas:
            room, copies = sum(map(self.room, self.devices)), self.num_blocks * self.replicas
            lacking = max((one.taken(copies - room) * one.block_bytes for one in self.devices), default=0) / 2**20
            raise UsageError(
                f"{self.num_blocks} blocks with {counted(self.replicas, 'holder')} each are {copies} copies; the "
                f"memory of the devices has room for {room}, and {lacking:,.0f} MiB are missing; "
                f"{'add devices' if room else 'use devices with more memory'}, "
                f"{'lower --replicas, ' if self.replicas > 1 else ''}or export a smaller model or precision"
            )
        missing = [device.name for device in self.devices if device.watts is None]
        if objective == "energy" and missing:
            raise UsageError(
                f"the objective energy needs the power of every device, which {', '.join(missing)} did not report; "
                "leave those profiles out, or plan for another objective"
            )


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
        if held and device.taken(len(held)) + device.ends_size <= device.capacity:
            found[device.name] = (*held, *(end for end, band in ends if not band.isdisjoint(held)))
    return None if problem.held(found)[SOURCE] else found


def assign_in_circle(problem: PlanningProblem, counts: Count) -> Placement:
    """Give each device consecutive blocks, going around the circle of all blocks.

    With ``sum(counts) = R B``, each block gets ``R`` holders, since no device has more than ``B`` blocks.
    """
    order = itertools.cycle(problem.band_order)
    return {
        device.name: tuple(sorted(itertools.islice(order, count)))
        for device, count in zip(problem.devices, counts, strict=True)
    }


def assign_route(problem: PlanningProblem, counts: Count, replicas: int) -> Placement | None:
    """Give the devices of a route consecutive blocks, and find ``replicas - 1`` further holders for each block.

    ``counts`` add up to the number of blocks. Return None if no memory is found for the further holders.
    """
    held = {name: set(blocks) for name, blocks in assign_in_circle(problem, counts).items()}
    for block in problem.band_order * (replicas - 1):
        left = {one.name: problem.room(one) - len(held[one.name]) for one in problem.devices}
        free = [name for name, room in left.items() if room > 0 and block not in held[name]]
        if not free:
            return None
        held[max(free, key=left.__getitem__)].add(block)
    return {name: tuple(sorted(blocks)) for name, blocks in held.items()}
