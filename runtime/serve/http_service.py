"""HTTP application of ``ls-edge serve``: images, health, status, and metrics.

``docs/serving.md`` describes the interface. At most ``max_inflight`` images are accepted at the same time and more are
refused with 503, so memory is bounded and no image waits in a queue that its client does not see.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ls_edge.core.errors import (
    BudgetExceeded,
    DataError,
    ModelMismatch,
    NotFinite,
    Overloaded,
    RequestError,
    SourceClosed,
    printable,
)
from ls_edge.core.text import name_blocks
from ls_edge.runtime.serve.http_server import HttpError, HttpReply, HttpRequest, error_reply, json_reply, require_method
from ls_edge.runtime.serve.metrics import METRICS_PATH, SourceCollector, metrics_reply, registry_of
from ls_edge.runtime.source.results import Answer, likeliest
from ls_edge.runtime.source.source import Source
from ls_edge.version import __version__

DEFAULT_TOP = 3
"""Default number of classes in an answer."""
SPARE_THREADS = 4
"""Threads for health, metrics, and refusals, in addition to those that answer images."""
MAX_IDLE_CONNECTIONS = 64
"""Connections in addition to those whose images are being answered."""
RECEIVE_S = 60.0
"""Time for a connection to deliver a whole request, in seconds."""
DECODERS = 2
"""Large images that are decoded at the same time, whatever ``--concurrency`` is; each may need half a gigabyte."""
OVER_BUDGET_S = 2.0
"""Seconds over the budget after which a request is abandoned here."""
_RETRY_AFTER = {"Retry-After": "1"}
_MAX_SHOWN = 64
"""Limit of a client's value in an error, in characters."""
_STATUS_OF: dict[type[RequestError], HTTPStatus] = {
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    SourceClosed: HTTPStatus.SERVICE_UNAVAILABLE,
    BudgetExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    NotFinite: HTTPStatus.BAD_GATEWAY,
    ModelMismatch: HTTPStatus.BAD_GATEWAY,
}
"""Status by class of error; 500 for others."""


