"""The limit on open files, checked and raised before the first socket is opened.

Without this check, a run would fail at the first socket that libzmq cannot open.
"""

from __future__ import annotations

import contextlib
import os

from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import PeersFile

DESCRIPTORS_PER_PEER = 5
"""File descriptors per peer: connection, socket, two of its monitor, and the link of that peer to us."""
DESCRIPTORS_PER_CONNECTION = 3
"""File descriptors per HTTP connection: its socket, and files for a long body and a long answer."""
OTHER_DESCRIPTORS = 24
"""Standard streams, libzmq's threads, key checks, and temporary files."""


def require_descriptors(peers: PeersFile, connections: int = 0) -> None:
    """Raise the soft limit on open files if needed; raise :class:`UsageError` if that is not allowed.

    ``connections`` is the number of HTTP connections in addition to the links to peers.
    """
    try:
        import resource
    except ImportError:  # not on every system
        return
    needed = OTHER_DESCRIPTORS + DESCRIPTORS_PER_PEER * len(peers.peers) + DESCRIPTORS_PER_CONNECTION * connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return
    raise UsageError(
        f"this process may open {soft} files and sockets, and the {len(peers.peers)} peers of {os.fspath(peers.path)} "
        f"need {needed}; allow more, for example with 'ulimit -n 1024'"
    )
