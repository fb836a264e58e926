"""The page at ``/``, which shows peers, links and answers live through server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.replies import RETRY_AFTER, Refusal
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.results import Answer

MAX_WATCHERS = 16
"""Maximum number of pages that are open at the same time."""
_RECENT = 60
"""Number of recent answers that a page shows when it opens."""
_MINUTE_S = 60
"""Seconds that the numbers and the chart of the page cover."""
_MOST_ENDS = 60_000
"""Maximum number of requests kept for them: a minute at a thousand a second."""
_INTERVAL_S = 0.5
"""Interval of events, in seconds."""


class LivePage:
    """The page, its events, and the recent answers that it shows."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self._html = files("ls_edge.runtime.serve").joinpath("page.html").read_text(encoding="utf-8")
        self._run = secrets.token_hex(8)
        """Id of this start, so that pages notice when the numbers of answers begin again."""
        self._numbers = itertools.count(1)
        self._recent: deque[tuple[Answer, int]] = deque(maxlen=_RECENT)
        self._began = time.monotonic()
        self._ends: deque[tuple[float, float, bool]] = deque(maxlen=_MOST_ENDS)
        """Time, latency in ms (NaN after a failure), and whether it was degraded, for each request."""
        self.watchers = 0
        """Number of pages that receive events."""

    def note(self, *answers: Answer) -> None:
        """Show answers on all open pages."""
        self._recent.extend(zip(answers, self._numbers, strict=False))
        now = time.monotonic()
        self._ends.extend((now, answer.latency_ms, answer.degraded) for answer in answers)

    def counting(self, handle: Handler) -> Handler:
        """Return ``handle`` with its server errors counted as failed requests."""

        async def counted(request: web.Request) -> web.StreamResponse:
            try:
                return await handle(request)
            except Exception as error:
                if not isinstance(error, Refusal) or error.status >= 500:
                    self._ends.append((time.monotonic(), math.nan, False))
                raise

        return counted

    def last_minute(self) -> dict[str, Any]:
        """Return counts and quantiles of the last minute, in total and by second."""
        now = time.monotonic()
        while self._ends and now - self._ends[0][0] > _MINUTE_S:
            self._ends.popleft()
        by_second: dict[int, list[tuple[float, bool]]] = {}
        for at, latency_ms, degraded in self._ends:
            by_second.setdefault(int(now - at), []).append((latency_ms, degraded))
        everything = [end for ends in by_second.values() for end in ends]
        series = [{"ago_s": ago, **_summary(ends)} for ago, ends in by_second.items()]
        return {"seconds": min(_MINUTE_S, now - self._began), **_summary(everything), "series": series}

    async def show(self, _request: web.Request) -> web.Response:
        """Return the page, which loads no other file and contacts only this server."""
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

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send the state and the answers since the previous event, until the server stops or the token is revoked."""
        if self.watchers >= MAX_WATCHERS:
            raise Refusal(503, f"{MAX_WATCHERS} pages are open, which is the limit; close one", RETRY_AFTER)
        # Otherwise, nginx would buffer events for several seconds.
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        response, shown = web.StreamResponse(headers=headers), 0
        self.watchers += 1
        try:
            await response.prepare(request)
            with contextlib.suppress(Refusal):
                while not self._service.is_stopping:
                    self._access.check(request)
                    answers = [_event_of(answer, number) for answer, number in self._recent if number > shown]
                    shown = answers[-1]["number"] if answers else shown
                    now, views = time.monotonic(), self._service.source.snapshot.peers
                    event = {
                        "run": self._run,
                        "status": self._service.status(),
                        "answers": answers,
                        "minute": self.last_minute(),
                        "state_s": {name: round(now - view.since) for name, view in views.items()},
                    }
                    await response.write(f"data: {json.dumps(event, allow_nan=False)}\n\n".encode())
                    await asyncio.sleep(_INTERVAL_S)
        finally:
            self.watchers -= 1
        return response


def _summary(ends: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    latencies = [latency_ms for latency_ms, _ in ends if latency_ms == latency_ms]
    p50, p95 = (round(float(q), 2) for q in np.quantile(latencies, (0.5, 0.95))) if latencies else (None, None)
    degraded = sum(is_degraded for _, is_degraded in ends)
    failed = len(ends) - len(latencies)
    return {"answers": len(latencies), "degraded": degraded, "failed": failed, "p50_ms": p50, "p95_ms": p95}


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
