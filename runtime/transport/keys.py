"""CURVE keys of a fleet, in the certificate files of ``zmq.auth``, and authentication with them.

``NAME.key`` has the public key, ``NAME.key_secret`` both keys. The secret file is created with mode 0600, and refused
if other users may read it. Keys are not encrypted, so a copy of the disk contains them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85

from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.logs import LoggedCounts
from ls_edge.core.peers_file import PeersFile, check_name, load_peers
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.transport.admission import may_be_called

MAX_ADDRESSES = 1024
"""Limit on addresses whose refusals are counted separately."""
_ENDPOINT = "inproc://zeromq.zap.01"
_LINE = re.compile(rb"^\s*(public|secret)-key\s*=\s*[\"']?([0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})[\"']?\s*$", re.M)


@dataclass(frozen=True)
class KeyPair:
    """CURVE key pair, each key as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    path: Path | None = field(default=None, repr=False, compare=False)
    """File from which the pair was read."""


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
    peers.check_codecs(CODECS)
    curve_of(peers, name, keys)
    return peers, keys


def require_curve() -> None:
    """Raise :class:`LinkError` if libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise LinkError(
            f"libzmq {zmq.zmq_version()} was built without CURVE (libsodium), so links cannot be encrypted; "
            "install pyzmq from its wheel: pip install --force-reinstall --only-binary pyzmq pyzmq"
        )


def new_keys(name: str, folder: str | Path = ".") -> tuple[KeyPair, Path, Path]:
    """Make a key pair, write ``NAME.key`` and ``NAME.key_secret``, and return the pair and both paths.

    Raise :class:`UsageError` if one of the files exists, or the folder cannot be written.
    """
    check_name(name)
    require_curve()
    folder = Path(folder)
    public_path, secret_path = folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in (public_path, secret_path):
        if path.is_symlink() or path.exists():
            raise UsageError(f"{path} exists and is not overwritten; choose another name, or remove it first")
    pair = KeyPair(*zmq.curve_keypair())
    public = f'    public-key = "{pair.public.decode()}"\n'
    secret = f'    secret-key = "{pair.secret.decode()}"\n'
    head = "# CURVE {} of ls-edge\nmetadata\n    name = " + name + "\ncurve\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _create(secret_path, 0o600, head.format("secret key: keep it on this machine") + public + secret)
        try:
            _create(public_path, 0o644, head.format("public key") + public)
        except OSError:
            secret_path.unlink()  # half a pair is useless and would prevent another attempt
            raise
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or folder}: {error.strerror}; choose another --out") from None
    return pair, public_path, secret_path


def load_secret(path: str | Path) -> KeyPair:
    """Read ``NAME.key_secret``; raise :class:`UsageError` if it is missing, readable by others, or not a key."""
    require_curve()
    try:
        with Path(path).open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(65536)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such secret key; make one with 'ls-edge keys new NAME', or check --secret-key"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read the secret key {path}: {error.strerror}; check --secret-key") from None
    keys = {match[1]: match[2] for match in _LINE.finditer(content)}
    if b"secret" not in keys:
        hint = "it is a public key, give the .key_secret" if b"public" in keys else "make one with 'ls-edge keys new'"
        raise UsageError(f"{path} holds no CURVE secret key; {hint}")
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}")
    try:
        public = zmq.curve_public(keys[b"secret"])
    except zmq.ZMQError:
        raise UsageError(f"{path} holds a secret key that is not valid Z85; make one with 'ls-edge keys new'") from None
    if keys.get(b"public", public) != public:
        raise UsageError(f"{path}: its public and secret key do not belong together; make new ones")
    return KeyPair(public, keys[b"secret"], Path(path))


def _create(path: Path, mode: int, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
