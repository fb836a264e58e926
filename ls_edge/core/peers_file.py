"""``peers.yaml``: the processes that serve blocks, their addresses, and the processes that may send images.

All machines have the same file. Reading checks everything that depends only on the file; :meth:`PeersFile.of_model`
compares it with a bundle, and :meth:`PeersFile.check_codecs` with the wire codecs.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta
from msgspec.structs import replace

from ls_edge.core.errors import ConfigError, LsEdgeError, UsageError
from ls_edge.core.parts import ENDS, HEAD, STEM
from ls_edge.core.text import parse_ranges
from ls_edge.core.validation import SourceMap, load_yaml, parse_yaml, read_yaml, unknown_name

_ANY_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"
_NAME = re.compile(rf"^(?!.*\.[0-9a-f]{{8}}\Z){_ANY_NAME}")
"""Name in a file. Routing takes a name that ends in a dot and 8 hexadecimal digits for a process of a source."""
_NAME_RULE = "without a dot and 8 hexadecimal digits at the end"
_PORT = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_ADDRESS = re.compile(rf"^tcp://(\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[^\[\]:/\s]+):{_PORT}\Z")
# Hosts that mean all addresses of a machine, for listening but not for dialing.
_ANY = ("*", "0.0.0.0", "[::]")  # noqa: S104
_ALL = 1024
"""Exclusive upper limit of block numbers in a file."""
_MAX_INTERVAL_MS = 250
"""Maximum of the default time between two heartbeats."""

EngineKind = Literal["auto", "onnx", "tensorrt"]
Name = Annotated[str, Meta(pattern=f"^{_ANY_NAME}")]
"""Name of a process on the wire."""
_EntryName = Annotated[
    str,
    Meta(
        pattern=_NAME.pattern,
        description="1 to 63 letters, digits, dots, hyphens or underscores that start with a letter or digit, "
        + _NAME_RULE,
    ),
]
PublicKey = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z",
        description="40 characters of Z85, in quotes, as 'ls-edge keys new' prints them",
    ),
]
Address = Annotated[
    str, Meta(pattern=_ADDRESS.pattern, max_length=300, description="tcp://host:port with a port from 1 to 65535")
]
Threads = Annotated[int, Meta(ge=1, le=1024)]
GpuBytes = Annotated[int, Meta(ge=2**20, le=2**50)]


class HeldParts(tuple[int, ...]):
    """Numbers of the parts that a peer holds, in ascending order.

    In a file, a list of blocks or text such as ``"0-3,7"``, with ``stem`` and ``head``, or ``all`` (all parts).
    """

    @classmethod
    def parse(cls, value: Any) -> HeldParts:
        """Parse a value from a file; raise ValueError if it is invalid."""
        if value == "all":
            return cls((*range(_ALL), STEM, HEAD))
        words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
        ends = [part for part, name in ENDS.items() if isinstance(words, list) and name in words]
        if not ends:
            return cls(_blocks(value))
        rest = [word for word in words if word not in ENDS.values()]
        if len(ends) + len(rest) < len(words):
            raise ValueError("list stem and head once each")
        return cls((*(_blocks(",".join(rest) if isinstance(value, str) else rest) if rest else ()), *ends))

    def of_model(self, num_blocks: int) -> HeldParts:
        """Replace ``all`` by the parts of a model of ``num_blocks`` blocks."""
        return HeldParts((*range(num_blocks), STEM, HEAD)) if len(self) > _ALL else self

    @property
    def listed(self) -> tuple[int, ...]:
        """Parts that are listed one by one; none for ``all``."""
        return () if len(self) > _ALL else tuple(self)

    @property
    def numbered(self) -> tuple[int, ...]:
        """Blocks that are listed by number; none for ``all``."""
        return tuple(part for part in self.listed if part not in ENDS)


def _blocks(value: Any) -> list[int]:
    """Return blocks in ascending order; raise ValueError unless ``value`` lists distinct numbers."""
    try:
        numbers = parse_ranges(value) if isinstance(value, str) else value
        if 0 < len(numbers) == len(set(numbers)) and all(type(n) is int and 0 <= n < _ALL for n in numbers):
            return sorted(numbers)
    except (TypeError, ValueError):
        pass
    raise ValueError('list at least one number, each once, counted from 0, for example [0, 1, 2] or "0-2,7"')


class _ProcessEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    public_key: PublicKey | None = None
    engine: EngineKind = "auto"
    provider: Annotated[str, Meta(max_length=64)] | None = None
    """ONNX Runtime execution provider, for example ``CUDAExecutionProvider``."""
    threads: Threads | None = None
    gpu_mem_limit: GpuBytes | None = None
    """Bytes of GPU working memory for all engines of the process."""


class SourceEntry(_ProcessEntry, frozen=True, forbid_unknown_fields=True):
    """A process that may send images and whose engines run stem and head."""

    name: _EntryName
    may_push: bool = False
    """Whether it may send bundles to peers that have a store (``ls-edge apply``)."""


class PeerConfig(_ProcessEntry, frozen=True, forbid_unknown_fields=True):
    """A process that serves blocks."""

    name: _EntryName
    address: Address
    """Address that other processes dial."""
    blocks: HeldParts
    bind: Address = ""
    max_batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    codec: Annotated[str, Meta(max_length=64)] = "raw"
    credits: Annotated[int, Meta(ge=1, le=65535)] = 0
    """Maximum number of requests that the peer holds at the same time, by default :func:`usual_credits`."""

    def __post_init__(self) -> None:
        if not self.bind:
            msgspec.structs.force_setattr(self, "bind", self.address)
        if not self.credits:
            msgspec.structs.force_setattr(self, "credits", usual_credits(self.max_batch))


class HeartbeatSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ZMTP heartbeats, which detect a stopped process and a disconnected cable."""

    interval_ms: Annotated[int, Meta(ge=5)] | None = None
    timeout_ms: Annotated[int, Meta(ge=20, le=600_000)] = 1000
    """Silence after which a link counts as lost, in addition to the transfer time of a frame on the slowest link."""
    slowest_mbit: Annotated[float, Meta(ge=0.01, le=1e6)] = 1.0
    """Megabits per second of the slowest link that must not count as lost."""

    def __post_init__(self) -> None:
        if self.timeout_ms < 2 * self.every_ms:
            raise ValueError(
                f"heartbeat timeout_ms is {self.timeout_ms} and interval_ms {self.every_ms}; the timeout must be at "
                "least twice the interval"
            )

    @property
    def every_ms(self) -> int:
        """:attr:`interval_ms`; by default a quarter of :attr:`timeout_ms`, at most 250 ms."""
        return min(_MAX_INTERVAL_MS, self.timeout_ms // 4) if self.interval_ms is None else self.interval_ms

    @property
    def connect_ms(self) -> int:
        """Time limit of an attempt to dial, which bounds the round-trip time of usable links."""
        return max(500, self.timeout_ms // 2)

    def transfer_s(self, frame_bytes: int) -> float:
        """Return the seconds that a frame takes on the slowest link."""
        return frame_bytes * 8e-6 / self.slowest_mbit

    def silence_ms(self, frame_bytes: int) -> int:
        """Return the silence after which a link with frames of up to ``frame_bytes`` counts as lost.

        While a frame is in transit, it blocks other messages, and it is a sign of life only when it is complete.
        """
        return self.timeout_ms + math.ceil(self.transfer_s(frame_bytes) * 1e3)


class PeersDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of ``peers.yaml``."""

    peers: Annotated[
        tuple[PeerConfig, ...], Meta(min_length=1, max_length=1024, description="a list of 1 to 1024 peers")
    ]
    sources: Annotated[
        tuple[SourceEntry, ...], Meta(max_length=1024, description="a list of at most 1024 sources")
    ] = ()
    insecure: bool = False
    heartbeat: HeartbeatSettings = HeartbeatSettings()


class PeersFile(PeersDocument, frozen=True, kw_only=True):
    """A ``peers.yaml`` that was read and checked."""

    path: Path
    raw: bytes
    """Content of the file."""
    _source_map: SourceMap

    @property
    def uses_keys(self) -> bool:
        """Whether links use CURVE: a key anywhere in the file enables it, on the loopback as well."""
        return any(peer.public_key for peer in self.peers) or any(source.public_key for source in self.sources)

    def peer(self, name: str) -> PeerConfig:
        """Return the peer called ``name``."""
        for peer in self.peers:
            if peer.name == name:
                return peer
        raise ConfigError(unknown_name("peer", name, [p.name for p in self.peers]), path=self.path)

    def source(self, name: str) -> SourceEntry | None:
        """Return the source called ``name`` or, in a file without keys, the only source; None without either."""
        for source in self.sources:
            if source.name == name:
                return source
        return self.sources[0] if len(self.sources) == 1 and not self.uses_keys else None

    def error(self, entry: PeerConfig | SourceEntry, key: str, message: str) -> ConfigError:
        """Return an error about a key of an entry in this file, with line and column."""
        if isinstance(entry, PeerConfig):
            return self._source_map.error(message, "peers", self.peers.index(entry), key)
        return self._source_map.error(message, "sources", self.sources.index(entry), key)

    def of_model(self, blocks: int) -> PeersFile:
        """Return the file for a model of ``blocks`` blocks, with ``all`` replaced by these blocks, stem, and head.

        Raise :class:`ConfigError` if a peer lists a block that the model lacks.
        """
        for peer in self.peers:
            last = max(set(peer.blocks.of_model(blocks)) - ENDS.keys(), default=-1)
            if last >= blocks:
                problem = f"peer {peer.name!r} lists block {last}, but the bundle has blocks 0 to {blocks - 1}"
                raise self.error(peer, "blocks", problem)
        peers = (replace(peer, blocks=peer.blocks.of_model(blocks)) for peer in self.peers)
        return replace(self, peers=tuple(peers))

    def accepting(self, newer: Sequence[PeersFile], older: Sequence[PeersFile] = (), *, name: str = "") -> PeersFile:
        """Return the file of the process ``name`` extended by the entries of other files, newest first.

        If several files have an entry, the newest entry applies, with the blocks and push rights of all of them. An
        entry is omitted if a newer file contradicts it: with another key, or by giving its name, address, or key to
        another process. The entry of ``name`` does not change.
        """
        peers = {peer.name: peer for peer in self.peers if peer.name == name}
        sources: dict[str, SourceEntry] = {}
        for file in (*newer, self, *older):
            for peer in file.peers:
                known = peers.get(peer.name)
                if known is None and not _is_taken(peer, peers.values(), sources.values()):
                    peers[peer.name] = peer
                elif known is not None and known.public_key == peer.public_key and peer.name != name:
                    blocks = HeldParts(sorted({*known.blocks, *peer.blocks}))
                    peers[peer.name] = replace(known, blocks=blocks)
            for source in file.sources:
                before = sources.get(source.name)
                if before is None and not _is_taken(source, peers.values(), sources.values()):
                    sources[source.name] = source
                elif before is not None and before.public_key == source.public_key and source.may_push:
                    sources[source.name] = replace(before, may_push=True)
        return replace(self, peers=tuple(peers.values()), sources=tuple(sources.values()))

    def within(self, blocks: int) -> PeersFile:
        """Return the file without the blocks that a model of ``blocks`` blocks lacks but another model may have."""
        kept = ((peer, HeldParts(part for part in peer.blocks if part < blocks or part in ENDS)) for peer in self.peers)
        return replace(self, peers=tuple(replace(peer, blocks=held) for peer, held in kept))

    def check_codecs(self, find: Callable[[str], object]) -> None:
        """Raise :class:`ConfigError` if a peer names a codec for which ``find`` raises."""
        for peer in self.peers:
            try:
                find(peer.codec)
            except LsEdgeError as error:
                raise self.error(peer, "codec", str(error)) from None


def load_peers(path: str | Path) -> PeersFile:
    """Read and check a ``peers.yaml``; raise :class:`ConfigError` with file, line and column."""
    return parse_peers(read_yaml(Path(path)), Path(path))


def parse_peers(raw: bytes, path: Path) -> PeersFile:
    """Check the content of a ``peers.yaml``, which messages call ``path``; raise :class:`ConfigError`."""
    document, source_map = load_yaml(path, PeersDocument, raw)
    found = PeersFile(**msgspec.structs.asdict(document), path=path, raw=raw, _source_map=source_map)
    for error in _contradictions(found, source_map):
        raise error
    return found


def place_of_key(path: str | Path, name: str) -> tuple[str, str]:
    """Split the text of a ``peers.yaml`` before and after the value of ``public_key`` in the entry ``name``.

    If the entry has no such key, it is added after the name. The file may still be incomplete. Raise
    :class:`ConfigError` if there is no such entry.
    """
    path = Path(path)
    text, top = parse_yaml(read_yaml(path), path)
    for kind in _values(top, "peers", "sources"):
        for entry in kind.value if isinstance(kind, yaml.SequenceNode) else ():
            for key, value in entry.value if isinstance(entry, yaml.MappingNode) else ():
                if (key.value, value.value) != ("name", name):
                    continue
                for known in _values(entry, "public_key"):
                    return re.sub(r":\Z", ": ", text[: known.start_mark.index]), text[known.end_mark.index :]
                end = value.end_mark.index
                if entry.flow_style:
                    return f"{text[:end]}, public_key: ", text[end:]
                end += len(text[end:].partition("\n")[0])
                return f"{text[:end]}\n{' ' * key.start_mark.column}public_key: ", text[end:]
    raise ConfigError(f"{name!r} is neither a peer nor a source; write its entry first", path=path)


def _values(node: yaml.Node | None, *keys: str) -> Iterator[yaml.Node]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value in keys:
            yield value


def usual_credits(max_batch: int) -> int:
    """Return the default number of credits: enough for two engine calls for sources and two for other peers."""
    return max(16, 4 * max_batch)


def is_name(text: str) -> bool:
    """Return whether a peer or source may have this name, which also names files and appears in logs."""
    return _NAME.match(text) is not None


def check_name(name: str) -> None:
    """Raise :class:`UsageError` if no peer or source may have this name."""
    if not _NAME.match(name):
        raise UsageError(
            f"name {name!r}: use 1 to 63 letters, digits, dots, hyphens or underscores, a letter or digit first, "
            + _NAME_RULE
        )


def is_loopback(address: str) -> bool:
    """Return whether ``tcp://host:port`` names the loopback interface."""
    return is_loopback_host(host_of(address).strip("[]"))


def is_loopback_host(host: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address."""
    address = ip_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def host_of(address: str) -> str:
    """Return the host of ``tcp://host:port``, which is in brackets if it is an IPv6 address."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def is_host(host: str) -> bool:
    """Return whether an address may name a host, which is in brackets if it is an IPv6 address."""
    known = _ADDRESS.match(f"tcp://{host}:1") is not None and host not in _ANY
    return known and (not host.startswith("[") or is_ipv6(host.strip("[]")))


def is_ipv6(host: str) -> bool:
    """Return whether a host is an IPv6 address, without brackets."""
    return isinstance(ip_of(host), ipaddress.IPv6Address)


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a numeric host, without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_taken(entry: PeerConfig | SourceEntry, peers: Collection[PeerConfig], sources: Collection[SourceEntry]) -> bool:
    """Return whether another entry has the name, the key, or the address of this one."""
    others: list[PeerConfig | SourceEntry] = [*peers, *sources]
    return any(
        other.name == entry.name
        or (entry.public_key is not None and other.public_key == entry.public_key)
        or (isinstance(entry, PeerConfig) and isinstance(other, PeerConfig) and other.address == entry.address)
        for other in others
    )


def _contradictions(file: PeersFile, source_map: SourceMap) -> Iterator[ConfigError]:
    """Yield an error for each contradiction between values in the file."""
    error = source_map.error
    names: set[str] = set()
    owners: dict[str, str] = {}
    uses_keys = file.uses_keys
    if uses_keys and file.insecure:
        yield error("'insecure: true' and public keys contradict each other; remove one", "insecure")
    if uses_keys and not file.sources:
        yield error("the peers have keys but no source is listed, so no process may send images; add 'sources'")
    entries: list[tuple[str, int, SourceEntry | PeerConfig]] = [("sources", *item) for item in enumerate(file.sources)]
    entries += [("peers", *item) for item in enumerate(file.peers)]
    for kind, index, entry in entries:
        if entry.name in names:
            yield error(f"the name {entry.name!r} is used twice; each process needs its own", kind, index, "name")
        names.add(entry.name)
        owner = owners.setdefault(entry.public_key, entry.name) if entry.public_key else entry.name
        if owner != entry.name:
            yield error(
                f"{entry.name!r} has the public_key of {owner!r}; make its own with 'ls-edge keys new {entry.name}'",
                kind,
                index,
                "public_key",
            )
        if uses_keys and not entry.public_key:
            yield error(
                f"{entry.name!r} has no public_key while others have; make one with 'ls-edge keys new {entry.name}'",
                kind,
                index,
            )
    for index, source in enumerate(file.sources):
        if source.may_push and not uses_keys:
            yield error(
                f"source {source.name!r} may push bundles, but without keys any process could; make keys with "
                "'ls-edge keys new', or remove may_push",
                "sources",
                index,
                "may_push",
            )
    yield from _wrong_addresses(file, source_map)


def _wrong_addresses(file: PeersFile, source_map: SourceMap) -> Iterator[ConfigError]:
    """Yield an error for each address that others cannot use."""
    error, addresses = source_map.error, dict[str, str]()
    for index, peer in enumerate(file.peers):
        where = ("peers", index, "address")
        if peer.address in addresses:
            other = addresses[peer.address]
            yield error(f"{peer.name!r} has the address of {other!r}, {peer.address}; give each its own port", *where)
        addresses[peer.address] = peer.name
        if (host := host_of(peer.address)) in _ANY:
            yield error(
                f"address {peer.address!r}: {host} is not a host that other devices can reach; write the name or "
                f"address of this one, and 'bind: {peer.address}' below it",
                *where,
            )
        for key, address in (("address", peer.address), ("bind", peer.bind)):
            host = host_of(address)
            if host.startswith("[") and not is_ipv6(host.strip("[]")):
                yield error(
                    f"{key} {address!r}: {host} is not an IPv6 address; write for example [::1]", "peers", index, key
                )
            if not (file.uses_keys or file.insecure or is_loopback(address)):
                yield error(
                    f"{key} {address!r} of peer {peer.name!r} is not on the loopback and has no public_key; make keys "
                    f"with 'ls-edge keys new {peer.name}', or write 'insecure: true' at the top",
                    "peers",
                    index,
                    key,
                )
