"""HTTP server for ``ls-edge serve`` and the metrics endpoint.

waitress speaks HTTP: one thread reads and writes all connections, and a fixed number of threads runs the application.
Connections, bytes of a header and of a body, and the time to deliver a whole request are bounded. Its threads neither
wait for the links of the process nor keep it alive.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher

from ls_edge.core.errors import LinkError, UsageError, printable
from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.worker import introduce_thread
from ls_edge.runtime.transport.zap import is_worth_logging

log = logging.getLogger("ls_edge.runtime")

MAX_HTTP_HEADER = 16 << 10
"""Limit of the first line and the header of a request, in bytes."""
MAX_PARAMETERS = 16
"""Limit of parameters in a query."""
_POLL_S = 1.0
"""Interval of checks for idle connections and for a request to close, in seconds."""
_END_S = 0.5
"""Time for threads to end, in seconds."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]/@\s]+):(\d{1,5})", re.ASCII)


@dataclass(frozen=True)
class HttpRequest:
    """Request to an application."""

    method: str
    path: str
    query: Mapping[str, str]
    content_type: str
    """Without its parameters, in lower case."""
    content_length: int | None
    """Length of the complete body; None if the client announced none."""
    read: Callable[[], bytes]
    """Return the body."""


@dataclass(frozen=True)
class HttpReply:
    """Reply of an application."""

    body: bytes
    status: int = HTTPStatus.OK
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpError(Exception):
    """Error reply: ``{"error": "one line"}`` with its status."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        """``message`` is one line."""
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def json_reply(document: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Return a reply with a JSON document."""
    return HttpReply(json.dumps(document, allow_nan=False).encode() + b"\n", status, headers=headers or {})


