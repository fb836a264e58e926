"""The page at ``/``: one file that shows peers, links and answers as they happen, by server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections import deque
from importlib.resources import files
from typing import Any

from aiohttp import web

from ls_edge.runtime.serve.http.replies import RETRY_AFTER, Refusal
from ls_edge.runtime.serve.http.router import begin_response
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.results import Answer

MAX_WATCHERS = 16
"""Limit of pages that are open at the same time."""
_RECENT = 60
"""Number of answers that a page shows when it is opened."""
_INTERVAL_S = 0.5
"""Interval of events, in seconds."""


class LivePage:
    """The page, its events, and the recent answers that it shows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._html = files("ls_edge.runtime.serve").joinpath("page.html").read_text(encoding="utf-8")
        self._run = secrets.token_hex(8)
        """Different after each start, so that pages know that the numbers of answers begin again."""
        self._numbers = itertools.count(1)
        self._recent: deque[tuple[Answer, int]] = deque(maxlen=_RECENT)
        self.watchers = 0
        """Pages that follow events."""

    def note(self, *answers: Answer) -> None:
        """Show answers on the pages that are open."""
        self._recent.extend(zip(answers, self._numbers, strict=False))

    async def show(self, _request: web.BaseRequest) -> web.Response:
        """Return the page, which loads nothing else and calls this server alone."""
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:; "
            "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return web.Response(
            text=self._html.replace("{{nonce}}", nonce),
            content_type="text/html",
            headers={"Content-Security-Policy": policy},
        )

    async def events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send the state, and the answers since the event before, until the server stops."""
        if self.watchers >= MAX_WATCHERS:
            raise Refusal(503, f"{MAX_WATCHERS} pages are open, the limit; close one", RETRY_AFTER)
        # nginx would collect events for some seconds.
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        response, shown = web.StreamResponse(headers=headers), 0
        self.watchers += 1
        try:
            await begin_response(request, response)
            while not self._service.is_stopping:
                answers = [_event_of(answer, number) for answer, number in self._recent if number > shown]
                shown = answers[-1]["number"] if answers else shown
                event = {"run": self._run, "status": self._service.status(), "answers": answers}
                await response.write(f"data: {json.dumps(event, allow_nan=False)}\n\n".encode())
                await asyncio.sleep(_INTERVAL_S)
        finally:
            self.watchers -= 1
        return response


def _event_of(answer: Answer, number: int) -> dict[str, Any]:
    record = answer.record
    ((label, probability),) = answer.top(1)
    return {
        "number": number,
        "label": label,
        "probability": round(probability, 4),
        "degraded": answer.degraded,
        "skipped": record.skipped,
        "latency_ms": round(answer.latency_ms, 2),
        "waves": record.waves,
    }
