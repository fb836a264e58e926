"""What a placement is planned for: devices with their figures, links, blocks in bands, and how many replicas.

Blocks of a vision transformer are alike: one takes a device what any other does (the mean of its profile), in time and
in memory. A device is reached at the same price from everywhere (:func:`visit_times`), as at a switch or an access
point. With both, what a placement is worth depends on how many blocks each kind of device holds, not on which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ls_edge.core.errors import UsageError
from ls_edge.runtime.routing.engine_queue import MOST_CALLS
from ls_edge.runtime.routing.neighbours import Limits

Objective = Literal["latency", "throughput", "energy", "survival"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput", "energy", "survival")
Placement = Mapping[str, tuple[int, ...]]
"""Blocks by device, devices without blocks included."""
Count = tuple[int, ...]
"""How many blocks each device holds, in the order of the problem's devices."""


MOST_BLOCKS = 10_000
"""More than a model has."""


@dataclass(frozen=True)
class PlannedDevice:
    """A device that may be given blocks; times in milliseconds."""

    name: str
    block_ms: float
    """Of one image, as one that is alone has it."""
    capacity: int
    """Most blocks that fit into its memory."""
    stem_ms: float = 0.0
    head_ms: float = 0.0
    visit_ms: float = 0.0
    """What it costs a request to visit it: its part of the way in and of the way out, and :attr:`runtime_ms`."""
    wire_ms: float = 0.0
    """For how long tokens occupy its link, one way."""
    watts: float | None = None
    """While it computes; what it draws while idle is in it."""
    idle_watts: float | None = None
    battery_wh: float | None = None
    loss: float = 0.0
    """Probability that it is not there."""
    zone: str | None = None
    """What it shares its fate with: a rack, a power supply, an access point."""
    whole: bool = True
    """Whether stem, head and all blocks fit into its memory together."""
    runtime_ms: float = 0.0
    """What an engine call takes beyond the engine, usually: by this much a request alone waits longer."""
    runtime_mean_ms: float = 0.0
    """The same on average: by this much the engine waits between two calls."""
    max_batch: int = 1
    """Most images of an engine call."""
    calls_ms: tuple[tuple[int, float], ...] = ()
    """What a call for one block takes by images, in ascending order; empty where each takes ``block_ms``."""
    ends_ms: float | None = None
    """Stem and head of an image in a full batch; None where that is as for an image alone."""

    def call_ms(self, images: int) -> float:
        """What an engine call for one block takes: on a line between two measured sizes, else in proportion."""
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
        """What a block takes for an image where there is always work: in a full batch."""
        return self.call_ms(self.max_batch) / self.max_batch

    @property
    def beyond_ms(self) -> float:
        """What an engine call takes beyond the engine, for each image of a full batch."""
        return self.runtime_mean_ms / self.max_batch

    @property
    def blocks_a_call(self) -> int:
        """Most blocks that an engine call for a full batch runs in a row (:attr:`Limits.chain`)."""
        call_ms = self.call_ms(self.max_batch)
        return max(1, int(Limits().chain * 1e3 / call_ms)) if call_ms > 0 else MOST_BLOCKS

    def taken_ms(self, blocks: float) -> float:
        """For how long an image in a full batch takes the device when it comes by for so many blocks.

        The engine has :data:`MOST_CALLS` calls at once and goes on from one to the next, so what a call takes beyond
        the engine counts only where it is longer than the others take.
        """
        engine = blocks * self.busy_ms
        calls = math.ceil(blocks / self.blocks_a_call - 1e-9)
        return max(engine, (engine + calls * self.beyond_ms) / MOST_CALLS)

    @property
    def block_mj(self) -> float | None:
        """Energy of a block in millijoules."""
        return None if self.watts is None else self.watts * self.busy_ms

    @property
    def kind(self) -> tuple[float | int | str | bool | None, ...]:
        """Equal for devices that may be exchanged for one another."""
        return (
            self.block_ms, self.busy_ms, self.capacity, self.visit_ms, self.wire_ms, self.watts, self.loss, self.zone,
            self.beyond_ms, self.blocks_a_call,
        )  # fmt: skip


