"""Access to ``ls-edge serve``: bearer tokens, and the hosts and pages that browsers name."""

from __future__ import annotations

import hmac
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from ls_edge.core.errors import UsageError
from ls_edge.core.files import read_file
from ls_edge.core.peers_file import is_loopback_host

MIN_TOKEN = 16
"""Least length of a token, in characters."""
OPEN_PATHS = ("/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Paths without a token: health for load balancers and probes, and the page, which has no data and asks for one."""


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """Return the tokens of ``--token-file``, one a line; lines that are empty or begin with ``#`` are left out."""
    try:
        lines = [line.strip() for line in read_file(path, 1 << 16).decode("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise UsageError(f"--token-file {path} cannot be read ({why}); give a file with one token a line") from None
    tokens = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not tokens or min(map(len, tokens)) < MIN_TOKEN or any(b" " in token for token in tokens):
        raise UsageError(
            f"--token-file {path} must have one token a line, each of at least {MIN_TOKEN} characters without spaces; "
            "make one with: openssl rand -hex 32"
        )
    return tokens


class Access:
    """Decides about requests by their headers."""

    def __init__(self, tokens: tuple[bytes, ...], *, loopback_only: bool) -> None:
        """``loopback_only`` refuses other names of the host, unless there are tokens.

        A page that a browser of this machine shows can point its own host name at 127.0.0.1 (DNS rebinding).
        """
        self._tokens = tokens
        self._loopback_only = loopback_only and not tokens

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise :class:`HTTPException` for a request that is not allowed."""
        host = headers.get("host", "")
        if self._loopback_only and host and not is_loopback_host(_host_of(host)):
            raise HTTPException(
                403, "this server answers only requests to its loopback address; behind a proxy, use --token-file"
            )
        origin = headers.get("origin")
        if method == "POST" and origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise HTTPException(403, "requests from pages of another site are not allowed")
        if self._tokens and path not in OPEN_PATHS and not self._is_known(headers.get("authorization", "")):
            raise HTTPException(401, "send a token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        token = given.strip().encode("utf-8", "replace")
        # All are compared, in constant time each.
        found = [hmac.compare_digest(token, known) for known in self._tokens]
        return scheme.lower() == "bearer" and any(found)


def _host_of(value: str) -> str:
    """Return the name in a ``Host`` header."""
    try:
        return urlsplit(f"//{value}").hostname or ""
    except ValueError:
        return ""
