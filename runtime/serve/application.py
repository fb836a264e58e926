"""HTTP application of ``ls-edge serve``: its paths and their handlers.

``docs/serve.md`` describes the interface, ``openapi.json`` each request and response.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError
from ls_edge.core.parts import shown_parts
from ls_edge.runtime.serve import inference_protocol as v2
from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.bodies import Bodies
from ls_edge.runtime.serve.live_page import LivePage
from ls_edge.runtime.serve.middleware import Middleware, add_headers
from ls_edge.runtime.serve.replies import RETRY_AFTER, Refusal, json_response
from ls_edge.runtime.serve.service import Service, seconds_until
from ls_edge.version import __version__

T = TypeVar("T")

DEFAULT_TOP = 3
_QUICK_JSON = 16 << 10
"""Maximum bytes of JSON parsed on the event loop, in 0.06 ms; a thread switch takes 0.2 ms, and 1 ms under load."""
_RAW_KINDS = ("application/octet-stream", "application/x-www-form-urlencoded")
"""Content types of an encoded image, in addition to ``image/...``; the second is what curl sends by default."""


class Api:
    """Handlers of all paths."""

    def __init__(self, service: Service, access: Access, bodies: Bodies) -> None:
        self._service = service
        self._bodies = bodies
        self._page = LivePage(service, access)
        self._converting = asyncio.Lock()
        self._description = files("ls_edge.runtime.serve").joinpath("openapi.json").read_text(encoding="utf-8")
        middleware = Middleware(access, service.registry)
        self.application = web.Application(middlewares=[middleware.answer], client_max_size=bodies.most)
        self.application.on_response_prepare.append(add_headers)
        self.application.add_routes(self._routes())

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.post("/predict", self._page.counting(self._predict)),
            web.get("/", self._page.show),
            web.get("/events", self._page.events),
            web.get("/health/live", self._live),
            web.get("/health/ready", self._ready),
            web.get("/status", self._status),
            web.get("/metrics", self._metrics),
            web.get("/openapi.json", self._openapi),
            web.get("/v2", self._v2_server),
            web.get("/v2/health/live", self._live),
            web.get("/v2/health/ready", self._ready),
        ]
        # Names of models on the Hub have slashes.
        for path in ("/v2/models/{model:.+}/versions/{version:.+}", "/v2/models/{model:.+}"):
            routes += [
                web.get(f"{path}/ready", self._v2_ready),
                web.post(f"{path}/infer", self._page.counting(self._v2_infer)),
                web.get(path, self._v2_metadata),
            ]
        return routes

    # Images.

    async def _predict(self, request: web.Request) -> web.Response:
        top, budget_ms, with_logits = _parameters(request.query, self._service.source.settings.budget_ms)
        async with self._image(request) as body:
            end = time.monotonic() + budget_ms / 1e3
            async with self._service.place(end) as place:
                notes: list[str] = []

                def decode(on_slow: Callable[[], None]) -> list[Any]:
                    return [self._prepare(body, "the body", end, on_slow, notes)]

                (answer,) = await self._service.answer(place, decode, end)
        self._page.note(answer)
        record = answer.record
        return json_response(
            {
                "top": [{"label": label, "probability": probability} for label, probability in answer.top(top)],
                "degraded": answer.degraded,
                "latency_ms": answer.latency_ms,
                "order": record.steps if record.is_plain else None,
                "skipped": record.skipped,
                "why_skipped": record.why_skipped,
                **({} if record.is_plain else {"waves": record.waves}),
                **({"logits": answer.logits.tolist()} if with_logits else {}),
                **({"notes": notes} if notes else {}),
            }
        )

    @contextlib.asynccontextmanager
    async def _image(self, request: web.Request) -> AsyncIterator[bytes]:
        """Yield the encoded image in a body or form."""
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        is_form = kind == "multipart/form-data"
        if kind and not is_form and not kind.startswith("image/") and kind not in _RAW_KINDS:
            raise Refusal(
                415, f"the content type {v2.shown(kind)} is not supported; send the encoded image as the body"
            )
        async with self._bodies.read(request, form=is_form) as body:
            if not body:
                raise Refusal(400, "the body is empty; send an encoded image, such as a JPEG")
            yield body

    def _prepare(
        self,
        image: bytes | np.ndarray,
        name: str,
        end: float,
        on_slow: Callable[[], None],
        notes: list[str],
    ) -> Any:
        """Return what the source submits for an image, and add a note if its orientation is ignored."""
        source = self._service.source
        if isinstance(image, np.ndarray):
            return source.preprocess(image, name)
        spec = source.bundle.manifest.image
        is_turned, prepared = False, source.preprocess(image, name) if source.is_thin else None
        if not source.is_thin or spec.exif_orientation is not True:
            decoded = self._service.decoders.decode(
                None if source.is_thin else spec, image, name, end=end, on_slow=on_slow
            )
            prepared, is_turned = decoded.pixels if prepared is None else prepared, decoded.is_turned
        if is_turned:
            subject = name.replace("the body", "the image")
            notes.append(
                f"{subject} has an EXIF orientation that this model ignores; turn it upright for a better answer"
            )
        return prepared

    # The Open Inference Protocol.

    async def _v2_server(self, _request: web.Request) -> web.Response:
        return json_response({"name": "ls-edge", "version": __version__, "extensions": list(v2.EXTENSIONS)})

    async def _v2_metadata(self, request: web.Request) -> web.Response:
        bundle = self._v2_bundle(**request.match_info)
        return json_response(v2.metadata(bundle, is_thin=self._service.source.is_thin))

    async def _v2_ready(self, request: web.Request) -> web.Response:
        self._v2_bundle(**request.match_info)
        return await self._ready(request)

    async def _v2_infer(self, request: web.Request) -> web.Response:
        self._v2_bundle(**request.match_info)
        length = request.headers.get(v2.HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) <= 10):
            raise Refusal(400, f"{v2.HEADER_LENGTH} {v2.shown(length)}: use a number of bytes")
        async with self._bodies.read(request) as body:
            budget_ms, json_length = self._service.source.settings.budget_ms, None if length is None else int(length)
            end = time.monotonic() + budget_ms / 1e3
            is_quick = (len(body) if json_length is None else json_length) <= _QUICK_JSON
            if timeout_us := await self._convert(is_quick, v2.timeout_of, body, json_length):
                end = min(end, time.monotonic() + timeout_us / 1e6)
            async with self._service.place(end) as place:
                self._v2_bundle(**request.match_info)  # the model may have changed while the request waited
                try:
                    asked, binary = await self._convert(is_quick, v2.parse_request, body, json_length)
                except DataError as error:
                    raise Refusal(400, str(error)) from None

                notes: list[str] = []

                def decode(on_slow: Callable[[], None]) -> list[Any]:
                    def prepare(image: bytes | np.ndarray, name: str) -> Any:
                        seconds_until(end)  # its place is needed then
                        return self._prepare(image, name, end, on_slow, notes)

                    source = self._service.source
                    return v2.images_of(
                        asked, binary, source.bundle.manifest.image.size, prepare, is_thin=source.is_thin
                    )

                answers = await self._service.answer(place, decode, end)
                if len({answer.classes for answer in answers}) > 1:  # the model changed between two of the images
                    answers = await self._service.answer(place, decode, end)
        self._page.note(*answers)
        reply, json_length = await self._convert(
            len(answers) == 1, v2.response_of, asked, self._service.source.bundle, answers, notes
        )
        if json_length is None:
            return web.Response(body=reply, content_type="application/json")
        headers = {v2.HEADER_LENGTH: str(json_length)}
        return web.Response(body=reply, content_type="application/octet-stream", headers=headers)

    async def _convert(self, is_quick: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the protocol, on a thread unless it is quick, one at a time: it may keep all others."""
        if is_quick:
            return function(*arguments)
        async with self._converting:
            return await asyncio.to_thread(function, *arguments)

    def _v2_bundle(self, model: str, version: str | None = None) -> Bundle:
        """Return the bundle that a path names, or raise :class:`Refusal`."""
        bundle = self._service.source.bundle
        if model != bundle.manifest.model:
            raise Refusal(404, f"model {v2.shown(model)} is not found; this server has {bundle.manifest.model}")
        if version not in (None, v2.ONLY_VERSION, v2.version_of(bundle)):
            raise Refusal(404, f"version {v2.shown(version)} is not found; this server has {v2.version_of(bundle)}")
        return bundle

    # Health and status.

    async def _live(self, _request: web.Request) -> web.Response:
        if not self._service.source.is_open:
            raise Refusal(503, "the source is closed", RETRY_AFTER)
        return json_response({"live": True})

    async def _ready(self, _request: web.Request) -> web.Response:
        ready = self._service.is_ready
        missing = self._service.source.snapshot.missing_blocks
        return json_response({"ready": ready, "missing_blocks": shown_parts(missing)}, 200 if ready else 503)

    async def _status(self, _request: web.Request) -> web.Response:
        return json_response(self._service.status())

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._service.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _openapi(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._description, content_type="application/json")


def _parameters(values: Mapping[str, str], most_ms: float) -> tuple[int, float, bool]:
    """Return the number of classes, the budget in ms, and whether to include logits."""
    unknown = values.keys() - {"top", "budget_ms", "logits"}
    if unknown:
        raise Refusal(400, f"unknown parameter {v2.shown(min(unknown))}; use top, budget_ms or logits")
    if len(values) > len({*values}):
        raise Refusal(400, "a parameter is given twice; give each once")
    accepted = {  # pattern, least and most
        "top": (r"\d{1,9}", 1, math.inf, "a whole number from 1"),
        "budget_ms": (r"\d{1,9}(\.\d*)?", 1, most_ms, f"milliseconds from 1 to {most_ms:g}"),
        "logits": (r"\d", 0, 1, "0 or 1"),
    }
    for name, value in values.items():
        pattern, least, most, use = accepted[name]
        # Only ASCII digits: float() would also accept 1_0, nan or ٣.
        if not re.fullmatch(pattern, value, re.ASCII) or not least <= float(value) <= most:
            raise Refusal(400, f"{name} {v2.shown(value)}: use {use}")
    return int(values.get("top", DEFAULT_TOP)), float(values.get("budget_ms", most_ms)), values.get("logits") == "1"
