"""``peers.yaml``: who serves which blocks, where to dial them, and who may send images.

The same file lies on every machine. Reading checks what the file alone determines. Which blocks exist is checked
against a bundle (:meth:`PeersFile.check_blocks`), which codecs exist by those who send tokens
(:meth:`PeersFile.check_codecs`).
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ls_edge.core import yaml_source
from ls_edge.core.errors import ConfigError, UsageError
from ls_edge.core.text import parse_ranges
from ls_edge.core.validation import unknown_name

EngineKind = Literal["auto", "onnx", "tensorrt"]

_ADDRESS = re.compile(r"^tcp://(\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[^\[\]:/\s]+):(\d{1,5})$")
_ANY = ("*", "0.0.0.0", "[::]")  # noqa: S104
"""Hosts that mean every address of a machine: to listen on, not to dial."""
_MOST_INTERVAL_MS = 250
"""Longest time between two heartbeats of a file that does not say it."""
_MOST_SILENCE_MS = 600_000
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
_Z85_KEY = re.compile(r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")


class SourceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that may send images."""

    name: str
    public_key: str | None = None
    """Its CURVE public key, 40 characters of Z85."""
    engine: EngineKind = "auto"
    """What runs its stem and head."""
    provider: str | None = None
    """ONNX Runtime execution provider, for example ``CUDAExecutionProvider``."""
    threads: int | None = None
    """Threads of stem and head; one where it is left out."""
    cpus: list[int] | str | None = None
    """Cores that run its stem and head, and nothing else of ls-edge."""
    may_push: bool = False
    """Whether it may send bundles to peers that have a store (``ls-edge push``)."""


class PeerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process that serves blocks."""

    name: str
    address: str
    """Where the others dial, ``tcp://host:port``."""
    blocks: list[int] | str
    """Block indices, or text such as ``"0-3,7"``."""
    bind: str | None = None
    """Where it listens, where that differs from ``address``."""
    public_key: str | None = None
    """Its CURVE public key, 40 characters of Z85."""
    engine: EngineKind = "auto"
    provider: str | None = None
    """ONNX Runtime execution provider, for example ``CUDAExecutionProvider``."""
    threads: int | None = None
    """Threads of the engine; the engine's choice where it is left out."""
    cpus: list[int] | str | None = None
    """Cores that run the engine, and nothing else of ls-edge: numbers, or text such as ``"2-5"``."""
    max_batch: int = 1
    """Most images that the peer runs through a block at once."""
    batch_wait_ms: float = 0.0
    """How long the peer waits for a batch to fill."""
    codec: str = "raw"
    """How tokens are sent to this peer: the name of a wire codec."""
    credits: int | None = None
    """Most images that the peer holds at once; :func:`usual_credits` where it is left out."""


class HeartbeatSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ZMTP heartbeats, which find a process that is stopped and a cable that is out."""

    interval_ms: int | None = None
    """Time between two heartbeats on a link; :attr:`every_ms` where it is left out."""
    timeout_ms: int = 1000
    """Silence after which a link is lost, on top of the time that one frame takes on the slowest link."""
    slowest_mbit: float = 1.0
    """Megabits a second of the slowest link that must still count as alive."""

    @property
    def every_ms(self) -> int:
        """:attr:`interval_ms`, or a quarter of a second or of :attr:`timeout_ms`: each wakes two processes."""
        return min(_MOST_INTERVAL_MS, self.timeout_ms // 4) if self.interval_ms is None else self.interval_ms

    def transfer_s(self, frame_bytes: int) -> float:
        """Seconds that a frame of so many bytes takes on the slowest link."""
        return frame_bytes * 8e-6 / self.slowest_mbit

    def silence_ms(self, frame_bytes: int) -> int:
        """Silence after which a link is lost, in milliseconds, where frames have up to ``frame_bytes``.

        While a frame is on its way nothing else can pass, and it counts as a sign of life only when it is whole.
        """
        return self.timeout_ms + math.ceil(self.transfer_s(frame_bytes) * 1e3)


class PeersDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of ``peers.yaml`` as it is written."""

    peers: list[PeerEntry]
    sources: list[SourceEntry] = []
    insecure: bool = False
    heartbeat: HeartbeatSettings = HeartbeatSettings()


