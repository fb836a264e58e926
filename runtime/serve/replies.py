"""JSON responses and refusals of ``ls-edge serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from aiohttp import web

from ls_edge.core.errors import printable

RETRY_AFTER = {"Retry-After": "1"}
HEADERS = {"Server": "ls-edge", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
"""Headers of every response."""


class Refusal(Exception):
    """Refusal of a request: a status, one line for the client, and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers

    def response(self) -> web.Response:
        """Return the response, ``{"error": "one line"}``."""
        return json_response({"error": printable(str(self))}, self.status, self.headers)


def json_response(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with a JSON document."""
    body = json.dumps(document, allow_nan=False).encode() + b"\n"
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
