"""Files, settings and bundle with which a peer starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ls_edge.core.bundle import SCHEMA, Bundle, ImageSpec, Manifest, PartFile, PartFiles, TokenSpec
from ls_edge.core.peers_file import EngineKind, PeerConfig, PeersFile
from ls_edge.runtime.peer.inspector import Examine
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.transport.keys import KeyPair

_NO_PART = PartFile("", "", 0)
_NO_MODEL = Manifest(
    schema=SCHEMA,
    bundle_id="",
    model_id="",
    model="",
    method="",
    classes=(),
    image=ImageSpec((1, 1), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    tokens=TokenSpec(1, 1),
    needs_slot=False,
    precision="",
    opset=0,
    parts=PartFiles(_NO_PART, _NO_PART, ()),
)


@dataclass(frozen=True)
class PeerSettings:
    """Settings of a peer in addition to ``peers.yaml``."""

    engine: EngineKind | None = None
    """Engine of the blocks; by default the engine in ``peers.yaml``, and ``threads`` likewise."""
    threads: int | None = None
    strict_bundle: bool = False
    """Whether to work only with peers and sources of the same bundle."""
    limits: Limits | None = None
    examine: Examine | None = None
    """Function that checks this machine for other processes."""


@dataclass(frozen=True)
class PeerSetup:
    """A peer's files and settings, and its bundle."""

    peers: PeersFile
    entry: PeerConfig
    keys: KeyPair | None
    settings: PeerSettings
    bundle: Bundle | None = None
    """The served bundle; None without one."""
    manifest: Manifest = _NO_MODEL
    """Manifest of the bundle, or an empty one."""
    newer: tuple[PeersFile, ...] = ()
    """Further files whose processes are accepted during a change of the fleet, the newest first."""
    older: tuple[PeersFile, ...] = ()

    def of_model(self, bundle: Bundle | None) -> PeerSetup:
        """Return the setup with a bundle, with ``all`` replaced by its parts; raise an error if they do not fit."""
        peers, newer, older, manifest = self.peers, self.newer, self.older, _NO_MODEL
        if bundle is not None:
            manifest = bundle.manifest
            peers = peers.of_model(bundle.num_blocks)
            newer, older = (tuple(one.within(bundle.num_blocks) for one in others) for others in (newer, older))
        peers = peers.accepting(newer, older, name=self.entry.name)
        return replace(
            self,
            peers=peers,
            entry=peers.peer(self.entry.name),
            bundle=bundle,
            manifest=manifest,
            newer=(),
            older=(),
        )

    def using(
        self,
        peers: PeersFile,
        keys: KeyPair | None,
        newer: tuple[PeersFile, ...] = (),
        older: tuple[PeersFile, ...] = (),
    ) -> PeerSetup:
        """Return the setup with another file and key pair; raise :class:`ConfigError` if the file does not fit."""
        return replace(self, peers=peers, entry=peers.peer(self.entry.name), keys=keys, newer=newer, older=older)

    @property
    def engine_kind(self) -> EngineKind:
        """Requested engine."""
        return self.settings.engine or self.entry.engine
