"""Request bodies: limits of size, memory and time, and forms."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator

from aiohttp import BodyPartReader, web

from ls_edge.runtime.serve.replies import RETRY_AFTER, Refusal

# The sender of a form controls the text of the warning, which Python would print and remember forever.
warnings.filterwarnings("ignore", module=r"aiohttp\.")

RECEIVE_S = 60.0
"""Maximum time to receive a body, in seconds."""
MOST_HELD = 256 << 20
"""Memory for the bodies of all requests, in bytes."""


class Bodies:
    """Reader of bodies of at most ``most`` bytes after decompression."""

    def __init__(self, most: int, receive_s: float = RECEIVE_S) -> None:
        self.most = most
        self._receive_s = receive_s
        self._held = 0
        self._too_large = Refusal(413, f"the body has more than {most} bytes; send a smaller one")

    @contextlib.asynccontextmanager
    async def read(self, request: web.Request, *, form: bool = False) -> AsyncIterator[bytes]:
        """Yield the body, or the file of a form; raise :class:`Refusal`."""
        is_plain = request.content_length is not None and "Content-Encoding" not in request.headers
        held = request.content_length or 0 if is_plain else self.most
        if (request.content_length or 0) > self.most:
            raise self._too_large
        if self._held and self._held + held > max(MOST_HELD, 2 * self.most):
            raise Refusal(503, f"the images of other clients fill {MOST_HELD >> 20} MiB; try again", RETRY_AFTER)
        self._held += held
        try:
            body = await self._receive(request, form=form)
            self._held += len(body) - held
            held = len(body)
            yield body
        finally:
            self._held -= held

    async def _receive(self, request: web.Request, *, form: bool) -> bytes:
        try:
            return await asyncio.wait_for(_form_file(request) if form else self._whole(request), self._receive_s)
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large from None
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body was not complete after {self._receive_s:g} s; send it faster") from None
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not valid: its chunks, its length or its encoding are wrong") from None

    async def _whole(self, request: web.Request) -> bytes:
        # request.read() keeps a copy in the request, which would live until a garbage collection.
        chunks, size = list[bytes](), 0
        async for chunk in request.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > self.most:
                raise self._too_large
        return b"".join(chunks)


async def _form_file(request: web.Request) -> bytes:
    """Return the only file of a form, and ignore its other fields."""
    files = []
    try:
        parts = await request.multipart()
        while (part := await parts.next()) is not None:
            if isinstance(part, BodyPartReader) and part.filename is not None:
                files.append(await part.read(decode=True))
    except (ValueError, AssertionError, LookupError, RuntimeError):
        raise Refusal(400, "the form cannot be read; send one file in multipart/form-data") from None
    if len(files) != 1:
        raise Refusal(400, f"the form has {len(files)} files; send one, as curl -F file=@photo.jpg does")
    return bytes(files[0])
