"""Authentication of links by the CURVE keys in ``peers.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import zmq
import zmq.utils.z85

from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.logs import LoggedCounts
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.protocol.messages import may_be_called
from ls_edge.runtime.transport.keys import KeyPair, load_secret

MAX_ADDRESSES = 1024
"""Limit on addresses whose refusals are counted separately."""
_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class Curve:
    """Key pair of this process, public keys of peers, and owners of the keys that may dial."""

    keys: KeyPair
    peer_keys: Mapping[str, bytes]
    names_by_key: Mapping[bytes, str]


class ZapHandler:
    """ZAP handler (RFC 27), which authenticates incoming CURVE connections of this process.

    A client whose public key is in ``peers.yaml`` is admitted under the name of the owner, which its messages then have
    as ``User-Id``. Other clients are refused, counted, and logged with their address. The caller polls :attr:`socket`
    and calls :meth:`answer`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], names_by_key: Mapping[bytes, str]) -> None:
        """Admit the keys of ``names_by_key``, which maps public keys in Z85 to names in ``peers.yaml``."""
        self.refused = LoggedCounts()
        """Number of refusals by address; ``""`` counts all addresses after the first :data:`MAX_ADDRESSES`."""
        self.change(names_by_key)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def change(self, names_by_key: Mapping[bytes, str]) -> None:
        """Admit these keys from now on; existing connections stay."""
        self._names = {zmq.utils.z85.decode(key): name for key, name in names_by_key.items()}

    def answer(self) -> None:
        """Answer one request."""
        frames = self.socket.recv_multipart()
        request_id = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) >= 7 and frames[0] == b"1.0" and frames[5] == b"CURVE":
            name = self._names.get(frames[6])
        address = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
        if name is None:
            if address not in self.refused and len(self.refused) >= MAX_ADDRESSES:
                address = ""
            why = "its key is not in peers.yaml"
            self.refused.note(address, "refused a connection", address=address or "others", why=why)
            self.socket.send_multipart([b"1.0", request_id, b"400", b"key not in peers.yaml", b"", b""])
        else:
            self.socket.send_multipart([b"1.0", request_id, b"200", b"OK", name.encode(), b""])


def curve_of(peers: PeersFile, name: str, keys: KeyPair | None) -> Curve | None:
    """Return the keys for the links of the process ``name``, or None if the file has no keys.

    Raise :class:`UsageError` without a key pair, and :class:`LinkError` if the pair belongs to another process.
    """
    if not peers.uses_keys:
        return None
    if keys is None:
        raise UsageError(
            f"{peers.path} has keys, so {name} needs its own: give --secret-key {name}.key_secret "
            f"(made by 'ls-edge keys new {name}')"
        )
    peer_keys = {p.name: p.public_key.encode() for p in peers.peers if p.public_key}
    names = {key: peer for peer, key in peer_keys.items()}
    names |= {s.public_key.encode(): s.name for s in peers.sources if s.public_key}
    owner = names.get(keys.public)
    if owner is None or not may_be_called(owner, name):
        belongs = f"belongs to {owner!r}" if owner else "is not in the file"
        raise LinkError(
            f"the secret key does not belong to {name!r}: its public key {belongs}; check --secret-key and {peers.path}"
        )
    return Curve(keys, peer_keys, names)


def read_again(peers: PeersFile, keys: KeyPair | None, name: str) -> tuple[PeersFile, KeyPair | None]:
    """Read ``peers.yaml`` and the key pair of the process ``name`` again, with the same errors as the first time."""
    peers = load_peers(peers.path)
    if keys is not None and keys.path is not None:
        keys = load_secret(keys.path)
    peers.check_codecs(codec_of)
    curve_of(peers, name, keys)
    return peers, keys
