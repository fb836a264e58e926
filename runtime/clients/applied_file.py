"""The ``peers.yaml`` that peers have applied, for sources that follow a change of the fleet and for the next change."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from pathlib import Path

from ls_edge.core.errors import LinkError
from ls_edge.core.files import MAX_BYTES
from ls_edge.core.peers_file import PeersFile, parse_peers
from ls_edge.runtime.clients.session import STEP_S, Client, Session
from ls_edge.runtime.protocol.messages import MAX_CHUNK, Chunk, Want
from ls_edge.runtime.transport.keys import KeyPair

WITHIN_S = 10.0
"""Seconds to receive a file, which is small."""
REACH_S = 5.0
"""Seconds within which peers have to answer."""
_ASK_AGAIN_S = 1.0


def fetch_file(peers: PeersFile, keys: KeyPair | None, owner: str, digest: bytes, names: Collection[str]) -> bytes:
    """Ask one of the peers ``names``, as source ``owner``, for the file with this SHA-256; return its content.

    Raise :class:`LinkError` if none of them sends it.
    """
    raw = bytearray()
    session: Session | None = None
    asked_at = 0.0
    with Client(peers, keys, owner, "observer") as client:
        began = time.monotonic()
        while time.monotonic() < began + WITHIN_S:
            if all(one.is_hopeless(began) for name, one in client.sessions.items() if name in names):
                break
            there = [one for name, one in client.sessions.items() if name in names and one.up and one.welcome]
            if session not in there:
                session, raw, asked_at = (there[0] if there else None), bytearray(), 0.0
            if session is not None and time.monotonic() > asked_at + _ASK_AGAIN_S:
                asked_at = time.monotonic()
                client.send(session.peer.name, Want(digest, len(raw), MAX_CHUNK))
            for name, message in client.step(STEP_S):
                is_next = isinstance(message, Chunk) and message.digest == digest and message.offset == len(raw)
                if is_next and isinstance(message, Chunk) and session is not None and name == session.peer.name:
                    raw += message.data
                    asked_at = 0.0
                    if hashlib.sha256(raw).digest() == digest:
                        return bytes(raw)
                    if len(raw) > MAX_BYTES:
                        session, raw = None, bytearray()
    raise LinkError(f"none of {', '.join(sorted(names))} has sent the peers.yaml that it announces")


def running_file(peers: PeersFile, keys: KeyPair | None, owner: str) -> PeersFile | None:
    """Return the newest ``peers.yaml`` that a peer of a file runs; None if none was applied or nobody answers."""
    with Client(peers, keys, owner, "observer") as client:
        began = time.monotonic()
        client.wait_until(
            lambda: all(one.welcome is not None or one.is_hopeless(began) for one in client.sessions.values()), REACH_S
        )
        found = {
            name: one.welcome.files[0] for name, one in client.sessions.items() if one.welcome and one.welcome.files
        }
    newest = max(found.values(), key=lambda file: file.version, default=None)
    if newest is None or newest.digest == hashlib.sha256(peers.raw).digest():
        return None
    names = [name for name, file in found.items() if file == newest]
    return parsed_file(fetch_file(peers, keys, owner, newest.digest, names), newest.version)


def parsed_file(raw: bytes, version: int) -> PeersFile:
    """Parse an applied file; raise :class:`ConfigError` if it is not valid."""
    return parse_peers(raw, Path(f"peers.yaml of version {version}"))
