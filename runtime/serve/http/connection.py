"""HTTP connection: time limits for its client, around aiohttp's protocol.

aiohttp parses requests, sends responses, and limits lines, headers and pipelines. But it waits indefinitely for a
client that does not read, closes an idle connection even if a request has begun, and drops a client that closes only
its own side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import HttpVersion11, web

IDLE_S = 75.0
"""Maximum time between two requests, in seconds; proxies keep connections for 60 s."""
RECEIVE_S = 60.0
"""Maximum time to receive a header, to receive a body, or to wait for a client to read a response, in seconds."""
HANDSHAKE_S = 10.0
"""Maximum time of a TLS handshake, in seconds."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 72\r\n\r\n"
    b'{"error": "the header of the request was not complete; send it faster"}\n'
)
_LAST_S = 0.25
"""Time for a received request to begin before a connection that accepts no further ones is closed, in seconds."""
_CLOSE_S = 0.5
"""Time for a client to confirm the end of a TLS connection, in seconds; asyncio waits for 30 s."""
_PROBE_S = 0.05
"""Time until a client that has closed its side is checked again, in seconds; doubled after each check."""


@dataclass(eq=False)
class Connections:
    """Connections of a server, the least recently used first, and their limits."""

    most: int
    idle_s: float = IDLE_S
    receive_s: float = RECEIVE_S
    handshake_s: float = HANDSHAKE_S
    open: dict[Connection | Handshake, None] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection ends."""

    def add(self, connection: Connection | Handshake) -> bool:
        """Add a connection, if necessary in place of an idle one; return False at the limit."""
        if len(self.open) >= self.most and (idle := next((one for one in self.open if one.is_idle), None)):
            idle.abort()
        has_place = len(self.open) < self.most
        if has_place:
            self.open[connection] = None
        return has_place

    def remove(self, connection: Connection | Handshake) -> None:
        """Remove a connection that has ended."""
        self.open.pop(connection, None)
        self.changed.set()


class Handshake(asyncio.Protocol):
    """Connection during its TLS handshake; asyncio's own TLS server reports a connection only afterwards."""

    is_idle = True

    def __init__(self, connect: Callable[[], Connection], connections: Connections, tls: ssl.SSLContext) -> None:
        """Hand the connection to the protocol that ``connect`` returns."""
        self._connect, self._connections, self._tls = connect, connections, tls
        self._early = b""
        """Data that came with the end of the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, or close the connection if there are too many."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._connections.add(self):
            self._task = asyncio.create_task(self._agree())
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Keep bytes for the connection."""
        self._early += data

    def abort(self) -> None:
        """Close the connection immediately."""
        self._connections.remove(self)
        self._transport.abort()

    end_after_requests = abort

    async def _agree(self) -> None:
        start_tls, seconds = asyncio.get_running_loop().start_tls, self._connections.handshake_s
        transport = None
        with contextlib.suppress(OSError):
            transport = await start_tls(
                self._transport, self, self._tls, server_side=True, ssl_handshake_timeout=seconds
            )
        if transport is None or self not in self._connections.open:  # ended by the client or by abort
            self.abort()
            return
        self._connections.remove(self)
        connection = self._connect()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._early:
            connection.data_received(self._early)


class Connection(asyncio.Protocol):
    """Connection that passes every event to aiohttp's protocol; the application reports when requests begin and end."""

    def __init__(self, http: asyncio.Protocol, connections: Connections) -> None:
        self._http = http
        self._connections = connections
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        """Whether part of a header has been received."""
        self._request: web.BaseRequest | None = None
        """Request that the application is answering."""
        self._has_response_begun = False
        self._is_paused = False
        """Whether the client does not read."""
        self._is_last = False
        """Whether the connection accepts no further requests."""
        self._is_half_closed = False
        self._is_whole = True
        """Whether the latest request was received completely; otherwise the rest of its body comes next."""
        self._body = 0
        """Bytes received after the header of the latest request."""

    # What the application calls.

    def begin(self, request: web.BaseRequest) -> None:
        """Record that the application begins to answer a request."""
        self._request, self._has_begun, self._has_response_begun = request, False, False
        self._set_timer()
        self._probe_later()

    def respond(self) -> None:
        """Record that the response begins."""
        self._has_response_begun = True

    def end(self) -> bool:
        """Record that the request is answered; return whether another one may follow."""
        request, self._request = self._request, None
        self._is_whole = request is not None and request.content.is_eof()
        # aiohttp ignores an upgrade, and drops what it has read together with the end of such a request.
        is_alone = request is None or "Upgrade" not in request.headers or self._body == (request.content_length or 0)
        if self in self._connections.open:
            self._connections.open[self] = self._connections.open.pop(self)  # now the most recently used
        self._set_timer()
        return self._is_whole and is_alone

    # What the server calls.

    @property
    def is_idle(self) -> bool:
        """Whether the client has no request here."""
        return self._request is None and not self._has_begun

    def end_after_requests(self) -> None:
        """Close the connection once all received requests are answered."""
        self._is_last = True
        self._set_timer()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._connections.remove(self)
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass a new connection on, or close it if there are too many."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._connections.add(self):
            self._http = asyncio.Protocol()  # which does nothing
            transport.abort()
            return
        transport.set_write_buffer_limits(1, 0)  # so that pause_writing reports every client that does not read
        self._http.connection_made(transport)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection; aiohttp cancels its request."""
        self._stop_timer()
        self._request = None
        self._connections.remove(self)
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; the time limit of a header starts with its first byte."""
        if self.is_idle and self._is_whole:
            self._has_begun, self._body = True, -len(data.partition(b"\r\n\r\n")[0]) - 4
            self._set_timer()
        self._body += len(data)
        self._http.data_received(data)

    def eof_received(self) -> bool:
        """Keep the connection open, since its client may still read; asyncio cannot do so with TLS."""
        if self._transport.get_extra_info("sslcontext") is not None:
            return False
        self._is_half_closed = True
        self.end_after_requests()
        self._probe_later()
        return True

    def pause_writing(self) -> None:
        """Limit the time until the client has read."""
        self._http.pause_writing()
        self._is_paused = True
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._connections.receive_s, self.abort)

    def resume_writing(self) -> None:
        """Continue after the client has read."""
        self._is_paused = False
        self._set_timer()
        self._http.resume_writing()

    # Timers.

    def _set_timer(self) -> None:
        if self._is_paused:  # that timer runs
            return
        self._stop_timer()
        limits = self._connections
        if self._request is None:
            seconds = _LAST_S if self._is_last else limits.receive_s if self._has_begun else limits.idle_s
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        if self._has_begun:
            self._transport.write(_TOO_SLOW)
        self._transport.close()
        self._timer = asyncio.get_running_loop().call_later(_CLOSE_S, self.abort)

    def _probe_later(self, seconds: float = _PROBE_S) -> None:
        if self._is_half_closed:
            asyncio.get_running_loop().call_later(seconds, self._probe, self._request, seconds)

    def _probe(self, request: web.BaseRequest | None, seconds: float) -> None:
        """Check whether a client that has closed its side still reads; if not, the system resets the connection.

        Only sending data shows that: an interim response, which clients ignore.
        """
        if request is None or request is not self._request or self._has_response_begun:
            return
        if not request.content.is_eof():  # the rest of the body will not come
            self._transport.close()
        elif request.version == HttpVersion11:
            self._transport.write(CONTINUE)
            self._probe_later(2 * seconds)
