"""The files that the processes of a fleet announce in HELLO, as a peer with a store sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.protocol.messages import MAX_BEHIND, FileVersion
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.store.jobs import Fleet
from ls_edge.runtime.store.store import Store


class AnnouncedFiles:
    """Files of this peer and of its neighbors."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self.neighbors: Iterable[Neighbor] = ()
        """Neighbors whose files are compared."""
        self._store, self._fleet = store, fleet

    @property
    def own(self) -> tuple[FileVersion, ...]:
        """Applied file, and the other files whose processes are accepted."""
        record = self._store.record
        if record.file is None:
            return (FileVersion(0, hashlib.sha256(self._fleet.given).digest()),)
        return tuple(FileVersion(file.version, bytes.fromhex(file.digest)) for file in (record.file, *record.accepts))

    def content(self, digest: bytes) -> bytes:
        """Return the content of a file of :attr:`own`; empty for any other digest."""
        if all(file.digest != digest for file in self.own):
            return b""
        return self._fleet.given if self._store.record.file is None else self._store.read_raw(digest.hex())

    def behind(self, file: AppliedFile) -> tuple[str, ...]:
        """Return the linked sources that have not announced a file."""
        digest = bytes.fromhex(file.digest)
        sources = (neighbor.hello for neighbor in self.neighbors if neighbor.hello.role == "source")
        late = [hello.name for hello in sources if all(other.digest != digest for other in hello.files)]
        return tuple(sorted(late)[:MAX_BEHIND])

    def newer_elsewhere(self) -> str:
        """Name the neighbors with a newer file, which this peer missed while it was away; empty if there are none."""
        known = self.own
        peers = (neighbor.hello for neighbor in self.neighbors if neighbor.hello.role == "peer")
        newer = {
            hello.name: hello.files[0].version
            for hello in peers
            if hello.files and hello.files[0].version > known[0].version and hello.files[0] not in known
        }
        if not newer:
            return ""
        runs = f"version {max(newer.values())} of peers.yaml, this peer {known[0].version}"
        return f"{', '.join(sorted(newer))} have {runs}; run 'ls-edge apply' again"
