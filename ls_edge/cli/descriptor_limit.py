"""Whether this process may open as many sockets as its peers need, checked before the first one.

Without the check a run would fail at whichever socket libzmq cannot open.
"""

from __future__ import annotations

import contextlib
import os

from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import PeersFile

DESCRIPTORS_PER_PEER = 5
"""Of a link to a peer: its connection, the socket itself, two of its monitor; and the link of that peer to us."""
DESCRIPTORS_PER_CONNECTION = 3
"""Of HTTP: the connection, and the files that a long body and a long answer are kept in."""
OTHER_DESCRIPTORS = 24
"""Standard streams, libzmq's threads, key checks, and files that are open for a moment."""


def require_descriptors(peers: PeersFile, connections: int = 0) -> None:
    """Raise the soft limit of open files where that is needed; :class:`UsageError` where it may not be raised.

    ``connections``: of HTTP, beside the links to peers.
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
