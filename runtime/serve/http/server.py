"""HTTP server of ``ls-edge serve``: aiohttp on its own thread, and the TLS certificate."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from ls_edge.core.closing import Closing
from ls_edge.core.errors import UsageError
from ls_edge.device.worker import introduce_thread
from ls_edge.runtime.peer.cores import EngineCores
from ls_edge.runtime.serve.http.connection import Connection, Connections, Handshake
from ls_edge.runtime.serve.http.listener import url_of
from ls_edge.runtime.serve.http.replies import HEADERS, Refusal

MAX_LINE, MAX_HEADERS = 16 << 10, 64
"""Maximum size of a header line in bytes, and maximum number of headers."""
MAX_IDLE_CONNECTIONS = 512
"""Connections in addition to one for each request that is in progress or waits."""
_QUOTED = re.compile(r""":?\s*((bytearray\()?b['"]|\n).*""", re.DOTALL)
_END_S = 1.0
"""Maximum time for the thread to end, in seconds."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer(Closing):
    """Server that answers requests with a handler, started by the constructor; a context manager."""

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        connections: Connections,
        *,
        tls: Certificate | None = None,
        cores: EngineCores | None = None,
    ) -> None:
        """Serve on a listening socket and take ownership of it. The thread avoids the engine's cores."""
        self.url = url_of(listener, "https" if tls else "http")
        self._listener = listener
        self._handler = handler
        self._connections = connections
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        with (cores or EngineCores()).others():  # threads started here stay on these cores
            self._thread = threading.Thread(target=self._run, name="http", daemon=True)
            self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether connections are served: False after :meth:`close` and after an internal error."""
        return self._thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Accept no more connections and wait until all responses are sent; return False after ``timeout`` s."""
        self._call(self._stopping.set)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Abort all connections, and end the thread."""
        self._call(self._abort)
        self._thread.join(_END_S)

    def _call(self, function: Callable[[], None]) -> None:
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _abort(self) -> None:
        self._stopping.set()
        for connection in list(self._connections.open):
            connection.abort()

    def _run(self) -> None:
        introduce_thread("http")
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        # Any client can make aiohttp write log lines; what matters is in responses and metrics.
        silent = logging.Logger("silent", logging.CRITICAL + 1)
        http = functools.partial(
            _Http, web.Server(self._handler, handler_cancellation=True), loop=self._loop, logger=silent,
            access_log=silent, max_line_size=MAX_LINE, max_field_size=MAX_LINE, max_headers=MAX_HEADERS,
            auto_decompress=False,
        )  # fmt: skip
        tls, connect = self._tls, lambda: Connection(http(), self._connections)
        accept = connect if tls is None else lambda: Handshake(connect, self._connections, tls.context)
        server = await self._loop.create_server(accept, sock=self._listener)
        await self._stopping.wait()
        server.close()
        for connection in list(self._connections.open):
            connection.end_after_requests()
        while self._connections.open:
            self._connections.changed.clear()
            await self._connections.changed.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # of connections that were aborted
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Http(web.RequestHandler):
    """aiohttp's protocol, with the usual response to malformed HTTP."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the response, without the bytes of the client that aiohttp's message quotes."""
        super().handle_error(request, status, exc, message)  # raises ConnectionError if a response has begun
        why = _QUOTED.sub("", message or "")[:200].strip(". ")
        response = Refusal(status, f"the request is not valid HTTP: {why}", HEADERS).response()
        response.force_close()
        return response


class Certificate:
    """TLS certificate and key of a server, which can reload them."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raise :class:`UsageError` if the files cannot be used."""
        self._files = certificate, key
        self.context: ssl.SSLContext
        """Context for new connections."""
        self.reload()

    def reload(self) -> None:
        """Read the files again; raise :class:`UsageError` and keep the previous ones if they cannot be used."""
        certificate, key = self._files
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or str(error)
            raise UsageError(
                f"--tls-cert {certificate} and --tls-key {key} cannot be used ({why}); give a PEM certificate chain "
                "and its key without a password"
            ) from None
        self.context = context