@dataclass(frozen=True)
class PlanningProblem:
    """Devices, and a model of ``num_blocks`` blocks of which each is to be held by at least ``replicas`` of them."""

    devices: tuple[PlannedDevice, ...]
    num_blocks: int
    replicas: int = 1
    max_replicas: int | None = None
    """Most holders of a block; None for as many as memory allows."""
    bands: tuple[tuple[int, ...], ...] = ()
    """Blocks that may be reordered among themselves, band after band; empty for one band of all."""
    source_ms: float = 0.0
    """Stem and head, where the images are."""
    source_visit_ms: float = 0.0
    """The source's part of the way of tokens out and back in."""
    source_wire_ms: float = 0.0
    source_mj: float | None = 0.0
    """Energy of stem and head there; None where it is not known."""
    zone_losses: Mapping[str, float] = field(default_factory=dict)
    """Probability that all of a zone is not there."""
    links_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured transfers by sender and receiver, the source being ``source``; empty where none was measured."""

    @property
    def band_order(self) -> tuple[int, ...]:
        """All blocks, band after band."""
        return tuple(block for band in self.bands for block in band) or tuple(range(self.num_blocks))

    @property
    def may_reorder(self) -> bool:
        """Whether some band leaves a choice of order."""
        return not self.bands or any(len(band) > 1 for band in self.bands)

    @property
    def most_replicas(self) -> int:
        """The most holders that every block can have at once; 0 where the model does not fit at all."""
        bound = len(zones_of(self.devices)) if self.max_replicas is None else self.max_replicas
        return next((r for r in range(bound, 0, -1) if self.fits(r)), 0)

    def fits(self, replicas: int) -> bool:
        """Whether each block can be held by so many devices, all in different zones.

        That is so if the zones, none of which holds a block twice, have room for all copies:
        ``sum(min(B, room of the zone)) >= R B`` (blocks given out in a circle then give each zone different ones).
        """
        return sum(self.zone_rooms().values()) >= replicas * self.num_blocks

    def zone_rooms(self) -> dict[str, int]:
        """How many different blocks each zone has room for."""
        rooms: dict[str, int] = {}
        for zone, devices in zones_of(self.devices).items():
            rooms[zone] = min(self.num_blocks, sum(self.room(self.devices[index]) for index in devices))
        return rooms

    def room(self, device: PlannedDevice) -> int:
        """How many different blocks a device has room for."""
        return min(self.num_blocks, device.capacity)

    def check(self, objective: Objective) -> None:
        """Raise :class:`UsageError` where no placement exists, or the objective needs figures that are missing."""
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
                    f"the objective energy needs the power of every device, and {', '.join(missing)} did not tell any; "
                    "leave those profiles out, or plan for another objective"
                )


def zones_of(devices: Sequence[PlannedDevice]) -> dict[str, list[int]]:
    """Indices of the devices by zone; a device without one is a zone of its own."""
    found: dict[str, list[int]] = {}
    for index, device in enumerate(devices):
        found.setdefault(f"device {device.name}" if device.zone is None else f"zone {device.zone}", []).append(index)
    return found


def kinds_of(devices: Sequence[PlannedDevice]) -> list[list[int]]:
    """Indices of the devices that may be exchanged for one another, kind by kind."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, device in enumerate(devices):
        found.setdefault(device.kind, []).append(index)
    return list(found.values())


def visit_times(names: Sequence[str], links_ms: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """What it costs to visit each process: ``2 h`` where transfers take ``l(a, b) = h(a) + h(b)``.

    ``h`` is what fits all transfers that were measured: the mean of those from and to ``a`` is ``m(a)``; with ``n``
    processes ``sum(h) = sum(m) / 2`` and ``h(a) = ((n - 1) m(a) - sum(h)) / (n - 2)``, at least 0.
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
        return means  # of two processes, half each, there and back
    total = sum(means.values()) / 2
    return {name: max(0.0, 2 * ((count - 1) * mean - total) / (count - 2)) for name, mean in means.items()}
