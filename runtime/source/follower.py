"""Follower of the files that peers apply, so that a source takes part in a change of the fleet.

The newest file that a linked peer announces counts, and the others that peers announce, until all peers have only the
newest one: a peer may still serve by another one.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

from ls_edge.core.errors import LsEdgeError
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.clients.fetching import fetch_file
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.protocol.messages import MAX_FILES, FileVersion, Hello
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.zap import curve_of

log = logging.getLogger("ls_edge.runtime")

AGAIN_S = 5.0
"""Seconds after which a file or model that could not be used is requested again, unless its holders change earlier."""


class Follower:
    """Files that the peers of a source announce; :meth:`look` is called by the source thread."""

    def __init__(self, name: str, given: PeersFile, keys: KeyPair | None, use: Callable[[PeersFile], None]) -> None:
        """Call ``use``, on another thread, with each file that the fleet uses."""
        self.files: tuple[FileVersion, ...] = ()
        """Files in use, the newest first: the source's own file, as version 0, until it follows another."""
        self._name, self._use = name, use
        self._known: dict[bytes, PeersFile] = {}
        self._thread: threading.Thread | None = None
        self._again_at, self._refused = 0.0, ""
        self._tried: dict[FileVersion, list[str]] = {}
        """Files of the latest attempt, with the peers that announced them."""
        self.reset(given, keys)

    def reset(self, given: PeersFile, keys: KeyPair | None) -> None:
        """Begin again with the file and keys of the source."""
        digest = hashlib.sha256(given.raw).digest()
        self._given, self._keys, self.files = given, keys, (FileVersion(0, digest),)
        self._present, self._known[digest], self._is_settled = given, given, True

    def look(self, hellos: Iterable[Hello]) -> bool:
        """Compare the files that linked peers announce with the present ones, and begin to follow others.

        Return whether to look again soon, even if the peers announce nothing new.
        """
        peers = [hello for hello in hellos if hello.role == "peer"]
        applied = {file for hello in peers for file in hello.files if file.version}
        if not applied:
            return False
        newest = max(applied, key=lambda it: it.version)
        is_settled = all({file.digest for file in hello.files} == {newest.digest} for hello in peers)
        # During a change, a file stays in use even if the peers that have announced it are lost.
        known = {one.digest: one for one in sorted((*self.files, *applied), key=lambda it: it.version)}
        latest = sorted(known.values(), key=lambda it: -it.version)[:MAX_FILES]
        files = (known[newest.digest],) if is_settled else tuple(latest)
        if (files, is_settled) == (self.files, self._is_settled):
            return False
        holders = {
            one: [hello.name for hello in peers if any(file.digest == one.digest for file in hello.files)]
            for one in files
        }
        is_busy = self._thread is not None and self._thread.is_alive()
        if is_busy or (holders == self._tried and time.monotonic() < self._again_at):
            return True
        self._tried, self._again_at = holders, time.monotonic() + AGAIN_S
        self._thread = threading.Thread(target=self._follow, args=(files, holders, is_settled), daemon=True)
        self._thread.start()
        return True

    def _follow(self, agreed: tuple[FileVersion, ...], holders: dict[FileVersion, list[str]], is_settled: bool) -> None:
        """Fetch the files that are missing, and use all of them."""
        given = self._given
        try:
            for file in agreed:
                if file.digest not in self._known:
                    fetched = fetch_file(self._present, self._keys, self._name, file, holders[file])
                    self._known[file.digest] = fetched
            newest, *older = (self._known[file.digest] for file in agreed)
            newest.check_codecs(codec_of)
            curve_of(newest, self._name, self._keys)
            if given is not self._given:  # it was read again meanwhile
                return
            before, self.files, self._present = (self.files, self._present), agreed, newest.accepting((), older)
            try:
                self._use(self._present)
            except LsEdgeError:
                self.files, self._present = before
                raise
            self._is_settled = is_settled
        except LsEdgeError as error:
            if str(error) != self._refused:  # it is tried again every few seconds, for days
                self._refused = str(error)
                log.warning("not following", extra={"source": self._name, "why": self._refused})
        else:
            self._again_at, self._refused = 0.0, ""
            log.info("uses the applied peers.yaml", extra={"source": self._name, "version": agreed[0].version})
