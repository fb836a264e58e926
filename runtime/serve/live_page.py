"""The page at ``/``: one file that shows peers, links and answers as they happen, by server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections import deque
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ls_edge.runtime.serve.service import RETRY_AFTER, Service, until_gone
from ls_edge.runtime.source.results import Answer

MAX_WATCHERS = 16
"""Limit of pages that are open at the same time."""
_RECENT = 60
"""Number of answers that a page shows when it is opened."""
_INTERVAL_S = 0.5
"""Interval of events, in seconds."""
_SEND_S = 10.0
"""Seconds after which a client that does not read its events is dropped."""


class LivePage:
    """The page, its events, and the recent answers that it shows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._html = files("ls_edge.runtime.serve").joinpath("page.html").read_text(encoding="utf-8")
        self._numbers = itertools.count(1)
        self._recent: deque[tuple[Answer, int]] = deque(maxlen=_RECENT)
        self._watchers = 0

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

    async def events(self, _request: Request) -> _Events:
        """Return a stream of the state and the answers since the event before."""
        if self._watchers >= MAX_WATCHERS:
            raise HTTPException(503, f"{MAX_WATCHERS} pages are open, the limit; close one", RETRY_AFTER)
        return _Events(self)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Send events until the client goes away or the server stops."""
        gone = asyncio.ensure_future(until_gone(receive))
        self._watchers += 1
        shown = 0
        try:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not gone.done() and not self._service.is_stopping:
                answers = [_event_of(answer, number) for answer, number in self._recent if number > shown]
                shown = answers[-1]["number"] if answers else shown
                event = json.dumps({"status": self._service.status(), "answers": answers}, allow_nan=False)
                message: Message = {
                    "type": "http.response.body",
                    "body": f"data: {event}\n\n".encode(),
                    "more_body": True,
                }
                await asyncio.wait_for(send(message), _SEND_S)
                await asyncio.wait((gone,), timeout=_INTERVAL_S)
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        except asyncio.TimeoutError:
            pass  # uvicorn closes the connection of a response without its end
        finally:
            self._watchers -= 1
            gone.cancel()


class _Events(Response):
    """Response that streams the events of a page."""

    def __init__(self, page: LivePage) -> None:
        super().__init__()
        self._page = page

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self._page.stream(receive, send)


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
