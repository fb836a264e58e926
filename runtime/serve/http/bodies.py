"""Request bodies: limits of size and time, content encodings, and forms."""

from __future__ import annotations

import asyncio
import zlib
from tempfile import SpooledTemporaryFile
from typing import IO

from aiohttp import BodyPartReader, HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage

from ls_edge.core.logs import LoggedCounts
from ls_edge.runtime.serve.http.connection import CONTINUE, RECEIVE_S
from ls_edge.runtime.serve.http.replies import RETRY_AFTER, Refusal

MAX_FIELDS = 16
"""Maximum number of fields in a form."""
_IN_MEMORY = 512 << 10
"""Maximum size of a body in memory; a larger one is on disk until its image has a place."""
_CHUNK = 64 << 10
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window bits for zlib by content encoding."""


class BodyReader:
    """Reader of bodies of at most ``most`` bytes, both compressed and decompressed."""

    def __init__(self, most: int, receive_s: float = RECEIVE_S) -> None:
        self._most = most
        self._receive_s = receive_s
        self._faults = LoggedCounts()
        self._too_large = Refusal(413, f"the body has more than {most} bytes; send a smaller one")

    async def read(self, request: web.BaseRequest, *, form: bool = False) -> IO[bytes]:
        """Return the body, or the file of a form; raise :class:`Refusal`."""
        encoding = ",".join(request.headers.getall("Content-Encoding", ())).strip().lower() or "identity"
        if encoding != "identity" and (form or encoding not in _WINDOWS):
            taken = "identity" if form else "gzip, deflate"
            raise Refusal(415, f"the content encoding is not supported; use {taken}", {"Accept-Encoding": taken})
        if (request.content_length or 0) > self._most:
            raise self._too_large
        expected = request.headers.get("Expect")
        if expected is not None:
            if expected.lower() != "100-continue":
                raise Refusal(417, "the expectation is not supported; use 100-continue")
            if request.version == HttpVersion11 and not request.content.is_eof() and request.transport is not None:
                request.transport.write(CONTINUE)
        body = SpooledTemporaryFile[bytes](_IN_MEMORY)
        reading = self._read_form(request, body) if form else self._read_body(request, body, encoding)
        try:
            await asyncio.wait_for(reading, self._receive_s)
        except BaseException as error:
            body.close()
            if isinstance(error, asyncio.TimeoutError):
                raise Refusal(408, f"the body was not complete after {self._receive_s:g} s; send it faster") from None
            if isinstance(error, web.RequestPayloadError):
                raise Refusal(400, "the body is not valid: its chunks or its length are wrong") from None
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                self._faults.note("disk", "cannot store the body of a request", why=str(error))
                why = "the server has no room to store the body; free space in its temporary folder, or set TMPDIR"
                raise Refusal(503, why, RETRY_AFTER) from None
            raise
        return body

    async def _read_body(self, request: web.BaseRequest, body: IO[bytes], encoding: str) -> None:
        unpack = None if encoding == "identity" else zlib.decompressobj(_WINDOWS[encoding])
        received = size = 0
        while part := await request.content.readany():
            if not received and encoding == "deflate" and part[0] & 15 != zlib.DEFLATED:
                unpack = zlib.decompressobj(-zlib.MAX_WBITS)  # raw deflate, as some clients send it
            received += len(part)
            if unpack is not None:
                try:
                    part = unpack.decompress(part, self._most + 1 - size)
                except zlib.error:
                    raise Refusal(400, f"the body is not valid {encoding}, which Content-Encoding announces") from None
            size += len(part)
            if max(received, size) > self._most:
                raise self._too_large
            body.write(part)
        if unpack is not None and (not unpack.eof or unpack.unused_data):
            raise Refusal(400, f"the body is not a single complete {encoding} stream")

    async def _read_form(self, request: web.BaseRequest, body: IO[bytes]) -> None:
        """Write the only file of a form, and ignore its other fields."""
        files = fields = received = 0
        try:
            parts = await request.multipart()
            while (part := await parts.next()) is not None:
                is_file = isinstance(part, BodyPartReader) and part.filename is not None
                fields, files = fields + 1, files + is_file
                if not isinstance(part, BodyPartReader) or fields > MAX_FIELDS or files > 1:
                    raise ValueError
                while chunk := await part.read_chunk(_CHUNK):
                    received += len(chunk)
                    if received > self._most:
                        raise self._too_large
                    if is_file:
                        body.write(part.decode(chunk))
        except (ValueError, AssertionError, LookupError, RuntimeError, BadHttpMessage):
            raise Refusal(400, "the form cannot be read; send one file in multipart/form-data") from None
        if not files:
            raise Refusal(400, "the form has no file; send one, as curl -F file=@photo.jpg does")
