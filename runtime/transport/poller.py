"""Wait for ZeroMQ sockets, at a cost that depends only on those with messages, and for other threads.

``zmq_poll`` asks every socket in every call, so a peer's turn would take longer with each further peer. Here the
operating system waits for the descriptor of each socket (``ZMQ_FD``). It becomes readable when libzmq has an event for
the socket, but does not stay readable while there are messages: any call on the socket may process the event. Before
the next wait, every socket that was used is therefore asked again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import selectors
import socket
import time

import zmq

_SOCKADDR, _LONGEST = 16, 128
"""Size of a zeroed AF_UNSPEC address, which ends the connection of a socket that connects to it; longest address."""
_libc = ctypes.CDLL(None)
# Plain integers: arithmetic on the enums takes as long as a small send.
_READABLE, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)


class SocketPoller:
    """Sockets and file descriptors that one thread waits for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._used: dict[zmq.Socket[bytes], None] = {}
        self._descriptors: set[int] = set()

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Add a socket."""
        self._selector.register(int(socket.getsockopt(zmq.FD)), selectors.EVENT_READ, socket)
        self.used(socket)

    def add_descriptor(self, descriptor: int) -> None:
        """Add a file descriptor."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Remove a socket, before it is closed."""
        self._selector.unregister(int(socket.getsockopt(zmq.FD)))
        self._used.pop(socket, None)

    def remove_descriptor(self, descriptor: int) -> None:
        """Remove a file descriptor, before it is closed."""
        self._selector.unregister(descriptor)
        self._descriptors.discard(descriptor)

    def used(self, socket: zmq.Socket[bytes]) -> None:
        """Check this socket in the next ``wait``; call this after any use but a read that emptied the socket."""
        self._used[socket] = None

    def can_read(self, descriptor: int) -> bool:
        """Return whether the latest :meth:`wait` found a descriptor readable."""
        return descriptor in self._descriptors

    def wait(self, timeout: float) -> list[zmq.Socket[bytes]]:
        """Wait at most ``timeout`` seconds; return the sockets that have messages."""
        until = time.monotonic() + timeout
        while True:
            used, self._used = self._used, {}
            ready = {socket: None for socket in used if has_messages(socket)}
            # Rounded up to milliseconds; otherwise the last millisecond would be spent polling.
            left = 0.0 if ready else max(0.0, math.ceil((until - time.monotonic()) * 1e3) / 1e3)
            selected = self._selector.select(left)
            self._descriptors = {key.fd for key, _ in selected if key.data is None}
            ready |= {key.data: None for key, _ in selected if key.data is not None and has_messages(key.data)}
            if ready or self._descriptors or left == 0.0:
                return list(ready)

    def close(self) -> None:
        """Close the selector, but not the sockets."""
        self._selector.close()


def has_messages(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a socket has messages; unless it does, the next one makes its descriptor readable."""
    return bool(int(socket.getsockopt(_EVENTS)) & _READABLE)


class Waker:
    """Signal with which any thread ends the wait of the polling thread."""

    def __init__(self) -> None:
        self.woken = False
        """Whether :meth:`wake` was called; reset by the polling thread."""
        self.asleep = False
        """Whether the polling thread waits, so that only the descriptor wakes it."""
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self.descriptor = self._ours.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.descriptor, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the wait."""
        self.woken = True  # read by the polling thread after it has set `asleep`, so one of the two is seen
        if self.asleep:
            self.asleep = False
            with contextlib.suppress(OSError):  # closed
                self._theirs.send(b"x")

    def wait(self, timeout: float) -> None:
        """Wait for :meth:`wake` alone."""
        self._selector.select(timeout)

    def drain(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while len(self._ours.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Close the descriptors."""
        self._selector.close()
        self._ours.close()
        self._theirs.close()


def abort(descriptor: int, port: int) -> bool:
    """End both directions of the connection that a listener on ``port`` accepted, as an error; return whether it did.

    libzmq may have closed the descriptor, whose number then belongs to something else in this process.
    """
    ends = _ends_of(descriptor)
    if ends is None or int.from_bytes(ends[0][2:4], "big") != port:
        return False
    _libc.connect(descriptor, bytes(_SOCKADDR), _SOCKADDR)
    return True


def abort_if_to_itself(descriptor: int) -> bool:
    """Abort a connection that begins and ends at one socket; return whether it did.

    TCP allows that if the port of a dead local process is dialed from the same port, which it would then keep in use.
    """
    ends = _ends_of(descriptor)
    return ends is not None and ends[0] == ends[1] and abort(descriptor, int.from_bytes(ends[0][2:4], "big"))


def _ends_of(descriptor: int) -> list[bytes] | None:
    """Return the addresses of both ends of a TCP connection, as the kernel writes them; None for anything else.

    A socket of Python would make the descriptor non-blocking if the program has a default timeout.
    """
    kind, size, ends = ctypes.c_int(), ctypes.c_uint(4), []
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, socket.SO_PROTOCOL, ctypes.byref(kind), ctypes.byref(size))
    for end in (_libc.getsockname, _libc.getpeername):
        address, size = ctypes.create_string_buffer(_LONGEST), ctypes.c_uint(_LONGEST)
        if kind.value != socket.IPPROTO_TCP or end(descriptor, address, ctypes.byref(size)):
            return None
        ends.append(address.raw)
    return ends