def error_reply(status: int, message: str, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Return a reply with the document of an error."""
    return json_reply({"error": printable(message)}, status, headers)


Handler = Callable[[HttpRequest], HttpReply]


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, with IPv6 in brackets; raise :class:`UsageError` that names the flag."""
    match = _ADDRESS.fullmatch(text)
    host, port = (match[1].strip("[]"), int(match[2])) if match is not None else ("", -1)
    if (
        match is None
        or port > 65535
        or (match[1].startswith("[") and not isinstance(_ip_of(host), ipaddress.IPv6Address))
    ):
        raise UsageError(
            f"{flag} {text!r} is not HOST:PORT; give, for example, 127.0.0.1:9100 or [::1]:9100; port 0 is any free one"
        )
    return host, port


def is_loopback_host(host: str) -> bool:
    """Return whether a host of :func:`parse_address` is the loopback; names other than ``localhost`` are not."""
    ip = _ip_of(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def _ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def open_listener(text: str, flag: str) -> socket.socket:
    """Listen on ``HOST:PORT``; connections wait for an :class:`HttpServer`. Errors name the flag."""
    host, port = parse_address(text, flag)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such name"
        raise UsageError(f"{flag} {text!r}: {host} is not found ({why}); give an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen()  # until then, another process can bind the port
    except OSError as error:
        listener.close()
        raise LinkError(f"{flag} {text}: cannot listen ({error.strerror}); free the port, or give another") from None
    return listener


class HttpServer:
    """Server of an application on its own threads, started by the constructor; a context manager."""

    def __init__(
        self,
        listener: socket.socket,
        handle: Handler,
        *,
        name: str,
        threads: int = 1,
        max_body: int = 0,
        max_connections: int,
        receive_s: float,
        cores: EngineCores | None = None,
    ) -> None:
        """Serve on a socket of :func:`open_listener` and take ownership of it.

        ``receive_s`` limits the time without a whole request. A body of more than ``max_body`` bytes gets 413. The
        threads stay off ``cores``, those of the engine.
        """
        self._map: dict[int, Any] = {}
        self._name = name
        self._draining = self._closing = False
        self._drained = threading.Event()
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
        """Address of the listener."""
        # Any client can make waitress log; what matters is answered or counted.
        logging.getLogger("waitress").setLevel(logging.CRITICAL + 1)
        adjustments = Adjustments(
            sockets=[listener],
            threads=threads,
            ident=None,
            backlog=max_connections,
            max_request_body_size=max_body + 1,
            max_request_header_size=MAX_HTTP_HEADER,
            connection_limit=max_connections + 2,  # it counts the listener and what wakes it
            cleanup_interval=_POLL_S,
            channel_timeout=receive_s,
        )
        with (cores or EngineCores()).others():  # where the threads that are started here stay
            dispatcher = ThreadedTaskDispatcher()
            dispatcher.set_thread_count(threads)
            self._server = _Server(
                _wsgi_application(handle),
                self._map,
                _sock=listener,
                dispatcher=dispatcher,
                adj=adjustments,
                sockinfo=(listener.family, listener.type, listener.proto, listener.getsockname()),
                bind_socket=False,
            )
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether connections are served: False after :meth:`close` and after an internal error."""
        return self._thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Accept no more connections and wait until all answers are sent; return False after ``timeout`` s."""
        self._draining = True
        self._server.pull_trigger()
        return self._drained.wait(timeout)

    def close(self) -> None:
        """End all connections and threads; one that still runs the application ends with the process."""
        if self._closing:
            return
        self._closing = True
        self._server.pull_trigger()
        self._thread.join(_POLL_S + _END_S)
        self._server.task_dispatcher.shutdown(timeout=_END_S)
        wasyncore.close_all(self._map)

    def _run(self) -> None:
        introduce_thread(self._name)
        while not self._closing:
            if self._draining:
                self._server.stop_listening()
                if not self._server.is_busy:
                    self._drained.set()
            wasyncore.loop(timeout=_POLL_S, use_poll=True, map=self._map, count=1)


class _RefusalTask(ErrorTask):  # type: ignore[misc]  # waitress has no types
    """Reply to a request that never reaches the application."""

    def execute(self) -> None:
        """Write the error in the format of the application, without content from the client."""
        error = self.request.error
        what = _REFUSALS.get(error.code, "the request cannot be answered")
        reply = error_reply(error.code, what.format(max_body=self.channel.adj.max_request_body_size - 1))
        self.status = _status_line(error.code)
        self.response_headers.extend(_headers_of(reply))
        self.set_close_on_finish()
        self.content_length = len(reply.body)
        self.write(reply.body)


_REFUSALS = {
    400: "the request is malformed HTTP",
    413: "the body has more than {max_body} bytes; send a smaller one",
    431: f"the header has {MAX_HTTP_HEADER} bytes or more; send a shorter one",
    500: "the server failed to answer",
    501: "unsupported Transfer-Encoding; use chunked",
}


class _Connection(HTTPChannel):  # type: ignore[misc]
    """Connection that bounds the wait for a whole request and delivers refusals.

    After a refusal the client may still be sending. Closing then would reset the connection, and the client would lose
    the reply; so what comes is discarded until the client closes, or its time is over.
    """

    error_task_class = _RefusalTask
    waits_since: float
    close_when_flushed: bool
    is_refused = is_discarding = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.waits_since = time.monotonic()

    def service(self) -> None:
        """Answer a request."""
        self.waits_since = time.monotonic()
        self.is_refused = self.requests[0].error is not None
        super().service()

    def handle_write(self) -> None:
        """Send; after a refusal, close this side of the connection alone."""
        if self.is_refused and self.close_when_flushed:
            self._flush_exception(self._flush_some)
            if not self.total_outbufs_len and not self.will_close:
                self.close_when_flushed, self.is_discarding = False, True
                with contextlib.suppress(OSError):  # the client is gone
                    self.socket.shutdown(socket.SHUT_WR)
                return
        super().handle_write()

    def received(self, data: bytes) -> bool:
        """Take bytes from the client; discard them after a refusal."""
        return not self.is_discarding and bool(super().received(data))


class _Server(TcpWSGIServer):  # type: ignore[misc]
    """waitress's server, which also closes connections that deliver a request byte by byte."""

    channel_class = _Connection
    accepting: bool

    def maintenance(self, now: float) -> None:
        """Close connections without an answered request for too long; called about once a second."""
        now = time.monotonic()
        for connection in self.active_channels.values():
            if connection.requests:
                connection.waits_since = now
            elif now - connection.waits_since > self.adj.channel_timeout:
                connection.will_close = True

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or an answer being sent."""
        return any(one.requests or one.total_outbufs_len for one in self.active_channels.values())

    def stop_listening(self) -> None:
        """Close the listening socket; connections stay."""
        if self.accepting:
            self.accepting = False
            wasyncore.dispatcher.close(self)


def _wsgi_application(handle: Handler) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    """Turn a handler into a WSGI application with complete replies and JSON errors."""
    failures = 0

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal failures
        try:
            reply = handle(_request_of(environ))
        except HttpError as error:
            reply = error_reply(error.status, str(error), error.headers)
        except Exception:
            failures += 1
            if is_worth_logging(failures):
                log.exception("an HTTP request failed", extra={"count": failures})
            reply = error_reply(HTTPStatus.INTERNAL_SERVER_ERROR, _REFUSALS[500])
        start_response(_status_line(reply.status), [*_headers_of(reply), ("Content-Length", str(len(reply.body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else reply.body]

    return application


def _request_of(environ: Mapping[str, Any]) -> HttpRequest:
    try:
        values = parse_qs(environ["QUERY_STRING"], keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the query has more than {MAX_PARAMETERS} parameters") from None
    length = environ.get("CONTENT_LENGTH", "")
    return HttpRequest(
        method=environ["REQUEST_METHOD"],
        path=environ["PATH_INFO"],
        query={key: given[-1] for key, given in values.items()},
        content_type=environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower(),
        content_length=int(length) if length else None,
        read=environ["wsgi.input"].read,
    )


def _status_line(status: int) -> str:
    return f"{int(status)} {HTTPStatus(status).phrase}"


def _headers_of(reply: HttpReply) -> Sequence[tuple[str, str]]:
    return [
        ("Content-Type", reply.content_type),
        ("X-Content-Type-Options", "nosniff"),
        ("Cache-Control", "no-store"),
        *reply.headers.items(),
    ]


def require_method(request: HttpRequest, *allowed: str) -> None:
    """Raise an error if the path does not allow the method."""
    if request.method not in allowed:
        names = ", ".join(allowed)
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"the method is not allowed here; use {names}", {"Allow": names})
