"""The manifest of the model that peers serve, for a source without a bundle.

Its ids confirm that it is complete, but not that it is true: a dishonest peer could swap the names of classes. So two
peers are asked if there are two, and have to agree.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from ls_edge.core.bundle import Bundle, digest_of
from ls_edge.core.errors import BundleError, LinkError, ModelMismatch
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import short_id
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


def fetch_model(
    peers: PeersFile, keys: KeyPair | None, owner: str, wait_s: float = 5.0, *, one_bundle: bool = False
) -> tuple[Bundle, tuple[str, ...]]:
    """Ask the peers, as source ``owner``, for the manifest; return a bundle of it alone and the peers that sent it.

    With ``one_bundle``, ask all that answer. Raise :class:`LinkError` if no peer has sent one after ``wait_s``, in
    addition to the transfer on the slowest link, or if all refuse this process; and :class:`ModelMismatch` if two peers
    disagree, or have different bundles where there is to be one.
    """
    fetches: dict[str, _Fetch] = {}
    with Client(peers, keys, owner, "observer") as client:
        began = time.monotonic()
        first_at, tell_at = float("inf"), began + TELL_AFTER_S
        patience = peers.heartbeat.silence_ms(MAX_CHUNK) / 1e3  # a peer that stays silent for longer counts as lost
        while True:
            for name, message in client.step(STEP_S):
                if isinstance(message, Chunk) and name in fetches:
                    _take(fetches[name], name, message)
            now = time.monotonic()
            for name, session in client.sessions.items():
                _ask(client, name, session, fetches, now - patience)
            asked = ((name, fetches[name].bundle) for name in client.sessions if name in fetches)
            found = {name: bundle for name, bundle in asked if bundle is not None}
            first_at = min(first_at, now) if found else first_at
            is_alone = all(one.is_hopeless(began) for name, one in client.sessions.items() if name not in found)
            enough = len(found) >= 2 and not one_bundle
            if enough or (found and (is_alone or now > first_at + patience)):
                return _agreed(found, one_bundle=one_bundle)
            whys = "; ".join(f"{name}: {_why(name, session, fetches)}" for name, session in client.sessions.items())
            if not found and now > tell_at:
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


def _agreed(found: dict[str, Bundle], *, one_bundle: bool) -> tuple[Bundle, tuple[str, ...]]:
    digests = {name: _digest(bundle) for name, bundle in found.items()}
    if len(set(digests.values())) > 1:
        texts = ", ".join(f"{name} has {short_id(digest)}" for name, digest in digests.items())
        raise ModelMismatch(f"the peers do not agree on the model and its classes: {texts}; give --bundle to trust one")
    bundles = {name: bundle.manifest.bundle_id for name, bundle in found.items()}
    if one_bundle and len(set(bundles.values())) > 1:
        texts = ", ".join(f"{name} has {short_id(bundle_id)}" for name, bundle_id in bundles.items())
        raise ModelMismatch(
            f"the peers serve several bundles of the model and --strict-bundle is on: {texts}; give --bundle to choose "
            "one, push one to all peers, or omit --strict-bundle"
        )
    return next(iter(found.values())), tuple(found)


def _digest(bundle: Bundle) -> str:
    """Return a digest of the parts of a manifest that are equal in all bundles of a model."""
    return digest_of({"model": bundle.manifest.model_id, "interface": bundle.interface})


def _why(name: str, session: Session, fetches: dict[str, _Fetch]) -> str:
    fault = fetches[name].fault if name in fetches else ""
    return fault or session.judge()[1] or "it sends no manifest; is its version older?"
