"""Listening sockets of ``--http`` and ``--metrics``."""

from __future__ import annotations

import os
import re
import socket

from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import is_ipv6

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]/@\s]+):(\d{1,5})", re.ASCII)


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, with IPv6 in brackets; raise :class:`UsageError` that names the flag."""
    match = _ADDRESS.fullmatch(text)
    host, port = (match[1].strip("[]"), int(match[2])) if match is not None else ("", -1)
    if match is None or port > 65535 or (match[1].startswith("[") and not is_ipv6(host)):
        raise UsageError(
            f"{flag} {text!r} is not HOST:PORT; give, for example, 127.0.0.1:9100 or [::1]:9100; port 0 is any free one"
        )
    return host, port


def open_listener(text: str, flag: str) -> socket.socket:
    """Listen on ``HOST:PORT``; connections wait until a server accepts them. Errors name the flag."""
    host, port = parse_address(text, flag)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such name"
        raise UsageError(f"{flag} {text!r}: {host} is not found ({why}); give an address of this machine") from None
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise LinkError(f"{flag} {text}: cannot listen ({why}); free the port, or give another") from None


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
