"""Inputs of commands: peers.yaml and keys."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.logs import set_up
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.text import counted
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.transport.keys import KeyPair, load_secret

if TYPE_CHECKING:
    from ls_edge.runtime.source.source import Source

DESCRIPTORS_PER_PEER = 5
"""File descriptors per peer: connection, socket, two for its monitor, and the link from that peer."""
DESCRIPTORS_PER_CONNECTION = 3
"""File descriptors per HTTP connection: its socket, and files for a long body and a long answer."""
OTHER_DESCRIPTORS = 24
"""Standard streams, libzmq's threads, key checks, and temporary files."""


def open_peers(path: Path, connections: int = 0) -> PeersFile:
    """Read peers.yaml for a process that dials all peers and serves up to ``connections`` HTTP connections."""
    file = load_peers(path)
    file.check_codecs(codec_of)
    require_descriptors(file, connections)
    return file


def peers_to_ask(path: Path, secret_key: Path | None) -> tuple[PeersFile, KeyPair | None]:
    """Read peers.yaml and the key of a command that reports problems of peers itself, and turn off the log."""
    set_up(as_json=False, level=logging.CRITICAL)
    return open_peers(path), None if secret_key is None else load_secret(secret_key)


def reload_source(source: Source, say: Callable[[str], None]) -> None:
    """Make a source read ``peers.yaml`` again, and report the result."""
    try:
        require_descriptors(load_peers(source.given.path))
        source.reload()
        say(f"read {os.fspath(source.peers.path)} again: {counted(len(source.peers.peers), 'peer')}")
    except LsEdgeError as error:
        say(f"the peers are unchanged: {error}")


def require_descriptors(peers: PeersFile, connections: int = 0) -> None:
    """Raise the soft limit on open files if needed; raise :class:`UsageError` if that is not allowed.

    Without this check, a run would fail at the first socket that libzmq cannot open. ``connections`` is the number of
    HTTP connections in addition to the links to peers.
    """
    needed = OTHER_DESCRIPTORS + DESCRIPTORS_PER_PEER * len(peers.peers) + DESCRIPTORS_PER_CONNECTION * connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return
    raise UsageError(
        f"this process may open {soft} files and sockets, and the {counted(len(peers.peers), 'peer')} of "
        f"{os.fspath(peers.path)} need {needed}; allow more, for example with 'ulimit -n 1024'"
    )
