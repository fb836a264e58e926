"""Access to ``ls-edge serve``: bearer tokens, ``Host`` and ``Origin``."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from ls_edge.core.errors import UsageError
from ls_edge.core.files import read_file
from ls_edge.core.peers_file import is_loopback_host
from ls_edge.runtime.serve.replies import Refusal

MIN_TOKEN = 16
"""Minimum length of a token, in characters."""
OPEN_PATHS = ("/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Paths without a token: health for load balancers and probes, and the page, which has no data and asks for a token."""
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?", re.ASCII)


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """Return the tokens of ``--token-file``, one a line; ignore empty lines and lines that begin with ``#``."""
    try:
        lines = [line.strip() for line in read_file(path, 1 << 16).decode("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII text"
        # A token given instead of its file is not shown: a log would keep it.
        is_path = len(str(path)) < MIN_TOKEN or (len(path.parent.parts) > 1 and os.path.isdir(path.parent))
        shown = f" {path}" if is_path else ", whose value may be a token itself,"
        raise UsageError(f"--token-file{shown} cannot be read ({why}); give a file with one token a line") from None
    tokens = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not tokens or min(map(len, tokens)) < MIN_TOKEN or any(b" " in token for token in tokens):
        raise UsageError(
            f"--token-file {path} must have one token a line, each of at least {MIN_TOKEN} characters without spaces; "
            "make one with: openssl rand -hex 32"
        )
    return tokens


class Access:
    """Checks of requests by their headers."""

    def __init__(
        self,
        token_file: Path | None = None,
        *,
        loopback_only: bool,
        hosts: Sequence[str] = (),
    ) -> None:
        """With ``loopback_only`` and without tokens, refuse host names other than ``hosts`` and those of the loopback.

        A page in a browser on this machine can point its own host name at 127.0.0.1 (DNS rebinding).
        """
        self._token_file = token_file
        self._tokens: tuple[bytes, ...] = ()
        self.reload()
        self._loopback_only = loopback_only and token_file is None
        self._hosts = frozenset(host.lower() for host in hosts)
        for host in self._hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(f"--allow-host {host!r} is not a host name; give one without port: edge.example")

    def reload(self) -> None:
        """Read the token file again; raise :class:`UsageError` and keep the tokens if it cannot be used."""
        if self._token_file is not None:
            self._tokens = read_tokens(self._token_file)

    def check(self, request: web.BaseRequest) -> None:
        """Raise :class:`Refusal` for a request that is not allowed."""
        headers = request.headers
        host = headers.get("Host", "")
        name = _split(f"//{host}")[1].removesuffix(".")
        is_loopback = is_loopback_host(name) or name.endswith(".localhost")  # RFC 6761
        if self._loopback_only and host and name not in self._hosts and not is_loopback:
            raise Refusal(
                403, "this server does not accept that host name; behind a proxy, use --allow-host or --token-file"
            )
        origin = headers.get("Origin")
        if request.method == "POST" and origin is not None:
            address, name = _split(origin)
            if address != host.lower() and name not in self._hosts:
                raise Refusal(403, "requests from pages of another site are not allowed; see --allow-host")
        if self._tokens and request.path not in OPEN_PATHS and not self._is_known(headers.get("Authorization", "")):
            raise Refusal(401, "send a token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        token = given.strip().encode("utf-8", "replace")
        # Compare with every token in constant time, so that the timing does not tell which one matched.
        found = [hmac.compare_digest(token, known) for known in self._tokens]
        return scheme.lower() == "bearer" and any(found)


def _split(url: str) -> tuple[str, str]:
    """Return host and port, and the host alone, in lower case; empty if they cannot be read."""
    try:
        parts = urlsplit(url)
        return parts.netloc.lower(), parts.hostname or ""
    except ValueError:
        return "", ""