@dataclass(frozen=True)
class PeerConfig:
    """A peer of the file, checked, its blocks as numbers."""

    name: str
    address: str
    bind: str
    blocks: tuple[int, ...]
    public_key: str | None
    engine: EngineKind
    provider: str | None
    threads: int | None
    cpus: tuple[int, ...] | None
    max_batch: int
    batch_wait_ms: float
    codec: str
    credits: int


@dataclass(frozen=True)
class PeersFile:
    """A ``peers.yaml`` that was read and checked."""

    path: Path
    peers: tuple[PeerConfig, ...]
    sources: tuple[SourceEntry, ...]
    insecure: bool
    """Whether the user switched CURVE off by name."""
    heartbeat: HeartbeatSettings
    _source_map: yaml_source.SourceMap

    @property
    def uses_keys(self) -> bool:
        """Whether links are CURVE links: any key in the file switches them on, on the loopback too."""
        return any(p.public_key for p in self.peers) or any(s.public_key for s in self.sources)

    def peer(self, name: str) -> PeerConfig:
        """The peer called ``name``."""
        for peer in self.peers:
            if peer.name == name:
                return peer
        raise ConfigError(unknown_name("peer", name, [p.name for p in self.peers]), path=self.path)

    def source(self, name: str) -> SourceEntry | None:
        """The source called ``name``; the only one where keys are off and just one is listed, whatever it is called."""
        for source in self.sources:
            if source.name == name:
                return source
        return self.sources[0] if len(self.sources) == 1 and not self.uses_keys else None

    def error(self, entry: PeerConfig | SourceEntry, key: str, message: str) -> ConfigError:
        """Make an error about a key of an entry of this file, with its line and column."""
        if isinstance(entry, PeerConfig):
            return self._source_map.error(message, "peers", self.peers.index(entry), key)
        return self._source_map.error(message, "sources", self.sources.index(entry), key)

    def check_blocks(self, blocks: int) -> None:
        """Raise :class:`ConfigError` where a peer lists a block that a model of ``blocks`` blocks lacks."""
        for index, peer in enumerate(self.peers):
            for block in peer.blocks:
                if block >= blocks:
                    raise self._source_map.error(
                        f"peer {peer.name!r} lists block {block}, but the bundle has blocks 0 to {blocks - 1}",
                        "peers", index, "blocks",
                    )  # fmt: skip

    def source_with_key(self, public_key: bytes) -> SourceEntry:
        """The source whose public key this is; raises :class:`UsageError` where it is nobody's."""
        for source in self.sources:
            if source.public_key and source.public_key.encode() == public_key:
                return source
        raise UsageError(f"the secret key belongs to no source of {self.path}; add its public key under 'sources'")

    def check_codecs(self, known: Collection[str]) -> None:
        """Raise :class:`ConfigError` where a peer names a codec that is not among ``known``."""
        for index, peer in enumerate(self.peers):
            if peer.codec not in known:
                raise self._source_map.error(
                    f"codec is {peer.codec!r}; it has to be one of {', '.join(known)}", "peers", index, "codec"
                )


def load_peers(path: str | Path) -> PeersFile:
    """Read and check a ``peers.yaml``; raises :class:`ConfigError` with file, line and column."""
    file, source_map = yaml_source.load(path, PeersDocument)
    if not file.peers:
        raise source_map.error("no peers are listed; add at least one", "peers")
    peers = tuple(_check_peer(entry, index, source_map) for index, entry in enumerate(file.peers))
    _check_unique(file, source_map)
    _check_keys(file, source_map)
    heartbeat = file.heartbeat
    if heartbeat.every_ms < 5 or not 2 * heartbeat.every_ms <= heartbeat.timeout_ms <= _MOST_SILENCE_MS:
        raise source_map.error(
            f"heartbeat interval {heartbeat.every_ms} ms and timeout {heartbeat.timeout_ms} ms: the interval must "
            f"be at least 5 and the timeout at least twice the interval, and at most {_MOST_SILENCE_MS}",
            "heartbeat",
        )
    if not 0.01 <= heartbeat.slowest_mbit <= 1e6:
        raise source_map.error(
            f"heartbeat slowest_mbit is {heartbeat.slowest_mbit}: give megabits a second from 0.01 to 1000000",
            "heartbeat", "slowest_mbit",
        )  # fmt: skip
    return PeersFile(Path(path), peers, tuple(file.sources), file.insecure, heartbeat, source_map)


