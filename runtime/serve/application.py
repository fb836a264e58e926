"""HTTP application of ``ls-edge serve``: its paths, and what holds for each request.

``docs/serving.md`` describes the interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, printable
from ls_edge.core.parts import shown_parts
from ls_edge.runtime.serve import inference_protocol as v2
from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.live_page import LivePage
from ls_edge.runtime.serve.metrics import SourceCollector, registry_of
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.results import Answer
from ls_edge.version import __version__

log = logging.getLogger("ls_edge.runtime")

DEFAULT_TOP = 3
MAX_PARAMETERS = 16
"""Limit of parameters in a query, and of fields in a form."""
_IN_MEMORY = 512 << 10
"""Bytes of a body that are kept in memory; the rest is kept on disk until its image has a place."""
_QUICK_JSON = 16 << 10
"""Bytes of JSON that are parsed at once, in 0.06 ms; a change of threads takes 0.2 ms, and 1 ms under load."""
_PAUSE_S = 0.5
"""Pause of a client that sends too much after which it gets its response, in seconds."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_TRACE_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})", re.ASCII)


class Application:
    """The ASGI application."""

    def __init__(self, service: Service, access: Access, *, max_body: int, access_log: bool = False) -> None:
        """Refuse bodies of more than ``max_body`` bytes; write a line for each request with ``access_log``."""
        self._service = service
        self._max_body = max_body
        self._page = LivePage(service)
        self._registry = registry_of(SourceCollector(lambda: service.source))
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/", self._page.show),
            Route("/events", self._page.events),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/status", self._status),
            Route("/metrics", self._metrics),
            Route("/v2", self._v2_server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/repository/index", self._v2_index, methods=["POST"]),
        ]
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                Route(prefix, functools.partial(self._v2_document, v2.metadata)),
                Route(f"{prefix}/ready", self._v2_ready),
                Route(f"{prefix}/config", functools.partial(self._v2_document, v2.configuration)),
                Route(f"{prefix}/infer", self._v2_infer, methods=["POST"]),
            ]
        self._each = _EachRequest(Router(routes), access, self._registry, access_log=access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._each(scope, receive, send)

    # Images.

    async def _predict(self, request: Request) -> Response:
        source = self._service.source
        top, budget_ms, with_logits = _parameters(request.query_params.multi_items(), source.settings.budget_ms)
        body = await self._image(request)
        with body, self._service.place() as source:

            def decode(wait_turn: Callable[[], None]) -> list[Any]:
                body.seek(0)
                return [source.preprocess(body.read(), "the body", wait_turn)]

            (answer,) = await self._service.answer(source, decode, budget_ms, request.receive)
        self._page.note(answer)
        return _json(_document_of(answer, top, with_logits))

    async def _image(self, request: Request) -> IO[bytes]:
        """Return the encoded image of a body or form."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            body = await self._form_file(request)
        elif not kind or kind.startswith("image/") or kind in _RAW_KINDS:
            body = await self._body(request)
        else:
            raise HTTPException(
                415, f"the content type {v2.shown(kind)} is not taken; send the encoded image as the body"
            )
        if not body.seek(0, 2):
            body.close()
            raise HTTPException(400, "the body is empty; send an encoded image, such as a JPEG")
        return body

    async def _form_file(self, request: Request) -> IO[bytes]:
        limited = Request(request.scope, self._limited(request))
        try:
            form = await limited.form(max_files=1, max_fields=MAX_PARAMETERS)
        except HTTPException as error:
            if error.status_code != 400:
                raise
            raise HTTPException(400, "the form cannot be read; send one file in multipart/form-data") from None
        for value in form.values():
            if not isinstance(value, str):
                return value.file
        raise HTTPException(400, "the form has no file; send one, as curl -F file=@photo.jpg does")

    async def _body(self, request: Request) -> IO[bytes]:
        body = SpooledTemporaryFile[bytes](_IN_MEMORY)
        try:
            async for part in Request(request.scope, self._limited(request)).stream():
                body.write(part)
        except BaseException:
            body.close()
            raise
        return body

    def _limited(self, request: Request) -> Receive:
        """Return the ``receive`` of a request that raises 413 for a body that is too large."""
        too_large = HTTPException(413, f"the body has more than {self._max_body} bytes; send a smaller one")
        length = request.headers.get("content-length", "0")
        received = 0 if length.isdigit() and int(length) <= self._max_body else self._max_body + 1

        async def receive() -> Message:
            nonlocal received
            message: Message = {"more_body": True}
            if received <= self._max_body:
                message = await request.receive()
                received += len(message.get("body", b""))
            if received <= self._max_body:
                return message
            # Closing while the client still sends would reset the connection, and the response would be lost.
            with contextlib.suppress(asyncio.TimeoutError):
                while message.get("more_body"):
                    message = await asyncio.wait_for(request.receive(), _PAUSE_S)
            raise too_large

        return receive

    # The Open Inference Protocol.

    async def _v2_server(self, _request: Request) -> Response:
        return _json({"name": "ls-edge", "version": __version__, "extensions": list(v2.EXTENSIONS)})

    async def _v2_index(self, _request: Request) -> Response:
        bundle, state, reason = self._service.source.bundle, "READY", ""
        if not self._service.is_ready:
            missing = shown_parts(self._service.source.snapshot.missing_blocks)
            state, reason = "UNAVAILABLE", f"blocks without a holder: {', '.join(map(str, missing))}"
        index = [{"name": bundle.manifest.model, "version": v2.version_of(bundle), "state": state, "reason": reason}]
        return _json(index)

    async def _v2_document(self, document: Callable[[Bundle], object], request: Request) -> Response:
        return _json(document(self._v2_bundle(request)))

    async def _v2_ready(self, request: Request) -> Response:
        self._v2_bundle(request)
        return await self._ready(request)

    async def _v2_infer(self, request: Request) -> Response:
        self._v2_bundle(request)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "compressed bodies are not supported; send the body as it is")
        length = request.headers.get(v2.HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) <= 10):
            raise HTTPException(400, f"{v2.HEADER_LENGTH} {v2.shown(length)}: use a number of bytes")
        body = await self._body(request)
        with body, self._service.place() as source:
            body.seek(0)
            try:
                content, json_length = body.read(), None if length is None else int(length)
                if (len(content) if json_length is None else json_length) <= _QUICK_JSON:
                    asked, binary = v2.parse_request(content, json_length)
                else:
                    asked, binary = await asyncio.to_thread(v2.parse_request, content, json_length)
                v2.check_outputs(asked)
            except DataError as error:
                raise HTTPException(400, str(error)) from None
            budget_ms = source.settings.budget_ms
            if asked.parameters.timeout:
                budget_ms = min(budget_ms, asked.parameters.timeout / 1e3)

            def decode(wait_turn: Callable[[], None]) -> list[Any]:
                return v2.images_of(asked, binary, lambda image, name: source.preprocess(image, name, wait_turn))

            answers = await self._service.answer(source, decode, budget_ms, request.receive)
        self._page.note(*answers)
        reply, json_length = v2.response_of(asked, source.bundle, answers)
        if json_length is None:
            return Response(reply, media_type="application/json")
        return Response(reply, media_type="application/octet-stream", headers={v2.HEADER_LENGTH: str(json_length)})

    def _v2_bundle(self, request: Request) -> Bundle:
        """Return the bundle that a path names."""
        bundle = self._service.source.bundle
        model, version = request.path_params["model"], request.path_params.get("version")
        if model != bundle.manifest.model:
            raise HTTPException(404, f"model {v2.shown(model)} is not found; this server has {bundle.manifest.model}")
        if version not in (None, v2.version_of(bundle)):
            raise HTTPException(
                404, f"version {v2.shown(version)} is not found; this server has {v2.version_of(bundle)}"
            )
        return bundle

    # Health and status.

    async def _live(self, _request: Request) -> Response:
        if not self._service.source.is_open:
            raise HTTPException(503, "the source is closed", {"Retry-After": "1"})
        return _json({"live": True})

    async def _ready(self, _request: Request) -> Response:
        ready = self._service.is_ready
        missing = self._service.source.snapshot.missing_blocks
        return _json({"ready": ready, "missing_blocks": shown_parts(missing)}, 200 if ready else 503)

    async def _status(self, _request: Request) -> Response:
        return _json(self._service.status())

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _EachRequest:
    """Rules for every request: access, headers, ids, counts, the access log, and errors without tracebacks."""

    def __init__(
        self,
        router: Router,
        access: Access,
        registry: CollectorRegistry,
        *,
        access_log: bool,
    ) -> None:
        self._router = router
        self._access = access
        self._paths: dict[Any, str] = {
            route.endpoint: route.path for route in router.routes if isinstance(route, Route)
        }
        self._access_log = access_log
        self._failures = 0
        self._responses = Counter(
            "ls_edge_http_responses", "Answers to HTTP requests.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "ls_edge_http_request_seconds",
            "From the header of a request to its answer.",
            ["path"],
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        request = Request(scope)
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        trace = _TRACE_PARENT.fullmatch(request.headers.get("traceparent", ""))
        status = 0

        async def send_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                headers += [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                headers.append((b"x-request-id", request_id.encode()))
                if trace:
                    headers.append((b"traceparent", f"00-{trace[1]}-{secrets.token_hex(8)}-{trace[2]}".encode()))
            await send(message)

        try:
            self._access.check(request.method, scope["path"], request.headers)
            scope["app"] = self  # for starlette, to raise an exception for an unknown path or method
            await self._router(scope, receive, send_headers)
        except HTTPException as error:
            await _refusal(error)(scope, receive, send_headers)
        except ClientDisconnect:
            pass
        except Exception:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th ...: clients cannot fill the log
                log.exception("an HTTP request failed", extra={"count": self._failures, "id": request_id})
            if not status:
                await _json({"error": "the server failed to answer"}, 500)(scope, receive, send_headers)
        finally:
            path = self._paths.get(scope.get("endpoint"), "other")
            seconds = time.perf_counter() - began
            self._responses.labels(path, str(status or 499)).inc()
            self._seconds.labels(path).observe(seconds)
            if self._access_log:
                log.info(
                    "request",
                    extra={
                        "id": request_id,
                        "trace": trace[1] if trace else None,
                        "client": (scope["client"] or ("",))[0],
                        "method": request.method,
                        "path": scope["path"][:200],
                        "status": status or 499,
                        "ms": round(seconds * 1e3, 2),
                    },
                )


_RAW_KINDS = ("application/octet-stream", "application/x-www-form-urlencoded")
"""Content types of an encoded image, in addition to ``image/...``; the second is what curl sends by default."""


def _refusal(error: HTTPException) -> Response:
    """Return the response for an expected error: ``{"error": "one line"}``."""
    headers = dict(error.headers or {})
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = "no such path; see docs/serving.md, for example /predict, /status, /v2"
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        message = f"the method is not allowed here; use {headers['Allow']}"
    return _json({"error": printable(message)}, error.status_code, headers)


def _json(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    content = json.dumps(document, allow_nan=False).encode() + b"\n"
    return Response(content, status, headers, "application/json")


def _document_of(answer: Answer, top: int, with_logits: bool) -> dict[str, Any]:
    record = answer.record
    document: dict[str, Any] = {
        "top": [{"label": label, "probability": probability} for label, probability in answer.top(top)],
        "degraded": answer.degraded,
        "latency_ms": answer.latency_ms,
        "order": record.steps if record.is_plain else None,
        "skipped": record.skipped,
        "why_skipped": record.why_skipped,
    }
    if not record.is_plain:
        document["waves"] = record.waves
    if with_logits:
        document["logits"] = answer.logits.tolist()
    return document


def _parameters(query: list[tuple[str, str]], most_ms: float) -> tuple[int, float, bool]:
    """Return the number of classes, the budget in ms, and whether to include logits."""
    if len(query) > MAX_PARAMETERS:
        raise HTTPException(400, f"the query has more than {MAX_PARAMETERS} parameters")
    values = dict(query)
    unknown = values.keys() - {"top", "budget_ms", "logits"}
    if unknown:
        raise HTTPException(400, f"parameter {v2.shown(min(unknown))} is not known; use top, budget_ms or logits")
    top, budget_ms, logits = values.get("top"), values.get("budget_ms"), values.get("logits", "0")
    # Digits alone: numbers of Python such as 1_0, nan or ٣ are refused.
    if top is not None and not (top.isascii() and top.isdigit() and len(top) <= 9 and int(top) > 0):
        raise HTTPException(400, f"top {v2.shown(top)}: use a whole number from 1")
    if budget_ms is not None and not _is_budget(budget_ms, most_ms):
        raise HTTPException(400, f"budget_ms {v2.shown(budget_ms)}: use milliseconds from 1 to {most_ms:g}")
    if logits not in ("0", "1"):
        raise HTTPException(400, f"logits {v2.shown(logits)}: use 0 or 1")
    count = DEFAULT_TOP if top is None else int(top)
    return count, most_ms if budget_ms is None else float(budget_ms), logits == "1"


def _is_budget(text: str, most_ms: float) -> bool:
    return len(text) <= 16 and text.isascii() and text.replace(".", "", 1).isdigit() and 1 <= float(text) <= most_ms
