"""``profile.json``: what a bundle takes on one device, written by ``ls-edge profile`` and read by ``ls-edge plan``.

Times are milliseconds, sizes bytes. What could not be measured is null, never a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ls_edge.core.errors import DataError
from ls_edge.core.files import read_file
from ls_edge.core.validation import InvalidDocument, decode_json
from ls_edge.device.sensors import DeviceState

SCHEMA = 1

Duration = Annotated[float, Meta(ge=0)]
BatchSize = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}\Z")]

_Document = TypeVar("_Document", bound=msgspec.Struct)


class Times(msgspec.Struct, frozen=True):
    """Milliseconds of repeated runs."""

    p50: Duration
    p95: Duration
    min: Duration

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """From at least one run."""
        ms = np.asarray(seconds) * 1e3
        return cls(*(round(float(value), 4) for value in (np.median(ms), np.percentile(ms, 95), ms.min())))


class DeviceFacts(msgspec.Struct, frozen=True):
    """What a device is."""

    name: str
    """What the plan and ``peers.yaml`` call it; the host name unless it was given another."""
    board: str | None
    cpu: str
    cores: int
    cpu_quota: float | None
    """Cores whose time its control group grants; null for no limit."""
    gpus: list[str]
    memory_bytes: int | None
    available_bytes: int | None
    """Memory that was free before the engines were loaded."""
    l4t: str | None
    power_mode: str | None
    battery_wh: float | None
    """What was left in its batteries."""
    versions: dict[str, str]
    emulated: str | None = None
    """What the figures stand for where they were not measured on such a device: the source of the figures."""


class PartLoad(msgspec.Struct, frozen=True):
    """What it takes to have a part ready to run."""

    part: str
    load_ms: float
    """Until its engine was open, the build included where there was one."""
    built: bool
    """Whether its engine had to be built first (TensorRT)."""
    file_bytes: int
    resident_bytes: int | None
    """By how much the memory of the process grew; memory of a graphics card does not count here."""


class BatchTimes(msgspec.Struct, frozen=True):
    """Times of the parts at one batch size, one image or several at a time."""

    stem_ms: Times
    head_ms: Times
    blocks_ms: Annotated[list[Times], Meta(min_length=1, description="a list of the times of at least one block")]
    chain_ms: Times
    """Stem, all blocks and head one after the other."""
    repeats: int
    slowdown: float
    """Median of the last third of the runs by that of the first third: above 1 the device became slower."""
    power_watts: float | None
    energy_mj_per_image: float | None


class DeviceProfile(msgspec.Struct, frozen=True):
    """The document of ``ls-edge profile``."""

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
    """By the number of images at a time."""
    parts: list[PartLoad]
    memory_bytes: int
    """Of all parts together, the larger of their files and of what the process grew by."""
    power_watts: float | None
    """While the chain runs one image after the other."""
    idle_watts: float | None
    """Before the engines were loaded."""
    power_scope: str | None
    """What the power is drawn by: ``board``, ``platform``, ``processor``, ``gpu`` or ``processor and gpu``."""
    power_channels: dict[str, float]
    energy_mj_per_image: float | None
    """Power times the time of an image, one at a time; what the device draws while idle is in it."""
    throttled: bool
    throttled_by: list[str]
    before: DeviceState
    after: DeviceState

    @property
    def one_at_a_time(self) -> BatchTimes:
        """The times of the smallest batch."""
        return self.batch[min(self.batch, key=int)]

    @property
    def block_ms(self) -> float:
        """What one block takes, usually: the mean of the blocks' medians, one image at a time."""
        times = self.one_at_a_time
        return sum(block.p50 for block in times.blocks_ms) / len(times.blocks_ms) / min(map(int, self.batch))

    @property
    def block_memory_bytes(self) -> int:
        """What one more block takes: the mean of what the blocks took."""
        blocks = [part for part in self.parts if part.part.startswith("block ")]
        return round(sum(max(part.file_bytes, part.resident_bytes or 0) for part in blocks) / len(blocks))


class LinkTimes(msgspec.Struct, frozen=True):
    """Transfers of one model's tokens from one process to another, in one codec."""

    origin: str
    to: str
    codec: str
    bytes: int
    """Of a frame of tokens."""
    transfers: int
    """How many were measured."""
    p50_ms: Duration
    """From the end of the engine call before to the receiver's word that it has the tokens, decoded and checked."""
    p95_ms: float


class LinkFit(msgspec.Struct, frozen=True):
    """Latency and bandwidth between two processes, by a straight line through the medians of the codecs."""

    origin: str
    to: str
    latency_ms: float | None
    """Null where codecs of different sizes do not take different times."""
    mbit_per_s: float | None


class CallTimes(msgspec.Struct, frozen=True):
    """What an engine call takes a peer beyond the engine: from having the tokens to the decision where they go next."""

    peer: str
    p50_ms: float
    mean_ms: float
    """What counts for throughput: on a busy machine a few calls wait long."""
    p95_ms: float
    calls: int
    """How many were measured."""


class LinksDocument(msgspec.Struct, frozen=True):
    """The document of ``ls-edge profile --links``."""

    schema: int
    model_id: str
    source: str
    """What the file calls the process that asked."""
    transfers: list[LinkTimes]
    fits: list[LinkFit]
    missing: list[tuple[str, str, str]]
    """Pairs that could not be measured, and why."""
    calls: list[CallTimes] = []
    """Of each peer that ran a block for the measurement."""


def load_profile(path: str | Path) -> DeviceProfile:
    """Read a ``profile.json``; raise :class:`DataError` if it is not one."""
    found = _load(path, DeviceProfile, "ls-edge profile BUNDLE --out FILE")
    if not any(part.part.startswith("block ") for part in found.parts):
        raise DataError(f"{path}: parts lists no block, so the memory of a block is unknown; measure again")
    return found


def load_links(path: str | Path) -> LinksDocument:
    """Read a ``links.json``; raise :class:`DataError` if it is not one."""
    return _load(path, LinksDocument, "ls-edge profile --links --peers peers.yaml --out FILE")


def _load(path: str | Path, type_: type[_Document], command: str) -> _Document:
    try:
        return decode_json(read_file(Path(path)), type_, SCHEMA)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check the path, or make it with '{command}'") from None
    except InvalidDocument as error:
        raise DataError(f"{path}{error}; make it with '{command}'") from None