def parse_cpus(cpus: Sequence[int] | str | None) -> tuple[int, ...]:
    """Read ``"2-5"`` or a list of numbers as sorted cores; empty for None. Raises ValueError for something else."""
    cores = () if cpus is None else parse_ranges(cpus) if isinstance(cpus, str) else tuple(cpus)
    if (cpus is not None and not cores) or any(not 0 <= core <= 9999 for core in cores) or len({*cores}) < len(cores):
        raise ValueError(cpus)
    return tuple(sorted(cores))


def is_name(text: str) -> bool:
    """Whether a peer or source may be called so: it also names files and stands in logs."""
    return _NAME.fullmatch(text) is not None


def is_loopback(address: str) -> bool:
    """Whether ``tcp://host:port`` names the loopback interface (a name other than ``localhost`` does not count)."""
    match = _ADDRESS.match(address)
    host = match[1].strip("[]") if match else ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_host(host: str) -> bool:
    """Whether what stands between brackets is an IPv6 address; names and other addresses are left to the network."""
    if not host.startswith("["):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return False


def _check_peer(entry: PeerEntry, index: int, source_map: yaml_source.SourceMap) -> PeerConfig:
    at = ("peers", index)
    _check_name(entry.name, source_map, *at, "name")
    for key, value in (("address", entry.address), ("bind", entry.bind)):
        match = _ADDRESS.match(value) if value is not None else None
        if value is not None and (match is None or not 0 < int(match[2]) < 65536):
            raise source_map.error(f"{key} {value!r} is not tcp://host:port with a port from 1 to 65535", *at, key)
        if match is not None and not _is_host(match[1]):
            raise source_map.error(
                f"{key} {value!r}: {match[1]} is no address of IPv6; write for example [::1]", *at, key
            )
        if match is not None and key == "address" and match[1] in _ANY:
            raise source_map.error(
                f"address {value!r} is where the others dial, and {match[1]} is no machine; write the name or address "
                f"of this one, and 'bind: {value}' below it",
                *at, key,
            )  # fmt: skip
    if isinstance(entry.blocks, str):
        try:
            blocks = parse_ranges(entry.blocks)
        except ValueError as error:
            raise source_map.error(
                f"blocks {entry.blocks!r}: cannot read {str(error)!r}; write for example [0, 1, 2] or \"0-2,7\"",
                *at, "blocks",
            ) from None  # fmt: skip
    else:
        blocks = tuple(entry.blocks)
    if not blocks or min(blocks) < 0 or len(set(blocks)) != len(blocks):
        raise source_map.error(
            f"blocks {entry.blocks!r}: list at least one block, each once, counted from 0", *at, "blocks"
        )
    for key, number, least, most in (
        ("threads", entry.threads, 1, 1024), ("max_batch", entry.max_batch, 1, 1024),
        ("credits", entry.credits, 1, 65535), ("batch_wait_ms", entry.batch_wait_ms, 0, 60_000),
    ):  # fmt: skip
        _check_range(key, number, least, most, source_map, *at)
    _check_key(entry.public_key, source_map, *at, "public_key")
    cpus = _check_cpus(entry.cpus, source_map, *at)
    return PeerConfig(
        name=entry.name, address=entry.address, bind=entry.bind or entry.address, blocks=tuple(sorted(blocks)),
        public_key=entry.public_key, engine=entry.engine, provider=entry.provider, threads=entry.threads,
        cpus=cpus, max_batch=entry.max_batch, batch_wait_ms=entry.batch_wait_ms, codec=entry.codec,
        credits=usual_credits(entry.max_batch) if entry.credits is None else entry.credits,
    )  # fmt: skip


def usual_credits(max_batch: int) -> int:
    """Most images that a peer holds at once unless it is told otherwise: two calls for sources, two for other peers."""
    return max(16, 4 * max_batch)


