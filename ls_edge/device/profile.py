"""``profile.json``: times and memory of a bundle on one device, from ``ls-edge bench --out`` for ``ls-edge plan``.

Times are milliseconds, sizes bytes. Values that could not be measured are null.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ls_edge.core.errors import DataError
from ls_edge.core.validation import InvalidDocument, read_json
from ls_edge.device.sensors import DeviceState

SCHEMA = 1

Duration = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[int, Meta(ge=0, le=2**60, description="a whole number from 0 to 2^60")]
BatchSize = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}\Z")]


class Times(msgspec.Struct, frozen=True):
    """Milliseconds of repeated runs."""

    p50: Duration
    p95: Duration
    min: Duration

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """Summarize the times of one or more runs."""
        ms = np.asarray(seconds) * 1e3
        return cls(*(round(float(value), 4) for value in (np.median(ms), np.percentile(ms, 95), ms.min())))


class DeviceFacts(msgspec.Struct, frozen=True):
    """Description of a device."""

    name: str
    """Name in plans and ``peers.yaml``, by default the host name."""
    board: str | None
    cpu: str
    cores: int
    cpu_quota: float | None
    gpus: list[str]
    memory_bytes: Bytes | None
    available_bytes: Bytes | None
    l4t: str | None
    power_mode: str | None
    """Name of the requested power mode; :attr:`DeviceState.limits_mhz` has the effective limits."""
    versions: dict[str, str]
    multiprocessors: int | None = None
    """Active streaming multiprocessors of the GPU; a power mode may switch some off."""


class PartLoad(msgspec.Struct, frozen=True):
    """Cost of loading a part."""

    part: str
    load_ms: float
    built: bool
    file_bytes: Bytes
    resident_bytes: Bytes | None
    """Memory of the process that the part takes, excluding the memory of a graphics card."""

    @property
    def taken_bytes(self) -> int:
        """Memory of the part."""
        return max(self.file_bytes, self.resident_bytes or 0)


class BatchTimes(msgspec.Struct, frozen=True):
    """Times of the parts at one batch size."""

    stem_ms: Times | None
    """Null for a peer, which has only blocks; so are :attr:`head_ms` and :attr:`chain_ms`."""
    head_ms: Times | None
    blocks_ms: Annotated[list[Times], Meta(min_length=1, description="a list of the times of at least one block")]
    """Times of all blocks; blocks that a peer does not hold have the medians of the blocks that it holds."""
    chain_ms: Times | None
    """Times of stem, all blocks, and head one after the other."""
    repeats: int
    slowdown: float
    """Median of the last third of the runs divided by that of the first; above 1, the device became slower."""
    power_watts: float | None
    energy_mj_per_image: float | None
    visits_ms: Annotated[
        dict[BatchSize, Times], Meta(description="a group of numbers of blocks, which are whole numbers above 0")
    ] = {}
    """Times of 1, 2, and all blocks in sequence as a peer runs them, with one copy of the tokens in and one out."""

    @property
    def block_ms(self) -> float:
        """Typical time of an additional block in a visit; without timed visits, the mean of the blocks' medians."""
        counts = sorted(map(int, self.visits_ms))
        if len(counts) > 1:
            least, most = (self.visits_ms[str(count)].p50 for count in (counts[0], counts[-1]))
            return max(0.0, most - least) / (counts[-1] - counts[0])
        return sum(block.p50 for block in self.blocks_ms) / len(self.blocks_ms)

    @property
    def visit_ms(self) -> float:
        """Overhead of a visit in addition to its blocks: copies and the call."""
        return max(0.0, self.visits_ms["1"].p50 - self.block_ms) if "1" in self.visits_ms else 0.0


class DeviceProfile(msgspec.Struct, frozen=True):
    """The document of ``ls-edge bench --out``."""

    schema: int
    bundle_id: str
    model_id: str
    model: str
    device: DeviceFacts
    engine: str
    provider: str
    precision: str
    threads: int
    batch: Annotated[
        dict[BatchSize, BatchTimes],
        Meta(min_length=1, description="a group of batch sizes, which are whole numbers above 0"),
    ]
    parts: list[PartLoad]
    memory_bytes: Bytes
    """Size of the part files, or growth of process and GPU memory, whichever is larger."""
    power_watts: float | None
    """Power while the chain runs single images."""
    power_scope: str | None
    """Measured consumer: ``module``, ``board``, ``platform``, ``processor``, ``gpu``, or ``processor and gpu``."""
    power_channels: dict[str, float]
    energy_mj_per_image: float | None
    """Power, including idle power, times the time of a single image."""
    throttled: bool
    throttled_by: list[str]
    before: DeviceState
    after: DeviceState

    @property
    def one_at_a_time(self) -> BatchTimes:
        """Times of the smallest batch."""
        return self.batch[min(self.batch, key=int)]

    @property
    def block_ms(self) -> float:
        """Typical time of one block, one image at a time."""
        return self.one_at_a_time.block_ms / min(map(int, self.batch))

    @property
    def block_memory_bytes(self) -> int:
        """Mean memory of one block, without those that share the file of another."""
        blocks = [part.taken_bytes for part in self.parts if part.part.startswith("block ") and part.file_bytes]
        return round(sum(blocks) / len(blocks))


def load_profile(path: str | Path) -> DeviceProfile:
    """Read a ``profile.json``; raise :class:`DataError` if it is invalid."""
    command = "ls-edge bench BUNDLE --out FILE"
    try:
        found = read_json(Path(path), DeviceProfile, SCHEMA)
    except InvalidDocument as error:
        raise DataError(f"{path}{error}; make it with '{command}'") from None
    if not any(part.part.startswith("block ") and part.file_bytes for part in found.parts):
        raise DataError(f"{path}: parts lists no block, so the memory of a block is unknown; measure again")
    return found
