"""Files that peers send piece by piece: the manifest of their model, and the ``peers.yaml`` that they have applied."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection
from pathlib import Path

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LinkError
from ls_edge.core.peers_file import PeersFile, parse_peers
from ls_edge.runtime.clients.session import REACH_S, STEP_S, Client, Session
from ls_edge.runtime.protocol.messages import MAX_CHUNK, FileVersion
from ls_edge.runtime.transport.keys import KeyPair

log = logging.getLogger("ls_edge.runtime")

WITHIN_S = 10.0
"""Seconds to receive a ``peers.yaml``, which is small."""
TELL_AFTER_S, TELL_EVERY_S = 1.0, 60.0
"""Seconds until a source without a model logs the reasons, first and repeatedly."""
_ASK_AGAIN_S = 1.0


def fetch_file(
    peers: PeersFile, keys: KeyPair | None, owner: str, file: FileVersion, names: Collection[str]
) -> PeersFile:
    """Ask one of the peers ``names``, as source ``owner``, for an applied file.

    Raise :class:`LinkError` if none of them sends it, and :class:`ConfigError` if it is not valid.
    """
    with Client(peers, keys, owner, "observer") as client:
        began = time.monotonic()
        while time.monotonic() < began + WITHIN_S:
            client.step(STEP_S)
            holders = [one for name, one in client.sessions.items() if name in names]
            for session in [one for one in holders if one.up and one.welcome]:
                client.fetch(session, file.digest, _ASK_AGAIN_S)
                if hashlib.sha256(session.fetched).digest() == file.digest:
                    return parse_peers(bytes(session.fetched), Path(f"peers.yaml of version {file.version}"))
            if all(one.is_hopeless(began) for one in holders):
                break
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
    return fetch_file(peers, keys, owner, newest, names)


def fetch_model(peers: PeersFile, keys: KeyPair | None, owner: str, wait_s: float = 5.0) -> Bundle:
    """Ask the peers, as source ``owner``, for the manifest; return a bundle of the first one that arrives.

    Raise :class:`LinkError` if no peer has sent one after ``wait_s``, in addition to the transfer on the slowest link,
    or if all refuse this process.
    """
    with Client(peers, keys, owner, "observer") as client:
        began = time.monotonic()
        tell_at = began + TELL_AFTER_S
        patience = peers.heartbeat.silence_ms(MAX_CHUNK) / 1e3
        while True:
            client.step(STEP_S)
            whys = []
            for name, session in client.sessions.items():
                found = _model_of(client, session, patience)
                if isinstance(found, Bundle):
                    return found
                whys.append(f"{name}: {found}")
            now = time.monotonic()
            if now > tell_at:
                log.warning("waiting for a model", extra={"why": "; ".join(whys)})
                tell_at = now + TELL_EVERY_S
            came_s = peers.heartbeat.transfer_s(sum(len(one.fetched) for one in client.sessions.values()))
            if now > began + wait_s + came_s or all(one.has_refused for one in client.sessions.values()):
                raise LinkError(
                    f"no peer of {peers.path} has sent the manifest of its model ({'; '.join(whys)}); start a peer, or "
                    "give --bundle"
                )


def _model_of(client: Client, session: Session, patience: float) -> Bundle | str:
    """Return the model of a peer, or why it is missing; ask for the next piece of its manifest."""
    welcome = session.welcome
    if session.up and welcome is not None and len(welcome.bundle_id) == 64:
        if len(session.fetched) % MAX_CHUNK:  # only the last piece is shorter
            try:
                return Bundle.of_manifest(Path(f"the bundle of {session.peer.name}"), bytes(session.fetched))
            except BundleError as error:
                return str(error)
        client.fetch(session, bytes.fromhex(welcome.bundle_id), patience)
    return session.judge()[1] or "it sends no manifest; is its version older?"
