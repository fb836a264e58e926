"""Steps that all requests share: access, headers, ids, counts, and errors."""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Histogram

from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.replies import HEADERS, Refusal, json_response
from ls_edge.runtime.source.results import LATENCY_BOUNDS_S

log = logging.getLogger("ls_edge.runtime")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_ID = web.RequestKey("id", str)
"""Key of a request's id, which its response has in a header."""
_GONE = 499
"""Status of a client that went away, as in nginx."""
INFERENCE = ("/predict", "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
"""Paths that classify images."""
_OUTCOMES = (200, 400, _GONE, 500, 502, 503, 504)
"""Statuses of these paths whose counts begin with zero: the first increase of a missing series is not seen."""


class Middleware:
    """Middleware of the application."""

    def __init__(self, access: Access, registry: CollectorRegistry) -> None:
        self._access = access
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
        for path, status in itertools.product(INFERENCE, _OUTCOMES):
            self._responses.labels(path, str(status))

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request."""
        began, status = time.perf_counter(), _GONE
        given = request.headers.get("X-Request-ID", "")
        request[_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        try:
            self._access.check(request)
            response = await handler(request)
            status = response.status
        except ConnectionError:  # the client is gone
            raise
        except Exception as error:  # noqa: BLE001 - the client gets a response in any case
            response = self._response_to(error, request)
            status = response.status
        finally:
            resource = request.match_info.route.resource
            path = "other" if resource is None else resource.canonical
            self._responses.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(time.perf_counter() - began)
        return response

    def _response_to(self, error: Exception, request: web.Request) -> web.Response:
        if isinstance(error, Refusal):
            return error.response()
        if isinstance(error, web.HTTPMethodNotAllowed):
            allow = ", ".join(sorted(error.allowed_methods))
            return Refusal(405, f"the method is not allowed here; use {allow}", {"Allow": allow}).response()
        if isinstance(error, web.HTTPNotFound):
            return Refusal(404, "no such path; see docs/serve.md, for example /predict, /status, /v2").response()
        if isinstance(error, web.HTTPException):
            return Refusal(error.status, error.reason).response()
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th ...: clients cannot fill the log
            log.error(
                "an HTTP request failed",
                extra={"count": self._failures, "id": request[_ID]},
                exc_info=error,
            )
        return json_response({"error": "the server failed to answer"}, 500)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every response; a signal of the application."""
    response.headers.update(HEADERS)
    if _ID in request:
        response.headers["X-Request-ID"] = request[_ID]
