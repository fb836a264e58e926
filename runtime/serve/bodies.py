"""Request bodies: limits of size, memory and time, and forms."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

from aiohttp import web

from ls_edge.runtime.serve.inference_protocol import shown
from ls_edge.runtime.serve.replies import RETRY_AFTER, Refusal

RECEIVE_S = 60.0
"""Maximum time to receive a body, in seconds."""
MOST_HELD = 256 << 20
"""Memory for the bodies of all requests, in bytes."""
_MOST_PARTS, _MOST_HEAD = 100, 1 << 13
"""Maximum parts of a form, and bytes of the header of each that are read."""
_BOUNDARY = re.compile(r'boundary="?([^";\s]{1,70})', re.IGNORECASE)
_FILE = re.compile(rb"^content-disposition:.*;\s*filename", re.IGNORECASE | re.MULTILINE)


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
        encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
        if encoding not in ("", "identity", "gzip", "deflate"):  # aiohttp would take the body as it is
            raise Refusal(415, f"the content encoding {shown(encoding)} is not supported; use gzip, deflate or none")
        held = [0]
        if (request.content_length or 0) > self.most:
            raise self._too_large
        try:
            body = await self._receive(request, held)
            if form:
                body = _form_file(body, request.headers["Content-Type"])
            self._held += len(body) - held[0]
            held[0] = len(body)
            yield body
        finally:
            self._held -= held[0]

    async def _receive(self, request: web.Request, held: list[int]) -> bytes:
        try:
            return await asyncio.wait_for(self._whole(request, held), self._receive_s)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body was not complete after {self._receive_s:g} s; send it faster") from None
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not valid: its chunks, its length or its encoding are wrong") from None

    async def _whole(self, request: web.Request, held: list[int]) -> bytes:
        """Return the body; ``held`` is what has arrived of it, since what is announced takes no memory."""
        # request.read() keeps a copy in the request, which would live until a garbage collection.
        chunks = list[bytes]()
        async for chunk in request.content.iter_any():
            chunks.append(chunk)
            held[0] += len(chunk)
            self._held += len(chunk)
            if held[0] > self.most:
                raise self._too_large
            if self._held > max(MOST_HELD, 2 * self.most):
                raise Refusal(503, f"the images of other clients fill {MOST_HELD >> 20} MiB; try again", RETRY_AFTER)
        return b"".join(chunks)


def _form_file(body: bytes, kind: str) -> bytes:
    """Return the only file of a form, and ignore its other fields.

    The reader of aiohttp takes a line or a part at a time, and no other request is served while there are millions.
    """
    boundary = _BOUNDARY.search(kind)
    parts = (
        []
        if boundary is None
        else (b"\r\n" + body).split(f"\r\n--{boundary[1]}".encode(errors="replace"), _MOST_PARTS + 1)
    )
    if not parts or not parts[-1].startswith(b"--"):
        raise Refusal(400, "the form cannot be read; send one file in multipart/form-data")
    split = (part.partition(b"\r\n\r\n") for part in parts)
    files = [content for head, _, content in split if _FILE.search(head[:_MOST_HEAD])]
    if len(files) != 1:
        raise Refusal(400, f"the form has {len(files)} files; send one, as curl -F file=@photo.jpg does")
    return files[0]
