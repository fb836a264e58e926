"""Steps that all requests share: path, method, access, headers, ids, counts, the access log, and errors."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import HttpVersion10, HttpVersion11, web
from prometheus_client import CollectorRegistry, Counter, Histogram

from ls_edge.runtime.serve.http.access import Access
from ls_edge.runtime.serve.http.connection import Connection
from ls_edge.runtime.serve.http.replies import HEADERS, Refusal, json_response
from ls_edge.runtime.source.results import LATENCY_BOUNDS_S

log = logging.getLogger("ls_edge.runtime")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_TRACE_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})", re.ASCII)

_HEADERS = web.RequestKey("headers", dict)
"""Key under which a request holds the headers of its response."""

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Function that gets a request, and the parameters of its path by name."""


@dataclass(frozen=True)
class Route:
    """A path, with parameters such as ``{model}``, and its handler. ``GET`` includes ``HEAD``.

    Parameters may contain slashes, as names of models on the Hub do; the first route that matches a path is used.
    """

    method: str
    path: str
    handler: Handler

    @property
    def methods(self) -> tuple[str, ...]:
        """Allowed methods, in alphabetical order."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


class Router:
    """Handler of all requests of a server."""

    def __init__(
        self, routes: Sequence[Route], access: Access, registry: CollectorRegistry, *, access_log: bool
    ) -> None:
        """With ``access_log``, log each request."""
        self._routes = [(re.compile(re.sub(r"{(\w+)}", r"(?P<\1>.+)", route.path)), route) for route in routes]
        self._access = access
        self._access_log = access_log
        self._failures = 0
        self._responses = Counter(
            "ls_edge_http_responses", "Answers to HTTP requests.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "ls_edge_http_request_seconds",
            "Time from the header of a request to its response.",
            ["path"],
            registry=registry,
            buckets=LATENCY_BOUNDS_S,
        )

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        began = time.perf_counter()
        given, parent = request.headers.get("X-Request-ID", ""), request.headers.get("traceparent", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        headers = {
            **HEADERS,
            "X-Request-ID": request_id,
            **self._access.headers_for(request.headers.get("Origin")),
        }
        trace = _TRACE_PARENT.fullmatch(parent)
        if trace:
            headers["traceparent"] = f"00-{trace[1]}-{secrets.token_hex(8)}-{trace[2]}"
        request[_HEADERS] = headers
        path, status = "other", 499
        connection = _connection_of(request)
        connection.begin(request)
        try:
            route, parameters = self._find(request.path)
            path = path if route is None else route.path
            response = await self._answer(request, route, parameters)
            status = response.status
        except ConnectionError:  # the client is gone
            raise asyncio.CancelledError from None
        except Exception:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th ...: clients cannot fill the log
                log.exception("an HTTP request failed", extra={"count": self._failures, "id": request_id})
            status = 500
            response = json_response({"error": "the server failed to answer"}, status)
        finally:
            is_last = not connection.end()
            seconds = time.perf_counter() - began
            self._responses.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(seconds)
            if self._access_log:
                log.info(
                    "request",
                    extra={
                        "id": request_id,
                        "trace": trace[1] if trace else None,
                        "client": self._access.client_of(request),
                        "method": request.method,
                        "path": request.path[:200],
                        "status": status,
                        "ms": round(seconds * 1e3, 2),
                    },
                )
        if not response.prepared:
            response.headers.update(headers)
        if is_last or "Connection" in response.headers:
            response.force_close()
        return response

    def _find(self, path: str) -> tuple[Route | None, dict[str, str]]:
        for pattern, route in self._routes:
            if match := pattern.fullmatch(path):
                return route, match.groupdict()
        return None, {}

    async def _answer(
        self, request: web.BaseRequest, route: Route | None, parameters: dict[str, str]
    ) -> web.StreamResponse:
        try:
            _check_framing(request)
            if preflight := self._access.preflight_of(request):
                return preflight
            self._access.check(request)
            if route is None:
                raise Refusal(404, "no such path; see docs/serving.md, for example /predict, /status, /v2")
            if request.method not in route.methods:
                allow = ", ".join(route.methods)
                raise Refusal(405, f"the method is not allowed here; use {allow}", {"Allow": allow})
            return await route.handler(request, **parameters)
        except Refusal as refusal:
            return refusal.response()


def _check_framing(request: web.BaseRequest) -> None:
    """Raise :class:`Refusal` for a request that a proxy may delimit in another way (request smuggling)."""
    coding = request.headers.getall("Transfer-Encoding", ())
    close = {"Connection": "close"}
    if request.version not in (HttpVersion10, HttpVersion11):
        raise Refusal(505, "the version of HTTP is not supported; use HTTP/1.1", close)
    if coding and (request.version == HttpVersion10 or ",".join(coding).strip().lower() != "chunked"):
        raise Refusal(400, "the Transfer-Encoding is not supported; use chunked, with HTTP/1.1", close)
    if request.method == "CONNECT":
        raise Refusal(405, "this server is not a proxy", {**close, "Allow": "GET, HEAD, POST"})


def _connection_of(request: web.BaseRequest) -> Connection:
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, Connection):
        raise ConnectionResetError
    return connection


async def begin_response(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the header of a response whose body is streamed."""
    response.headers.update(request[_HEADERS])
    _connection_of(request).respond()
    await response.prepare(request)
