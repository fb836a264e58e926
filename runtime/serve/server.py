"""HTTP server of ``ls-edge serve``: uvicorn on a thread of its own, with limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ls_edge.core.errors import UsageError
from ls_edge.device.worker import introduce_thread
from ls_edge.runtime.peer.cores import EngineCores
from ls_edge.runtime.serve.listener import url_of

MAX_HTTP_HEADER = 16 << 10
"""Limit of the first line and the header of a request, in bytes."""
MAX_IDLE_CONNECTIONS = 64
"""Connections in addition to those whose images are being answered."""
MAX_PIPELINED = 8
"""Limit of requests on a connection that wait for the response to the one before."""
RECEIVE_S = 60.0
"""Time for a connection to deliver a whole request, in seconds."""
_END_S = 1.0
"""Time for the thread to end, in seconds."""


class HttpServer:
    """Server of an ASGI application, started by the constructor; a context manager."""

    def __init__(
        self,
        listener: socket.socket,
        application: ASGIApp,
        *,
        max_connections: int,
        receive_s: float = RECEIVE_S,
        tls: tuple[Path, Path] | None = None,
        cores: EngineCores | None = None,
    ) -> None:
        """Serve on a listening socket and take ownership of it.

        ``receive_s`` limits the time without a whole request, ``tls`` is a certificate and its key. The thread stays
        off ``cores``, those of the engine.
        """
        self.url = url_of(listener, "https" if tls else "http")
        # Any client can make uvicorn log; what matters is answered or counted.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)
        certificate, key = tls or (None, None)
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                http=_Connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=max_connections + 1,  # never met: _Connection closes those beyond
                timeout_keep_alive=receive_s,  # type: ignore[arg-type]  # asyncio takes fractions
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        with (cores or EngineCores()).others():  # where the threads that are started here stay
            self._thread = threading.Thread(target=self._run, name="http", daemon=True)
            self._thread.start()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether connections are served: False after :meth:`close` and after an internal error."""
        return self._thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Accept no more connections and wait until all responses are sent; return False after ``timeout`` s."""
        self._server.should_exit = True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End all connections and the thread."""
        self._server.should_exit = self._server.force_exit = True
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._abort)
        self._thread.join(_END_S)

    def _abort(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _run(self) -> None:
        introduce_thread("http")
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])


class _OneWrite:
    """Transport that sends what is written in a turn of the loop at once: a client wakes up once for a response."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits for clients that are slow or send too much.

    uvicorn itself limits only the idle time between requests, and httptools nothing.
    """

    _late: asyncio.TimerHandle | None = None
    _unparsed = 0
    """Bytes that were received and are not yet a whole header or a part of a body."""
    _running: RequestResponseCycle | None = None
    """Latest request whose answer has begun; ``cycle`` is the latest of all, and may wait for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a connection; close it if there are too many."""
        self._output = _OneWrite(transport, self.loop)
        super().connection_made(self._output)  # type: ignore[arg-type]
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.abort()
        else:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection, and tell the request that is being answered."""
        self._cancel_timer()
        super().connection_lost(exc)
        if self._running is not None and self._running is not self.cycle:  # uvicorn tells only the latest
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HTTP_HEADER and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")
        self._set_timer()

    def on_message_begin(self) -> None:
        """Begin a request; refuse further ones if many wait for the responses before."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise OverflowError
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Answer a request; refuse one that does not name one host, or whose body has a coding besides chunked."""
        self._unparsed = 0
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise ValueError(f"{hosts} Host headers")
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            raise ValueError("a transfer coding other than chunked")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a refused body, for reading the response, and for the next request."""
        self._output.flush()
        super().on_response_complete()
        self._cancel_timer()
        self._set_timer()

    def pause_writing(self) -> None:
        """Limit the time until the client reads."""
        super().pause_writing()
        self._set_timer()

    def resume_writing(self) -> None:
        """Continue after the client has read."""
        super().resume_writing()
        self._set_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; close a connection whose response has already begun."""
        cycle: RequestResponseCycle | None = self.cycle
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _set_timer(self) -> None:
        """Close the connection later if this waits for the client, which may not read the end of a last response."""
        cycle: RequestResponseCycle | None = self.cycle
        is_whole = cycle is not None and not cycle.more_body and not cycle.response_complete
        if (is_whole or self.pipeline) and not self.flow.write_paused and not self.transport.is_closing():
            self._cancel_timer()
        elif self._late is None:
            self._late = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def check_tls(certificate: Path, key: Path) -> None:
    """Raise an error if a certificate and its key cannot be used."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise UsageError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({why}); give a PEM certificate chain and "
            "its key without a password"
        ) from None
