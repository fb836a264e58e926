"""A process that decodes images of others, with limits of memory and CPU time.

A file of some kilobytes can make a decoder allocate gigabytes, compute for minutes, or crash, in ways that no check of
its header foresees. Here it ends a process that nothing else depends on. ``python -m`` starts the factory: it has
loaded the libraries, so that it can fork a decoder within milliseconds, for each socket that it receives.
:mod:`ls_edge.data.decoders` is the other side.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, LsEdgeError

if TYPE_CHECKING:
    from ls_edge.data.preprocess import Preprocessor

SMALL_PIXELS = 1 << 22
"""Maximum pixels of a small image."""
SMALL_BYTES, LARGE_BYTES, PIXEL_BYTES = 80 << 20, 400 << 20, 16
"""Memory to decode a small image, in addition to twice its file, for a large one at most, and for each further pixel:
67 million pixels of RGB, or 25 million of WebP."""
HEADER_S, PIXELS_S = 0.5, 0.25
"""CPU time until the size of an image is known, then as much again, and that for each million pixels. WebP, the
slowest format, takes 0.05 s for a million on a core of an AMD EPYC."""
_SPARE_BYTES = 16 << 20
"""Memory that a decoder may keep; with more, it ends, and another one is forked."""
_LENGTHS = struct.Struct("<II")


class Job(msgspec.Struct, frozen=True):
    """Question about an encoded image, which follows."""

    name: str
    spec: ImageSpec | None
    """Target of the conversion; None to read its orientation alone."""


class Reply(msgspec.Struct, frozen=True):
    """Answer; an array float32 ``[3, H, W]`` follows if it was decoded."""

    error: str = ""
    shape: tuple[int, ...] = ()
    is_turned: bool = False
    """Whether the image has an EXIF orientation that was not applied."""
    asks: int = 0
    """Memory for a large image. The decoder waits for a byte before it decodes it, and another reply follows."""
    is_last: bool = False
    """Whether the decoder ends."""


def send(connection: socket.socket, head: Job | Reply, body: bytes | memoryview = b"") -> None:
    """Send a message and the bytes that follow it."""
    encoded = msgspec.msgpack.encode(head)
    connection.sendall(_LENGTHS.pack(len(encoded), len(body)) + encoded)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[bytearray, bytearray]:
    """Return a message and the bytes that follow it; raise :class:`EOFError` if the other side has gone."""
    lengths = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    return _read(connection, lengths[0]), _read(connection, lengths[1])


def _read(connection: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        read = connection.recv_into(view)
        if not read:
            raise EOFError
        view = view[read:]
    return found


def main(descriptor: int) -> None:
    """Fork a decoder for each socket that comes over the socket ``descriptor``, until that is closed."""
    import PIL.Image

    import ls_edge.data.preprocess  # noqa: F401

    PIL.Image.init()  # all that decoders need, loaded once
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process that asks decides when to end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for decoders
    control = socket.socket(fileno=descriptor)
    while found := socket.recv_fds(control, 1, 1)[1]:
        process = os.fork()
        if not process:
            control.close()
            try:
                _serve(socket.socket(fileno=found[0]))
            finally:
                os._exit(0)
        os.close(found[0])
        control.sendall(struct.pack("<I", process))


def _serve(connection: socket.socket) -> None:
    """Decode images until the other side has gone."""
    base, is_last = _size(), False
    while not is_last:
        head, body = receive(connection)
        content = bytes(body)
        del body
        reply, pixels = _answer(connection, msgspec.msgpack.decode(head, type=Job), content, base)
        is_last = _size() > base + _SPARE_BYTES
        signal.setitimer(signal.ITIMER_PROF, 0)
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # the next image may be larger
        send(connection, msgspec.structs.replace(reply, is_last=is_last), pixels)


def _answer(connection: socket.socket, job: Job, content: bytes, base: int) -> tuple[Reply, memoryview]:
    from ls_edge.data.decoding import is_turned

    nothing = memoryview(b"")

    def allow(seconds: float, memory: int) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = base + memory + 2 * len(content)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most < 0 else min(wanted, most), most))

    memory = SMALL_BYTES

    def on_header(pixels: int) -> None:
        nonlocal memory
        if pixels > SMALL_PIXELS and memory == SMALL_BYTES:
            memory = min(LARGE_BYTES, SMALL_BYTES + PIXEL_BYTES * (pixels - SMALL_PIXELS))
            send(connection, Reply(asks=memory))
            _read(connection, 1)
        allow(HEADER_S + PIXELS_S * pixels / 1e6, memory)

    allow(HEADER_S, SMALL_BYTES)
    try:
        if job.spec is None:
            return Reply(is_turned=is_turned(content)), nothing
        preprocess = _preprocessor(job.spec)
        try:
            pixels = preprocess(content, job.name, on_header)
        except DataError:
            if memory > SMALL_BYTES or content[8:12] != b"WEBP":
                raise
            on_header(1 << 25)  # libwebp allocates the whole image to open it
            pixels = preprocess(content, job.name, on_header)
        turned = job.spec.exif_orientation is not True and is_turned(content)
        return Reply(shape=pixels.shape, is_turned=turned), pixels.data.cast("B")
    except LsEdgeError as error:
        return Reply(error=str(error)), nothing


@functools.lru_cache(4)
def _preprocessor(spec: ImageSpec) -> Preprocessor:
    from ls_edge.data.preprocess import Preprocessor

    return Preprocessor(spec)


def _size() -> int:
    """Return the size of this process's memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
