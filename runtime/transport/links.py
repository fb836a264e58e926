"""Links of a process: their events and messages, whichever side dialed.

A peer listens; every process dials each peer of ``peers.yaml`` (:mod:`~ls_edge.runtime.transport.connections`). An
unknown process can end its own connection and nothing else, even with a greeting of an old ZMTP version.

``Links`` transmits frames and belongs to one thread; ``node`` handles their content.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Mapping, Sequence

import zmq

from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.connections import (
    DEALER_HEARTBEATS_SLOWER,
    Dialer,
    Incoming,
    Link,
    LinkDown,
    LinkEvent,
    Listener,
    Sockets,
)
from ls_edge.runtime.transport.poller import SocketPoller, has_messages
from ls_edge.runtime.transport.zap import Curve, ZapHandler

ZERO_COPY_FROM = 1024 * 1024
"""Size from which a frame is sent without a copy, in bytes: pyzmq wakes a thread when such a frame has been sent, which
costs as much as copying half a megabyte (``docs/results.md``)."""

# Plain integers: arithmetic on the enums takes as long as a small send.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Links:
    """All links of a process."""

    def __init__(
        self,
        dial: Mapping[str, str],
        *,
        bind: str | None,
        heartbeat: HeartbeatSettings,
        max_frame: int,
        tokens_frame: int = 0,
        curve: Curve | None = None,
    ) -> None:
        """Bind and dial; accept frames of at most ``max_frame`` bytes, usually ``tokens_frame`` bytes.

        Raise :class:`LinkError` if the address is in use or cannot be bound.
        """
        self.poller = SocketPoller()
        self._sockets = Sockets(self.poller, heartbeat, max_frame, tokens_frame, curve)
        self.failed = self._sockets.failures
        self.sent_bytes = 0
        """Number of bytes of sent messages, without tokens."""
        self._lost: list[Link] = []
        """Ended links without an event of a monitor, for the next :meth:`poll`."""
        self._listener: Listener | None = None
        self._zap: ZapHandler | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(self.poller.close)
            opened.callback(self._sockets.close)
            if curve is not None:
                self._zap = ZapHandler(self._sockets.context, curve.names_by_key)
                opened.callback(self._zap.socket.close)
                self.poller.add(self._zap.socket)
            if bind is not None:
                self._listener = Listener(self._sockets, bind)
            # The other peer's ROUTER sends heartbeats with a time to live, so one side is enough between two peers.
            # libzmq cancels that time if a message follows the heartbeat. A source, which receives messages on these
            # links, therefore sends heartbeats at the usual rate, and a peer sends a few.
            slower = 1 if bind is None else DEALER_HEARTBEATS_SLOWER
            self.dialer = Dialer(self._sockets, dial, heartbeat_ms=slower * heartbeat.every_ms)
            opened.callback(self.dialer.close)
            self._close_all = opened.pop_all().close

    @property
    def refused(self) -> int:
        """Number of incoming connections whose handshake failed."""
        return self.failed[""] + (0 if self._zap is None else self._zap.refused.total())

    def poll(self, timeout: float) -> list[LinkEvent]:
        """Wait at most ``timeout`` seconds and return the events: ends of links first, then messages."""
        wait = self.dialer.dial_again()
        ready = self.poller.wait(0.0 if self._lost else min(timeout, wait))
        events: list[LinkEvent] = [LinkDown(link) for link in self._lost]
        self._lost = []
        if self._zap is not None and self._zap.socket in ready:
            self._zap.answer()
            self.poller.used(self._zap.socket)
        events += self.dialer.on_host_names()
        for socket in ready:
            name = self._sockets.monitors.get(socket)
            if name is not None:
                self._read_monitor(socket, name, events)
        for socket in ready:
            name = self._sockets.names.get(socket)
            if name is not None:
                self._read(socket, name, events)
        return events

    def send(self, link: Link, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message; return False if the link has ended or its queue is full.

        A frame of :data:`ZERO_COPY_FROM` bytes or more is not copied and must not change afterwards.
        """
        if link.dialed:
            socket = self.dialer.sockets.get(link.dialed)
        else:
            socket = None if self._listener is None else self._listener.socket
        if socket is None:
            return False
        *before, last = frames if link.dialed else (link.routing_id, *frames)
        try:
            for part in before:
                socket.send(part, _MORE, copy=len(part) < ZERO_COPY_FROM)
            socket.send(last, _NOW, copy=len(last) < ZERO_COPY_FROM)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH and link not in self._lost:
                if self._listener is not None:
                    self._listener.forget(link)
                self._lost.append(link)
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                return False
            raise
        finally:
            self.poller.used(socket)
        self.sent_bytes += len(frames[0])
        return True

    def change(self, dial: Mapping[str, str], curve: Curve | None) -> None:
        """Dial these peers and admit these keys from now on; links to changed peers end.

        Incoming links stay (see :meth:`hang_up_others`), and so does the choice to use keys or not.
        """
        self._sockets.curve = curve
        if self._zap is not None and curve is not None:
            self._zap.change(curve.names_by_key)
        self._lost += [Link(dialed=name) for name in self.dialer.change(dial)]

    def hang_up(self, link: Link) -> None:
        """End a connection; a peer that this process has dialed is dialed again."""
        if not link.dialed:
            if self._listener is not None:
                self._listener.hang_up(link)
        elif self.dialer.hang_up(link.dialed):
            self._lost.append(link)

    def hang_up_others(self, kept: Collection[Link]) -> None:
        """End all incoming connections but the links ``kept``, also those that have not sent a message."""
        if self._listener is not None:
            self._listener.hang_up_others(kept)

    def close(self) -> None:
        """Close all sockets, and drop unsent messages."""
        self._listener = None
        self._close_all()

    def _read_monitor(self, monitor: zmq.Socket[bytes], name: str, events: list[LinkEvent]) -> None:
        while True:
            try:
                frame, endpoint = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = struct.unpack("=hi", frame)  # zmq.utils.monitor would load asyncio: 6 MiB in each process
            if name:
                found = self.dialer.on_monitor(name, zmq.Event(event), endpoint.decode(), value)
                events += () if found is None else (found,)
            elif self._listener is not None:
                events += map(LinkDown, self._listener.on_monitor(zmq.Event(event), value))

    def _read(self, socket: zmq.Socket[bytes], name: str, events: list[LinkEvent]) -> None:
        """Read at most 64 messages of a socket."""
        for _ in range(64):
            try:  # as recv_multipart, but without asking the socket whether each frame is the last
                frames = [socket.recv(_NOW, copy=False)]
                while frames[-1].more:
                    frames.append(socket.recv(_NOW, copy=False))
            except zmq.Again:  # its connection has ended since
                return
            self._on_message(frames, name, events)
            if not has_messages(socket):
                return
        self.poller.used(socket)

    def _on_message(self, frames: list[zmq.Frame], name: str, events: list[LinkEvent]) -> None:
        link = Link(name, b"" if name else frames[0].bytes)
        if self._listener is not None and link.routing_id in self._listener.hung_up:
            return
        if name:
            events.append(Incoming(link, frames, name))
        else:
            # Fails if libzmq has no address because the connection ended before it was accepted.
            with contextlib.suppress(zmq.ZMQError):
                self._take_in(link, frames[0], events)
                user = "" if self._zap is None else str(frames[0].get("User-Id"))
                events.append(Incoming(link, frames[1:], user))

    def _take_in(self, link: Link, frame: zmq.Frame, events: list[LinkEvent]) -> None:
        """Record the descriptor of a new link."""
        listener = self._listener
        assert listener is not None
        if link in listener.descriptor_of:
            return
        descriptor = int(frame.get(zmq.SRCFD))
        self._read_monitor(listener.monitor, "", events)
        if not listener.take_in(link, descriptor) and link not in self._lost:
            self._lost.append(link)
