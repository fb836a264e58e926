"""Decoding of images of others in processes of their own; any thread may use it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.closing import Closing
from ls_edge.core.errors import BudgetExceeded, DataError, LsEdgeError, Overloaded, SourceClosed
from ls_edge.data.decoder_process import LARGE_BYTES, Job, Reply, receive, send
from ls_edge.device.child import module_command

SLOW_S = 0.1
"""Time after which an image is slow, in seconds."""
_NICENESS = 5
"""Niceness of a decoder whose image is slow: images of others are decoded meanwhile."""
WITHIN_S = 60.0
"""Time after which a decoder hangs, in seconds; its CPU time is limited anyway."""


class Decoded(NamedTuple):
    """A decoded image."""

    pixels: np.ndarray
    """float32 ``[3, H, W]``; empty if only its orientation was read."""
    is_turned: bool
    """Whether the image has an EXIF orientation that was not applied."""


class Decoders(Closing):
    """Processes that decode images, as many as are used at the same time; a context manager."""

    def __init__(self) -> None:
        self._idle: list[_Decoder] = []
        self._factory: _Factory | None = None
        self._lock = threading.Lock()
        self._memory = threading.Condition()
        self._used = 0
        """Memory of the large images that are decoded, at most that of the largest."""
        self._is_closed = False

    def decode(
        self,
        spec: ImageSpec | None,
        content: bytes,
        name: str = "image",
        *,
        end: float = math.inf,
        on_slow: Callable[[], None] = lambda: None,
    ) -> Decoded:
        """Return what the stem takes for an encoded image, or its orientation alone if ``spec`` is None.

        ``on_slow`` is called once if the image is large or takes long. A large image waits for memory, until ``end`` by
        the monotonic clock. Raise :class:`DataError` if the image cannot be decoded within its memory and CPU time.
        """
        try:
            decoder = self._take()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
                raise
            raise Overloaded(f"nothing can decode the image: {error.strerror}; try again") from None
        try:
            with contextlib.ExitStack() as large:

                def wait(asked: int) -> None:
                    self._reserve(asked, min(end - time.monotonic(), WITHIN_S))
                    large.callback(self._reserve, -asked)

                reply, pixels = decoder.ask(Job(name, spec), content, wait, on_slow)
        except (OSError, EOFError):
            decoder.kill()
            raise DataError(
                f"cannot decode {name}: it takes too much memory or time; save it again, as PNG or JPEG"
            ) from None
        except BaseException:
            decoder.kill()
            raise
        if reply.is_last or decoder.is_slow:
            decoder.kill()
        else:
            self._keep(decoder)
        if reply.error:
            raise DataError(reply.error)
        return Decoded(np.frombuffer(pixels, np.float32).reshape(reply.shape or (0,)), reply.is_turned)

    def start(self) -> None:
        """Start a process now, which otherwise delays the first image."""
        with contextlib.suppress(SourceClosed):
            self._keep(self._take())

    def close(self) -> None:
        """End all processes, also those that decode."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().kill()
            if self._factory is not None and self._factory.process.returncode is None:
                os.killpg(self._factory.process.pid, signal.SIGKILL)  # its decoders, too
                self._factory.close()
                self._factory = None

    def _reserve(self, memory: int, timeout: float = 0.0) -> None:
        """Reserve memory as soon as there is enough, or return it."""
        with self._memory:
            if not self._memory.wait_for(lambda: self._used + memory <= LARGE_BYTES, timeout):
                raise BudgetExceeded("the budget ended before the image was decoded; give it more time")
            self._used += memory
            self._memory.notify_all()

    def _keep(self, decoder: _Decoder) -> None:
        with self._lock:
            if self._is_closed:
                decoder.kill()
            else:
                self._idle.append(decoder)

    def _take(self) -> _Decoder:
        """Return a decoder that waits, or a new one."""
        with self._lock:
            if self._is_closed:
                raise SourceClosed("the decoders are closed")
            while self._idle:
                decoder = self._idle.pop()
                if decoder.is_alive:
                    return decoder
                decoder.kill()
            if self._factory is not None:
                try:
                    return self._factory.fork()
                except (ConnectionError, EOFError, TimeoutError):  # it was killed
                    self._factory.close()
                    self._factory = None
            self._factory = _Factory()
            try:
                return self._factory.fork()
            except (ConnectionError, EOFError):
                raise LsEdgeError("the process that decodes images ended at its start; see 'ls-edge doctor'") from None


class _Factory(Closing):
    """The process that forks decoders."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  our own words
                [*module_command("ls_edge.data.decoder_process"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the decoders are in its process group
                stderr=subprocess.DEVNULL,  # libtiff prints about damaged files without end
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process with threads cannot be forked
            )
        self._control.settimeout(WITHIN_S)

    def fork(self) -> _Decoder:
        """Return a new decoder; raise :class:`OSError` or :class:`EOFError` if this process has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
                number = self._control.recv(4)
                if not number:
                    raise EOFError
            except BaseException:
                ours.close()
                raise
        return _Decoder(ours, *struct.unpack("<I", number))

    def close(self) -> None:
        self._control.close()
        self.process.kill()
        self.process.wait()


class _Decoder:
    """A decoder, used by one thread at a time."""

    def __init__(self, connection: socket.socket, process: int) -> None:
        self._connection = connection
        self._process = process
        self.is_slow = False
        """Whether its niceness was raised, which cannot be undone."""

    @property
    def is_alive(self) -> bool:
        """Whether the process, which waits, is still there."""
        return not self._has_news(0.0)

    def ask(
        self, job: Job, content: bytes, wait: Callable[[int], None], on_slow: Callable[[], None]
    ) -> tuple[Reply, bytearray]:
        """Return the reply about an image, and its pixels; ``wait`` waits for memory."""
        self._connection.settimeout(WITHIN_S)
        send(self._connection, job, content)
        if not self._has_news(SLOW_S):
            self._slow_down(on_slow)
        head, pixels = receive(self._connection)
        reply = msgspec.msgpack.decode(head, type=Reply)
        if reply.asks:
            self._slow_down(on_slow)
            wait(reply.asks)
            self._connection.sendall(b"\0")
            head, pixels = receive(self._connection)
            reply = msgspec.msgpack.decode(head, type=Reply)
        return reply, pixels

    def _has_news(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the process has sent something or ended."""
        poll = select.poll()  # select() takes no descriptor above 1023, and a server has thousands
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def _slow_down(self, on_slow: Callable[[], None]) -> None:
        if not self.is_slow:
            self.is_slow = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process, _NICENESS)
            on_slow()

    def kill(self) -> None:
        """End the process, whatever it does, unless it has ended: another one may have its number then."""
        with contextlib.suppress(OSError):
            if self.is_alive:
                os.kill(self._process, signal.SIGKILL)
        self._connection.close()
