"""Sockets: a link to every process that can be reached, whichever side dialled.

A peer binds one ROUTER; every process dials each peer of ``peers.yaml`` with a DEALER of its own, so that each link is
watched by itself: the socket's monitor reports a lost connection at once, ZMTP heartbeats one that has gone silent.
Links that are lost are dialled again by libzmq; those that failed in the handshake, where libzmq gives up, are dialled
again here. A link that another process dialled is known by its routing id, and its end by the file descriptor that its
messages came from or, where that was gone before they were read, by the first message that cannot be sent to it.

Speaks frames, not messages: what they mean is ``node``'s. One thread uses it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ls_edge.errors import LinkError
from ls_edge.peers import HeartbeatSettings
from ls_edge.runtime.keys import KeyPair
from ls_edge.runtime.zap import Gate, is_worth_saying

log = logging.getLogger("ls_edge.runtime")

ZERO_COPY_FROM = 64 * 1024
"""Bytes from which handing a frame to libzmq without a copy pays."""

# Plain numbers: arithmetic on the enumerations takes as long as a small send.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)  # fmt: skip
_WHY_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "our key is not in its peers.yaml",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "one of the two uses keys and the other does not, or the key is another one",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the connection was closed during the handshake; compare keys and peers.yaml",
}
_RECONNECT_MS, _RECONNECT_MOST_MS = 50, 400
"""A peer that is back is dialled within half a second, which guarantee R8 needs."""
_CURVE_EXTRA = 64
"""Bytes that a frame may be longer on a CURVE link (33 in CurveZMQ: command, nonce, flags, authentication)."""
_UNREAD = 128
"""Messages of a link that libzmq takes in before they are read; the rest waits at the sender."""
_REDIAL_S = 0.5
"""Seconds after which a handshake that failed is tried again."""


@dataclass(frozen=True)
class Link:
    """One connection: dialled (``dialled`` is the peer's name), or taken in (``routing_id``)."""

    dialled: str = ""
    routing_id: bytes = b""


@dataclass(frozen=True)
class LinkUp:
    """A link that we dialled stands."""

    link: Link


@dataclass(frozen=True)
class LinkDown:
    """A link is gone; what was on its way is lost."""

    link: Link
    why: str


@dataclass(frozen=True)
class Incoming:
    """Frames of one message; ``user`` is the name behind the CURVE key, empty without CURVE."""

    link: Link
    frames: list[zmq.Frame]
    user: str


LinkEvent = LinkUp | LinkDown | Incoming


@dataclass(frozen=True)
class Curve:
    """Our key pair, the public key of each peer, and the name behind each key that may dial us."""

    keys: KeyPair
    peer_keys: Mapping[str, bytes]
    names_by_key: Mapping[bytes, str]


class Links:
    """All links of a process."""

    def __init__(
        self,
        dial: Mapping[str, str],
        *,
        bind: str | None,
        heartbeat: HeartbeatSettings,
        max_frame: int,
        curve: Curve | None = None,
    ) -> None:
        """Bind and dial; ``max_frame`` is the longest frame in bytes that is taken in.

        Raises :class:`LinkError` where the address is in use or cannot be bound.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.failed: Counter[str] = Counter()
        """Handshakes that failed, by the peer that was dialled; under ``""`` those of who dialled us without CURVE."""
        self._heartbeat = heartbeat
        self._max_frame = max_frame + (_CURVE_EXTRA if curve is not None else 0)
        self._poller = zmq.Poller()
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._addresses = dict(dial)
        self._up: set[str] = set()
        self._redial_at: dict[str, float] = {}
        self._descriptors: dict[int, list[Link]] = {}
        self._lost: list[Link] = []
        self._router: zmq.Socket[bytes] | None = None
        self._wakers: dict[int, Any] = {}
        self.gate: Gate | None = None
        try:
            if curve is not None:
                self.gate = Gate(self._context, curve.names_by_key)
                self._poller.register(self.gate.socket, zmq.POLLIN)
            if bind is not None:
                self._bind(bind, curve)
            for name, address in dial.items():
                self._dial(name, address, curve)
        except BaseException:
            self.close()
            raise

    def register(self, descriptor: int) -> None:
        """Wake :meth:`poll` also when this file descriptor can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def poll(self, timeout: float) -> list[LinkEvent]:
        """Wait at most ``timeout`` seconds and return what happened; ends of links come before messages."""
        if self._redial_at:
            self._redial()
        ready = dict(self._poller.poll(0 if self._lost else max(0, round(timeout * 1000))))
        events: list[LinkEvent] = [LinkDown(link, "connection lost") for link in self._lost]
        self._lost = []
        if self.gate is not None and self.gate.socket in ready:
            self.gate.answer()
        for monitor, name in self._monitors.items():
            if monitor in ready:
                self._read_monitor(monitor, name, events)
        for name, dealer in self._dealers.items():
            if dealer in ready:
                self._read(dealer, name, events)
        if self._router is not None and self._router in ready:
            self._read(self._router, "", events)
        return events

    def send(self, link: Link, frames: Sequence[bytes | memoryview]) -> bool:
        """Give a message to a link; False where it cannot be sent now (its queue is full, it is gone).

        A frame of :data:`ZERO_COPY_FROM` bytes or more is not copied and must not change any more.
        """
        socket = self._dealers.get(link.dialled) if link.dialled else self._router
        if socket is None:
            return False
        *before, last = frames if link.dialled else (link.routing_id, *frames)
        try:
            for part in before:
                socket.send(part, _MORE, copy=len(part) < ZERO_COPY_FROM)
            socket.send(last, _NOW, copy=len(last) < ZERO_COPY_FROM)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH and link not in self._lost:
                self._lost.append(link)
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                return False
            raise
        return True

    def close(self) -> None:
        """Close all sockets; what has not been sent by now is dropped."""
        # The monitors are closed last: libzmq reports the end of monitoring to them and waits until it can.
        for watched in (*self._dealers.values(), *(() if self._router is None else (self._router,))):
            with contextlib.suppress(zmq.ZMQError):
                watched.disable_monitor()
            watched.close(0)
        for monitor in self._monitors:
            monitor.close(0)
        if self.gate is not None:
            self.gate.close()
        self._monitors, self._dealers, self._router = {}, {}, None
        self._context.destroy(linger=0)

    # Inside.

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat.interval_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._heartbeat.timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, self._heartbeat.timeout_ms)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        socket.setsockopt(zmq.RCVHWM, _UNREAD)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame)
        return socket

    def _bind(self, address: str, curve: Curve | None) -> None:
        router = self._router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if curve is not None:
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = curve.keys.public, curve.keys.secret
            router.setsockopt_string(zmq.ZAP_DOMAIN, "ls-edge")
        self._watch(router, "", zmq.Event.DISCONNECTED | _FAILED)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise LinkError(
                    f"{address} is in use; stop what listens there, or give this peer another port in peers.yaml"
                ) from None
            raise LinkError(
                f"cannot listen on {address}: {error.strerror}; 'bind' in peers.yaml must be an address of this machine"
            ) from None
        self._poller.register(router, zmq.POLLIN)

    def _dial(self, name: str, address: str, curve: Curve | None) -> None:
        dealer = self._dealers[name] = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 500)
        if curve is not None:
            dealer.curve_serverkey = curve.peer_keys[name]
            dealer.curve_publickey, dealer.curve_secretkey = curve.keys.public, curve.keys.secret
        self._watch(dealer, name, _UP | zmq.Event.DISCONNECTED | _FAILED)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            raise LinkError(f"cannot dial {name} at {address}: {error.strerror}; correct it in peers.yaml") from None
        self._poller.register(dealer, zmq.POLLIN)

    def _watch(self, socket: zmq.Socket[bytes], name: str, events: int) -> None:
        monitor = socket.get_monitor_socket(int(events))
        monitor.linger = 0
        self._monitors[monitor] = name
        self._poller.register(monitor, zmq.POLLIN)

    def _read_monitor(self, monitor: zmq.Socket[bytes], name: str, events: list[LinkEvent]) -> None:
        while True:
            try:
                message = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = zmq.Event(message["event"])
            if event == _UP:
                self._up.add(name)
                events.append(LinkUp(Link(dialled=name)))
            elif event != zmq.Event.DISCONNECTED:
                self._handshake_failed(name, event)
            elif not name:
                events += [LinkDown(link, "connection lost") for link in self._disconnected(int(message["value"]))]
            elif name in self._up:
                self._up.discard(name)
                events.append(LinkDown(Link(dialled=name), "connection lost"))

    def _disconnected(self, descriptor: int) -> list[Link]:
        """The link that used a descriptor; a newer one may use it already, so the oldest."""
        links = self._descriptors.get(descriptor, [])
        gone = links[:1]
        del links[:1]
        if not links:
            self._descriptors.pop(descriptor, None)
        return gone

    def _handshake_failed(self, name: str, event: zmq.Event) -> None:
        if not name and event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return  # the gate has counted and said it
        if name and event != zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._redial_at.setdefault(name, time.monotonic() + _REDIAL_S)
        self.failed[name] += 1
        if is_worth_saying(self.failed[name]):
            who = {"peer": name, "address": self._addresses[name]} if name else {"peer": "somebody who dialled us"}
            log.warning("handshake failed", extra={**who, "why": _WHY_FAILED[event], "count": self.failed[name]})

    def _redial(self) -> None:
        now = time.monotonic()
        for name in [name for name, at in self._redial_at.items() if at <= now]:
            del self._redial_at[name]
            if name not in self._up:
                with contextlib.suppress(zmq.ZMQError):  # libzmq has forgotten the endpoint, as it should
                    self._dealers[name].disconnect(self._addresses[name])
                self._dealers[name].connect(self._addresses[name])

    def _read(self, socket: zmq.Socket[bytes], name: str, events: list[LinkEvent]) -> None:
        for _ in range(64):
            if not int(socket.getsockopt(_EVENTS)) & _READABLE:
                return
            frames = socket.recv_multipart(_NOW, copy=False)
            if name:
                events.append(Incoming(Link(dialled=name), frames, name))
                continue
            link = Link(routing_id=frames[0].bytes)
            users = self._descriptors.setdefault(frames[0].get(zmq.SRCFD), [])
            if link not in users:
                users.append(link)
            user = frames[0].get("User-Id") if self.gate is not None else ""
            events.append(Incoming(link, frames[1:], str(user)))
