"""Access to ``ls-edge serve``: bearer tokens, ``Host`` and ``Origin``, and client addresses."""

from __future__ import annotations

import contextlib
import hmac
import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from ls_edge.core.errors import UsageError
from ls_edge.core.files import read_file
from ls_edge.core.peers_file import is_loopback_host
from ls_edge.runtime.serve.http.replies import Refusal

MIN_TOKEN = 16
"""Minimum length of a token, in characters."""
OPEN_PATHS = ("/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Paths without a token: health for load balancers and probes, and the page, which has no data and asks for a token."""
_ALLOWED = "Authorization, Content-Type"
_EXPOSED = "Inference-Header-Content-Length, Retry-After, X-Request-ID, traceparent"
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?", re.ASCII)
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?", re.ASCII)


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """Return the tokens of ``--token-file``, one a line; ignore empty lines and lines that begin with ``#``."""
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
    """Checks of requests by their headers."""

    def __init__(
        self,
        token_file: Path | None = None,
        *,
        loopback_only: bool,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        proxies: Sequence[str] = (),
    ) -> None:
        """With ``loopback_only`` and without tokens, refuse host names other than ``hosts`` and those of the loopback.

        A page in a browser on this machine can point its own host name at 127.0.0.1 (DNS rebinding). Pages of
        ``origins`` may use this server in a browser. ``proxies`` are addresses or networks whose
        ``X-Forwarded-For`` is trusted.
        """
        self._token_file = token_file
        self._tokens: tuple[bytes, ...] = ()
        self.reload()
        self._loopback_only = loopback_only and token_file is None
        self._hosts = frozenset(host.lower() for host in hosts)
        for host in self._hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(f"--allow-host {host!r} is not a host name; give one without port: edge.example")
        self._origins = frozenset(origins)
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors {origin!r} is not an origin; give scheme and host: https://app.example")
        self._proxies = [_network(proxy) for proxy in proxies]

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
            if address != host.lower() and name not in self._hosts and origin not in self._origins:
                raise Refusal(403, "requests from pages of another site are not allowed; see --allow-host and --cors")
        if self._tokens and request.path not in OPEN_PATHS and not self._is_known(headers.get("Authorization", "")):
            raise Refusal(401, "send a token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})

    def headers_for(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let pages of another site read a response."""
        if origin not in self._origins:
            return {"Vary": "Origin"} if self._origins else {}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",  # for a proxy's cookies; this server has none
            "Access-Control-Expose-Headers": _EXPOSED,
        }

    def preflight_of(self, request: web.BaseRequest) -> web.Response | None:
        """Return the response to a CORS preflight request; None for any other request."""
        if request.method != "OPTIONS" or request.headers.get("Origin") not in self._origins:
            return None
        asked = request.headers.get("Access-Control-Request-Headers")
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST",
            # Any header: libraries of pages add their own, such as tracestate, Cache-Control, X-Requested-With.
            "Access-Control-Allow-Headers": _ALLOWED if asked is None else f"{_ALLOWED}, {asked}",
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)

    def client_of(self, request: web.BaseRequest) -> str:
        """Return the address of a client: the last address on the path that is not a trusted proxy."""
        client = request.remote or ""
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", ()))
        with contextlib.suppress(ValueError):  # not an address
            for entry in reversed(forwarded.split(",")):
                address = _address(client)
                if not any(address in network for network in self._proxies):
                    break
                client = str(_address(entry.strip()))
        return client

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


def _address(text: str) -> IPv4Address | IPv6Address:
    """Return the address of an entry of ``X-Forwarded-For``, to which some proxies add a port."""
    address = ip_address(re.sub(r"^([\d.]+\.\d+):\d+$|^\[(.*)\](:\d+)?$", r"\1\2", text))
    return getattr(address, "ipv4_mapped", None) or address


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise UsageError(
            f"--trusted-proxy {text!r} is not an address; give, for example, 10.0.0.1 or 10.0.0.0/8"
        ) from None