class HttpService(Collector):
    """The application, and a collector of its responses; any thread may call it."""

    def __init__(self, source: Source, *, holder_wait_s: float) -> None:
        """``holder_wait_s`` limits the time that an image waits for missing holders."""
        self._source = source
        self._holder_wait_s = holder_wait_s
        self._free = threading.BoundedSemaphore(source.settings.max_inflight)
        self._decoders = threading.BoundedSemaphore(DECODERS)
        self._lock = threading.Lock()
        self._answered: Counter[tuple[str, int]] = Counter()
        self._closing = False
        self._registry = registry_of(SourceCollector(source), self)
        self._paths: dict[str, tuple[Callable[[HttpRequest], HttpReply], tuple[str, ...]]] = {
            "/": (self._index, ("GET", "HEAD")),
            "/predict": (self._predict, ("POST",)),
            "/health/live": (self._live, ("GET", "HEAD")),
            "/health/ready": (self._ready, ("GET", "HEAD")),
            "/status": (self._status, ("GET", "HEAD")),
            METRICS_PATH: (lambda _: metrics_reply(self._registry), ("GET", "HEAD")),
        }

    def stop(self) -> None:
        """Refuse new images; finish the others."""
        self._closing = True

    def collect(self) -> Iterator[Metric]:
        """Yield the number of responses by path and status; malformed requests are not counted."""
        family = CounterMetricFamily("ls_edge_http_responses", "Answers to HTTP requests.", labels=["path", "status"])
        for (path, status), count in self._answered.copy().items():
            family.add_metric([path, str(status)], count)
        yield family

    def handle(self, request: HttpRequest) -> HttpReply:
        """Answer a request; expected errors become replies."""
        reply: HttpReply | None = None
        try:
            reply = self._handle(request)
        except HttpError as error:
            reply = error_reply(error.status, str(error), error.headers)
        finally:
            status = HTTPStatus.INTERNAL_SERVER_ERROR if reply is None else reply.status
            with self._lock:
                self._answered[request.path if request.path in self._paths else "other", int(status)] += 1
        return reply

    def _handle(self, request: HttpRequest) -> HttpReply:
        if request.path not in self._paths:
            raise HttpError(HTTPStatus.NOT_FOUND, f"no such path; use one of {', '.join(self._paths)}")
        answer, methods = self._paths[request.path]
        require_method(request, *methods)
        return answer(request)

    # Images.

    def _predict(self, request: HttpRequest) -> HttpReply:
        top, budget_ms, with_logits = self._parameters(request.query)
        _check_content(request)
        if self._closing:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", _RETRY_AFTER)
        if not self._free.acquire(blocking=False):
            most = self._source.settings.max_inflight
            raise HttpError(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{most} images are being answered, the limit; try again",
                _RETRY_AFTER,
            )  # fmt: skip
        try:
            answer = self._answer(request.read(), budget_ms)
        finally:
            self._free.release()
        classes, record = self._source.bundle.manifest.classes, answer.record
        document: dict[str, Any] = {
            "top": [{"label": classes[index], "probability": p} for index, p in likeliest(answer.logits, top)],
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
        return json_reply(document)

    def _answer(self, image: bytes, budget_ms: float) -> Answer:
        end = time.monotonic() + budget_ms / 1e3
        try:
            with contextlib.ExitStack() as turn:

                def wait_turn() -> None:
                    if not self._decoders.acquire(timeout=max(0.0, end - time.monotonic())):
                        raise BudgetExceeded("the budget ended before the image was decoded; give it more time")
                    turn.callback(self._decoders.release)

                array = self._source.preprocess(image, "the body", wait_turn)
            missing = self._source.wait_answerable(min(self._holder_wait_s, max(0.0, end - time.monotonic())))
            if missing:
                raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, _no_holder(missing), _RETRY_AFTER)
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise BudgetExceeded("the budget ended before the image was decoded; give it more time")
            future = self._source.submit(array, name="the body", budget_ms=left_s * 1e3)
            try:
                return future.result(left_s + OVER_BUDGET_S)
            except FutureTimeoutError:
                future.cancel()
                raise BudgetExceeded("the budget ended before there was an answer; give it more time") from None
        except DataError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from None
        except RequestError as error:
            status = _STATUS_OF.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
            busy = status == HTTPStatus.SERVICE_UNAVAILABLE
            raise HttpError(status, str(error), _RETRY_AFTER if busy else None) from None

    def _parameters(self, query: Mapping[str, str]) -> tuple[int, float, bool]:
        """Return the number of classes, the budget in ms, and whether to include logits."""
        unknown = query.keys() - {"top", "budget_ms", "logits"}
        if unknown:
            raise HttpError(
                HTTPStatus.BAD_REQUEST, f"parameter {_shown(min(unknown))} is not known; use top, budget_ms or logits"
            )
        classes, most_ms = len(self._source.bundle.manifest.classes), self._source.settings.budget_ms
        top, budget_ms, logits = query.get("top"), query.get("budget_ms"), query.get("logits", "0")
        # Digits alone: numbers of Python such as 1_0, nan or ٣ are refused.
        if top is not None and not (top.isascii() and top.isdigit() and len(top) <= 9 and int(top) > 0):
            raise HttpError(HTTPStatus.BAD_REQUEST, f"top {_shown(top)}: use a whole number from 1")
        if budget_ms is not None and not _is_budget(budget_ms, most_ms):
            raise HttpError(
                HTTPStatus.BAD_REQUEST, f"budget_ms {_shown(budget_ms)}: use milliseconds from 1 to {most_ms:g}"
            )
        if logits not in ("0", "1"):
            raise HttpError(HTTPStatus.BAD_REQUEST, f"logits {_shown(logits)}: use 0 or 1")
        count = DEFAULT_TOP if top is None else int(top)
        return min(count, classes), most_ms if budget_ms is None else float(budget_ms), logits == "1"

    # Health and status.

    def _index(self, _request: HttpRequest) -> HttpReply:
        return json_reply(
            {
                "name": "ls-edge",
                "version": __version__,
                "paths": {path: list(methods) for path, (_, methods) in self._paths.items()},
            }
        )

    def _live(self, _request: HttpRequest) -> HttpReply:
        if not self._source.is_open:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "the source is closed")
        return json_reply({"live": True})

    def _ready(self, _request: HttpRequest) -> HttpReply:
        missing = self._source.missing_blocks()
        ready = self._is_ready
        document = {"ready": ready, "missing_blocks": missing}
        return json_reply(document, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    @property
    def _is_ready(self) -> bool:
        return self._source.is_open and not self._closing and self._source.may_skip(self._source.missing_blocks())

    def _status(self, _request: HttpRequest) -> HttpReply:
        source, snapshot = self._source, self._source.snapshot
        manifest = source.bundle.manifest
        peers = {
            name: {
                "state": view.state.value,
                "bundle_id": view.bundle_id or None,
                "blocks": view.blocks,
                "warm": view.warm,
                "credits": view.credits,
                "engine": view.engine,
                "reaches": view.reaches,
                "reason": snapshot.problems.get(name),
            }
            for name, view in snapshot.peers.items()
        }
        return json_reply(
            {
                "version": __version__,
                "ready": self._is_ready,
                "bundle_id": manifest.bundle_id,
                "model_id": manifest.model_id,
                "model": manifest.model,
                "classes": len(manifest.classes),
                "policy": source.settings.policy,
                "concurrency": source.settings.max_inflight,
                "budget_ms": source.settings.budget_ms,
                "in_flight": source.counts.in_flight,
                "missing_blocks": snapshot.missing_blocks,
                "peers": peers,
            }
        )


def _check_content(request: HttpRequest) -> None:
    kind = request.content_type
    if not kind.startswith("image/") and kind != "application/octet-stream":
        what = f"the content type {_shown(kind)} is" if kind else "a request without a content type is"
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"{what} not taken; send the encoded image itself as the body, with Content-Type: application/octet-stream",
        )
    if request.content_length is None:
        raise HttpError(HTTPStatus.LENGTH_REQUIRED, "the request has no body; send an image with its Content-Length")
    if not request.content_length:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the body is empty; send an encoded image, such as a JPEG")


def _is_budget(text: str, most_ms: float) -> bool:
    return len(text) <= 16 and text.isascii() and text.replace(".", "", 1).isdigit() and 1 <= float(text) <= most_ms


def _no_holder(missing: tuple[int, ...]) -> str:
    return f"no reachable peer serves {name_blocks(missing)}; try again"


def _shown(text: str) -> str:
    """Quote a value from a client for an error."""
    return repr(printable(text[:_MAX_SHOWN]))
