"""The manifest of the model that peers serve, for a source without a bundle."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LinkError
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.clients.session import STEP_S, Client, Session
from ls_edge.runtime.protocol.messages import MAX_CHUNK, MAX_MANIFEST, Chunk, Want
from ls_edge.runtime.transport.keys import KeyPair

log = logging.getLogger("ls_edge.runtime")

TELL_AFTER_S, TELL_EVERY_S = 1.0, 60.0
"""Seconds until a source without a model logs the reasons, first and repeatedly."""


@dataclass
class _Fetch:
    """The manifest of one peer, as far as it has arrived."""

    session: Session
    raw: bytearray = field(default_factory=bytearray)
    asked_at: float = float("-inf")
    bundle: Bundle | None = None
    fault: str = ""


def fetch_model(peers: PeersFile, keys: KeyPair | None, owner: str, wait_s: float = 5.0) -> Bundle:
    """Ask the peers, as source ``owner``, for the manifest; return a bundle of the first one that arrives.

    Raise :class:`LinkError` if no peer has sent one after ``wait_s``, in addition to the transfer on the slowest link,
    or if all refuse this process.
    """
    fetches: dict[str, _Fetch] = {}
    with Client(peers, keys, owner, "observer") as client:
        began = time.monotonic()
        tell_at = began + TELL_AFTER_S
        patience = peers.heartbeat.silence_ms(MAX_CHUNK) / 1e3  # a peer that stays silent for longer counts as lost
        while True:
            for name, message in client.step(STEP_S):
                if isinstance(message, Chunk) and name in fetches:
                    _take(fetches[name], name, message)
            now = time.monotonic()
            for name, session in client.sessions.items():
                _ask(client, name, session, fetches, now - patience)
            for fetch in fetches.values():
                if fetch.bundle is not None:
                    return fetch.bundle
            whys = "; ".join(f"{name}: {_why(name, session, fetches)}" for name, session in client.sessions.items())
            if now > tell_at:
                log.warning("waiting for a model", extra={"why": whys})
                tell_at = now + TELL_EVERY_S
            came_s = peers.heartbeat.transfer_s(sum(len(one.raw) for one in fetches.values()))
            are_final = all(one.has_refused for one in client.sessions.values())
            if now > began + wait_s + came_s or are_final:
                raise LinkError(
                    f"no peer of {peers.path} has sent the manifest of its model ({whys}); start a peer, or give "
                    "--bundle"
                )


def _ask(client: Client, name: str, session: Session, fetches: dict[str, _Fetch], before: float) -> None:
    """Ask a peer for the next bytes of its manifest, unless it was asked after the time ``before``."""
    welcome = session.welcome
    if not session.up or welcome is None or len(welcome.bundle_id) != 64:
        return
    if name not in fetches or fetches[name].session is not session:
        fetches[name] = _Fetch(session)
    fetch = fetches[name]
    if fetch.bundle is None and not fetch.fault and fetch.asked_at <= before:
        fetch.asked_at = time.monotonic()
        client.send(name, Want(bytes.fromhex(welcome.bundle_id), len(fetch.raw), MAX_CHUNK))


def _take(fetch: _Fetch, name: str, chunk: Chunk) -> None:
    welcome = fetch.session.welcome
    if welcome is None or fetch.bundle is not None or chunk.offset != len(fetch.raw):
        return
    fetch.raw += chunk.data
    fetch.asked_at = float("-inf")
    if len(fetch.raw) > MAX_MANIFEST:
        fetch.fault = f"its manifest has more than {MAX_MANIFEST} bytes"
    elif len(chunk.data) < MAX_CHUNK:
        try:
            fetch.bundle = Bundle.of_manifest(Path(f"the bundle of {name}"), bytes(fetch.raw))
        except BundleError as error:
            fetch.fault = str(error)
            return
        manifest = fetch.bundle.manifest
        if (manifest.bundle_id, manifest.model_id) != (welcome.bundle_id, welcome.model_id):
            fetch.bundle, fetch.fault = None, "its manifest belongs to another bundle than it announces"


def _why(name: str, session: Session, fetches: dict[str, _Fetch]) -> str:
    fault = fetches[name].fault if name in fetches else ""
    return fault or session.judge()[1] or "it sends no manifest; is its version older?"