def _check_range(
    key: str, number: float | None, least: int, most: int, source_map: yaml_source.SourceMap, *at: str | int
) -> None:
    if number is not None and number < least:
        raise source_map.error(f"{key} is {number}, the least is {least}", *at, key)
    if number is not None and number > most:
        raise source_map.error(f"{key} is {number}, the most is {most}", *at, key)


def _check_cpus(
    cpus: list[int] | str | None, source_map: yaml_source.SourceMap, *at: str | int
) -> tuple[int, ...] | None:
    try:
        return parse_cpus(cpus) or None
    except ValueError:
        raise source_map.error(
            f'cpus {cpus!r}: list at least one core, each once, counted from 0, for example [2, 3] or "2-5"',
            *at,
            "cpus",
        ) from None


def _check_unique(file: PeersDocument, source_map: yaml_source.SourceMap) -> None:
    seen: dict[str, str] = {}
    entries = [("sources", i, s.name) for i, s in enumerate(file.sources)]
    entries += [("peers", i, p.name) for i, p in enumerate(file.peers)]
    for kind, index, name in entries:
        if kind == "sources":
            _check_name(name, source_map, kind, index, "name")
            _check_key(file.sources[index].public_key, source_map, kind, index, "public_key")
            _check_range("threads", file.sources[index].threads, 1, 1024, source_map, kind, index)
            _check_cpus(file.sources[index].cpus, source_map, kind, index)
        if name in seen:
            raise source_map.error(f"the name {name!r} stands twice; each process needs its own", kind, index, "name")
        seen[name] = kind
    addresses: dict[str, str] = {}
    for index, peer in enumerate(file.peers):
        if peer.address in addresses:
            raise source_map.error(
                f"{peer.name!r} has the address of {addresses[peer.address]!r}, {peer.address}; give each its own port",
                "peers", index, "address",
            )  # fmt: skip
        addresses[peer.address] = peer.name


def _check_keys(file: PeersDocument, source_map: yaml_source.SourceMap) -> None:
    keyed = [p for p in file.peers if p.public_key]
    if keyed and len(keyed) < len(file.peers):
        index = next(i for i, p in enumerate(file.peers) if not p.public_key)
        raise source_map.error(
            f"peer {file.peers[index].name!r} has no public_key while others have; make one with "
            f"'ls-edge keys new {file.peers[index].name}'",
            "peers", index,
        )  # fmt: skip
    if any(s.public_key for s in file.sources) and not keyed:
        raise source_map.error("sources have keys but peers have none; CURVE needs both", "sources")
    if keyed:
        if file.insecure:
            raise source_map.error("'insecure: true' and public keys contradict each other; remove one", "insecure")
        for index, source in enumerate(file.sources):
            if not source.public_key:
                raise source_map.error(
                    f"source {source.name!r} has no public_key while the peers have; make one with "
                    f"'ls-edge keys new {source.name}'",
                    "sources", index,
                )  # fmt: skip
        if not file.sources:
            raise source_map.error(
                "the peers have keys but no source is listed, so nobody may send images; add 'sources'"
            )
        return
    for index, source in enumerate(file.sources):
        if source.may_push:
            raise source_map.error(
                f"source {source.name!r} may push bundles, and the file has no keys, so anybody could; make some with "
                "'ls-edge keys new', or remove may_push",
                "sources", index, "may_push",
            )  # fmt: skip
    if not file.insecure:
        for index, peer in enumerate(file.peers):
            for key, address in (("address", peer.address), ("bind", peer.bind)):
                if address is not None and not is_loopback(address):
                    raise source_map.error(
                        f"{key} {address!r} of peer {peer.name!r} is not on the loopback and has no public_key; make "
                        f"keys with 'ls-edge keys new {peer.name}', or write 'insecure: true' at the top",
                        "peers", index, key,
                    )  # fmt: skip


def _check_name(name: str, source_map: yaml_source.SourceMap, *where: str | int) -> None:
    if not is_name(name):
        raise source_map.error(
            f"name {name!r}: use 1 to 63 letters, digits, dots, hyphens or underscores, a letter or digit first", *where
        )


def _check_key(key: str | None, source_map: yaml_source.SourceMap, *where: str | int) -> None:
    if key is not None and not _Z85_KEY.match(key):
        raise source_map.error(
            "public_key is not 40 characters of Z85; copy what 'ls-edge keys new' printed, in quotes", *where
        )
