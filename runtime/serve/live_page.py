"""The page at ``/``: one file that shows peers, links and answers as they happen, by server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ls_edge.runtime.serve.service import RETRY_AFTER, Service
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
        self._numbers = itertools.count(1)
        self._recent: deque[tuple[Answer, int]] = deque(maxlen=_RECENT)
        self.watchers = 0
        """Pages that follow events."""

    def note(self, *answers: Answer) -> None:
        """Show answers on the pages that are open."""
        self._recent.extend(zip(answers, self._numbers, strict=False))

    async def show(self, _request: Request) -> Response:
        """Return the page, which loads nothing else and calls this server alone."""
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:; "
            "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return Response(
            self._html.replace("{{nonce}}", nonce), media_type="text/html", headers={"Content-Security-Policy": policy}
        )

    async def events(self, _request: Request) -> Response:
        """Return a stream of the state and the answers since the event before."""
        if self.watchers >= MAX_WATCHERS:
            raise HTTPException(503, f"{MAX_WATCHERS} pages are open, the limit; close one", RETRY_AFTER)
        return _Events(self)

    async def stream(self) -> AsyncIterator[str]:
        """Yield events until the server stops."""
        shown = 0
        while not self._service.is_stopping:
            answers = [_event_of(answer, number) for answer, number in self._recent if number > shown]
            shown = answers[-1]["number"] if answers else shown
            event = json.dumps({"status": self._service.status(), "answers": answers}, allow_nan=False)
            yield f"data: {event}\n\n"
            await asyncio.sleep(_INTERVAL_S)


class _Events(StreamingResponse):
    """Response that streams events, and counts as a watcher from the moment that it was allowed to."""

    def __init__(self, page: LivePage) -> None:
        super().__init__(page.stream(), media_type="text/event-stream")
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._page.watchers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._page.watchers -= 1


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
