"""HTTP server of ``ls-edge serve``: aiohttp on its own thread, and the TLS certificate."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import ssl
import threading
from concurrent.futures import Future
from pathlib import Path

from aiohttp import web

from ls_edge.core.closing import Closing
from ls_edge.core.errors import UsageError
from ls_edge.core.logs import LoggedCounts
from ls_edge.device.threads import batch_scheduling, introduce_thread
from ls_edge.runtime.serve.bodies import RECEIVE_S
from ls_edge.runtime.serve.listener import url_of

IDLE_S = 75.0
"""Maximum time between two requests of a connection, in seconds; proxies keep connections for 60 s."""
_END_S = 1.0
"""Maximum time for the thread to end, in seconds."""


_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""Options of glibc's ``mallopt``."""


def return_memory() -> None:
    """Make glibc return the memory of large bodies as soon as it is free; it would keep some of it for each thread."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_MMAP_THRESHOLD, 1 << 20)
        mallopt(_ARENA_MAX, 2)


class HttpServer(Closing):
    """Server of an application, started by the constructor; a context manager."""

    def __init__(
        self,
        listener: socket.socket,
        application: web.Application,
        *,
        tls: Certificate | None = None,
    ) -> None:
        """Serve on a listening socket and take ownership of it."""
        self.url = url_of(listener, "https" if tls else "http")
        self._listener = listener
        self._application = application
        self._tls = tls
        self._end: Future[float] = Future()
        """Result: the time that requests in progress get, in seconds."""
        with batch_scheduling():
            self._thread = threading.Thread(target=self._run, name="http", daemon=True)
            self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether connections are served: False after :meth:`close` and after an internal error."""
        return self._thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Accept no more connections and wait until all responses are sent; return False after ``timeout`` s."""
        if not self._end.done():
            self._end.set_result(timeout)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Abort all connections, and end the thread."""
        self.drain(0.0)
        self._thread.join(_END_S)

    def _run(self) -> None:
        introduce_thread("http")
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        # Any client can make aiohttp write log lines; what matters is in responses and metrics.
        silent = logging.Logger("silent", logging.CRITICAL + 1)
        runner = web.AppRunner(
            self._application, handler_cancellation=True, keepalive_timeout=IDLE_S, access_log=None, logger=silent,
            shutdown_timeout=0.0,
        )  # fmt: skip
        counts = LoggedCounts()  # without free descriptors, every connection fails
        asyncio.get_running_loop().set_exception_handler(
            lambda _, failure: counts.note(failure["message"], "the HTTP server failed", why=failure["message"])
        )
        await runner.setup()
        # An answer that nobody reads ends its connection; aiohttp has no limit for that.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(RECEIVE_S * 1e3))
        site = web.SockSite(runner, self._listener, ssl_context=None if self._tls is None else self._tls.context)
        await site.start()
        try:
            timeout = await asyncio.wrap_future(self._end)
            await site.stop()
            assert runner.server is not None
            runner.server.pre_shutdown()
            await runner.server.shutdown(timeout)
        finally:
            await runner.cleanup()


class Certificate:
    """TLS certificate and key of a server, which can be read again."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raise :class:`UsageError` if the files cannot be used."""
        self._files = certificate, key
        self.context = self._load()

    def reload(self) -> None:
        """Read the files again for new connections; raise :class:`UsageError` if they cannot be used."""
        self._load()
        self.context.load_cert_chain(*self._files)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(*self._files, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                "--tls-cert {} and --tls-key {} cannot be used ({}); give a PEM certificate chain and its key without "
                "a password".format(*self._files, error.strerror or error)
            ) from None
        return context
