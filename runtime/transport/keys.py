"""CURVE keys of a fleet, in the certificate files of ``zmq.auth``.

``NAME.key`` has the public key, ``NAME.key_secret`` both keys. The secret file is created with mode 0600, and refused
if other users may read it. Keys are not encrypted, so a copy of the disk contains them.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import check_name

_KEY = rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_LINE = re.compile(rb"^[ \t]*(public|secret)-key[ \t]*=[ \t]*[\"']?(" + _KEY + rb")[\"']?[ \t\r]*$", re.M)


@dataclass(frozen=True)
class KeyPair:
    """CURVE key pair, each key as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    path: Path | None = field(default=None, repr=False, compare=False)
    """File from which the pair was read."""


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
            raise UsageError(f"{path} exists and is not overwritten; choose another --out, or remove it first")
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
    except OSError as error:
        given = os.fsencode(path)
        if _LINE.search(given) or re.fullmatch(_KEY, given.strip(b" \t\r\n\"'")):  # a log would keep it
            raise UsageError("--secret-key looks like a key and is no file; give the path of NAME.key_secret") from None
        if isinstance(error, FileNotFoundError):
            hint = "make one with 'ls-edge keys new NAME', or check --secret-key"
            raise UsageError(f"{path}: no such secret key; {hint}") from None
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
    return KeyPair(public, keys[b"secret"], Path(path))


def _create(path: Path, mode: int, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
