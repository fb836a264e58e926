"""Sockets: a link to every process that can be reached, whichever side dialled.

A peer binds one ROUTER; every process dials each peer of ``peers.yaml`` with a separate DEALER, so that each link is
watched separately: the socket's monitor reports a lost connection immediately, ZMTP heartbeats report a silent one.
libzmq dials lost links again; where it gives up (after a failed handshake or an oversized frame) this module does. Host
names are looked up on another thread, since libzmq would block meanwhile. A link that another process dialled is
identified by its routing id, and its end by the file descriptor of its messages.

An unknown process can do no more than end its own connection, even with a greeting of ZMTP before 3.0.

This module handles frames; ``node`` handles their content. One thread uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from ls_edge.core.errors import LinkError
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.host_names import HostNameResolver, numeric
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.poller import SocketPoller
from ls_edge.runtime.transport.zap import ZapHandler, is_worth_logging

log = logging.getLogger("ls_edge.runtime")

ZERO_COPY_FROM = 1024 * 1024
"""Least bytes of a frame that libzmq receives without a copy: each such frame wakes a thread of pyzmq when it has been
sent, which costs as much as copying half a megabyte (``docs/measurements.md``)."""

# Plain numbers: arithmetic on the enumerations takes as long as a small send.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_ACCEPTED, _DISCONNECTED = zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
_NO_ANSWER, _TRIES_AGAIN = zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED
_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)  # fmt: skip
_WHY_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it refused our key, which is not in its peers.yaml; copy the same file to both",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: (
        "one of the two uses keys and the other does not, or the keys differ; copy the same peers.yaml to both"
    ),
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (
        "the connection ended during the handshake; compare the keys in both peers.yaml, and what listens there"
    ),
}
_WHY_STRANGER_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has no key or a wrong key for us, or does not use ZMTP 3 as ls-edge does",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the connection ended during the handshake",
}
RECONNECT_MS, MAX_RECONNECT_MS = 50, 400
"""Least and longest wait between two attempts to dial; guarantee R8 needs an attempt within half a second."""
CURVE_OVERHEAD = 64
"""Bytes that CURVE may add to a frame (33 in CurveZMQ: command, nonce, flags, authentication)."""
MAX_UNREAD = 0
"""Largest number of unread messages of a link; 0 means no bound. If libzmq stops reading at a bound and the connection
ends then, the next heartbeat fails an assertion of libzmq 4.3.5, which ends the process."""
FLOOD_MESSAGES = 4096
"""Messages of one link, read without reaching the end of its queue, after which the link is ended: it sends faster than
this process reads, and would fill the memory."""
_BACKLOG_LINKS = 4096
"""Largest number of links whose messages are counted for that."""
_HUNG_UP = 256
"""Number of the latest ended links whose remaining messages are dropped unread."""
MAX_UNSENT = 256
"""Largest number of unsent messages of a link; beyond it :meth:`Links.send` returns False."""
_SOCKADDR = 16
"""Size of a zeroed address of AF_UNSPEC; connecting a socket to it ends its connection."""
_libc = ctypes.CDLL(None)
_MAX_TTL_MS = 6_553_500
"""Longest time to live in ZMTP: 65535 tenths of a second."""
DEALER_HEARTBEATS_SLOWER = 10
"""Factor between the heartbeat interval of a DEALER of a peer and that of a ROUTER."""
REDIAL_S = 0.5
"""Seconds until a peer is dialled again after libzmq has given up."""
_ZAP_DOMAIN = "ls-edge"
"""Sockets with a ZAP domain refuse greetings of ZMTP 1.0 and 2.0, whose connections have no metadata and can fail an
assertion of libzmq. Without keys there is no ZAP handler, so the domain costs nothing."""


class Link(NamedTuple):
    """One connection: dialled (``dialled`` is the peer's name), or taken in (``routing_id``)."""

    dialled: str = ""
    routing_id: bytes = b""


@dataclass(frozen=True)
class LinkUp:
    """A link that this process dialled is up."""

    link: Link


@dataclass(frozen=True)
class LinkDown:
    """A link is gone; messages on their way are lost."""

    link: Link
    why: str


@dataclass(frozen=True)
class NoLink:
    """A peer cannot be dialled; repeated with every attempt."""

    name: str
    why: str
    refused: bool = False
    """Whether a process answered, but the handshake failed."""
    final: bool = False
    """Whether further attempts fail as well until keys are changed; otherwise the peer may be restarting."""


class Incoming(NamedTuple):
    """Frames of one message; ``user`` is the name behind the CURVE key, empty without CURVE."""

    link: Link
    frames: list[zmq.Frame]
    user: str


LinkEvent = LinkUp | LinkDown | NoLink | Incoming


@dataclass(frozen=True)
class Curve:
    """The key pair of this process, the public key of each peer, and the name behind each key that may dial."""

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
        tokens_frame: int = 0,
        curve: Curve | None = None,
    ) -> None:
        """Bind and dial; accept frames of up to ``max_frame`` bytes, usually of ``tokens_frame`` bytes.

        Raise :class:`LinkError` if the address is in use or cannot be bound.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.failed: Counter[str] = Counter()
        """Failed handshakes by dialled peer; under ``""`` those of processes that dialled this one without CURVE."""
        self.unattributed = 0
        """Number of messages that were dropped because their connection had already ended."""
        self._heartbeat = heartbeat
        self._silence_ms = heartbeat.silence_ms(tokens_frame)
        self._max_frame = max_frame + (CURVE_OVERHEAD if curve is not None else 0)
        self._poller = SocketPoller()
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._read_from: dict[zmq.Socket[bytes], str] = {}
        """The peer that each socket dials; ``""`` for the ROUTER."""
        self._addresses = dict(dial)
        self._dialled: dict[str, str] = {}
        self._up: set[str] = set()
        self._redial_at: dict[str, float] = {}
        self._accepted: set[int] = set()
        self._links_at: dict[int, list[Link]] = {}
        self._descriptor_of: dict[Link, int] = {}
        self._lost: list[Link] = []
        self._backlogs: dict[str, dict[bytes, int]] = {name: {} for name in ("", *dial)}
        self._hung_up: dict[bytes, None] = {}
        self._router: zmq.Socket[bytes] | None = None
        self._router_monitor: zmq.Socket[bytes] | None = None
        self._names: HostNameResolver | None = None
        self.zap: ZapHandler | None = None
        try:
            if curve is not None:
                self.zap = ZapHandler(self._context, curve.names_by_key)
                self._poller.add(self.zap.socket)
            if bind is not None:
                self._bind(bind, curve)
            for name, address in dial.items():
                self._dial(name, address, curve)
            looked_up = {name: address for name, address in dial.items() if not numeric(address)}
            if looked_up:
                self._names = HostNameResolver(looked_up)
                self._poller.add_descriptor(self._names.descriptor)
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> int:
        """Number of incoming connections whose handshake failed."""
        return self.failed[""] + (0 if self.zap is None else self.zap.refusals)

    @property
    def num_incoming(self) -> int:
        """Number of incoming connections that are open, or whose end was not read yet."""
        return max(len(self._accepted | self._links_at.keys()), len(self._descriptor_of))

    def register(self, descriptor: int) -> None:
        """Make :meth:`poll` return also when this file descriptor can be read."""
        self._poller.add_descriptor(descriptor)

    def can_read(self, descriptor: int) -> bool:
        """Return whether the latest :meth:`poll` found that a registered descriptor can be read, or is at its end."""
        return self._poller.can_read(descriptor)

    def poll(self, timeout: float) -> list[LinkEvent]:
        """Wait at most ``timeout`` seconds and return what happened, ends of links before messages."""
        if self._redial_at:
            self._redial()
            timeout = min(timeout, REDIAL_S)
        ready = self._poller.wait(0.0 if self._lost else timeout)
        events: list[LinkEvent] = [LinkDown(link, "connection lost") for link in self._lost]
        self._lost = []
        if self.zap is not None and self.zap.socket in ready:
            self.zap.answer()
            self._poller.used(self.zap.socket)
        if self._names is not None and self._poller.can_read(self._names.descriptor):
            self._on_host_names(self._names, events)
        for socket in ready:
            name = self._monitors.get(socket)
            if name is not None:
                self._read_monitor(socket, name, events)
        for socket in ready:
            name = self._read_from.get(socket)
            if name is not None:
                self._read(socket, name, events)
        return events

    def send(self, link: Link, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message; return False if the link is gone or its queue is full.

        A frame of :data:`ZERO_COPY_FROM` bytes or more is not copied and must not change afterwards.
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
                self._forget(link)
                self._lost.append(link)
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                return False
            raise
        finally:
            self._poller.used(socket)
        return True

    def close(self) -> None:
        """Close all sockets; unsent messages are dropped."""
        # The monitors are closed last: libzmq reports the end of monitoring to them and waits until it can.
        for watched in (*self._dealers.values(), *(() if self._router is None else (self._router,))):
            with contextlib.suppress(zmq.ZMQError):
                watched.disable_monitor()
            watched.close(0)
        for monitor in self._monitors:
            monitor.close(0)
        if self._names is not None:
            self._names.close()
        if self.zap is not None:
            self.zap.close()
        self._monitors, self._dealers, self._router, self._router_monitor = {}, {}, None, None
        self._read_from = {}
        self._poller.close()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, heartbeat_ms: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, min(self._silence_ms, _MAX_TTL_MS))
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        return socket

    def _bind(self, address: str, curve: Curve | None) -> None:
        router = self._router = self._socket(zmq.ROUTER, self._heartbeat.every_ms)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if curve is not None:
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = curve.keys.public, curve.keys.secret
        if "[" in address:
            router.setsockopt(zmq.IPV6, 1)
        self._router_monitor = self._watch(router, "", _ACCEPTED | _DISCONNECTED | _FAILED)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise LinkError(
                    f"{address} is in use; stop the process that listens there, or change the port in peers.yaml"
                ) from None
            raise LinkError(
                f"cannot listen on {address}: {error.strerror}; 'bind' in peers.yaml must be an address of this machine"
            ) from None
        self._read_from[router] = ""
        self._poller.add(router)

    def _dial(self, name: str, address: str, curve: Curve | None) -> None:
        # The other peer's ROUTER sends heartbeats with a time to live, so between two peers one side is enough. libzmq
        # cancels that time when a message follows the heartbeat, so a source, which gets its messages here, sends its
        # own, and a peer sends a few.
        slower = 1 if self._router is None else DEALER_HEARTBEATS_SLOWER
        dealer = self._dealers[name] = self._socket(zmq.DEALER, slower * self._heartbeat.every_ms)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 500)
        if curve is not None:
            dealer.curve_serverkey = curve.peer_keys[name]
            dealer.curve_publickey, dealer.curve_secretkey = curve.keys.public, curve.keys.secret
        self._watch(dealer, name, _UP | _DISCONNECTED | _NO_ANSWER | _TRIES_AGAIN | _FAILED)
        if numeric(address):
            self._connect(name, address)
        self._read_from[dealer] = name
        self._poller.add(dealer)

    def _connect(self, name: str, address: str) -> None:
        """Dial the numeric ``address`` instead of the one before."""
        dealer, before = self._dealers[name], self._dialled.get(name)
        if before is not None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq has already forgotten the endpoint
                dealer.disconnect(before)
        self._dialled[name] = address
        if "[" in address:
            dealer.setsockopt(zmq.IPV6, 1)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            raise LinkError(f"cannot dial {name} at {address}: {error.strerror}; correct it in peers.yaml") from None
        self._poller.used(dealer)

    def _on_host_names(self, names: HostNameResolver, events: list[LinkEvent]) -> None:
        for name, addresses, why in names.found():
            if name in self._up:
                continue
            if not addresses:
                events.append(NoLink(name, why))
            elif self._dialled.get(name) not in addresses:
                self._connect(name, addresses[0])

    def _watch(self, socket: zmq.Socket[bytes], name: str, events: int) -> zmq.Socket[bytes]:
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(int(events))
        monitor.linger = 0
        self._monitors[monitor] = name
        self._poller.add(monitor)
        return monitor

    def _read_monitor(self, monitor: zmq.Socket[bytes], name: str, events: list[LinkEvent]) -> None:
        while True:
            try:
                message = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event, value = zmq.Event(message["event"]), int(message["value"])
            if not name:
                self._on_router(event, value, events)
            else:
                self._on_dealer(event, name, events)

    def _on_router(self, event: zmq.Event, value: int, events: list[LinkEvent]) -> None:
        if event == _ACCEPTED:
            self._accepted.add(value)
        elif event == _DISCONNECTED:
            self._accepted.discard(value)
            # None of these is newer than the connection that ended: see _take_in.
            for link in self._links_at.pop(value, ()):
                del self._descriptor_of[link]
                events.append(LinkDown(link, "connection lost"))
        elif event != zmq.Event.HANDSHAKE_FAILED_AUTH:  # counted and logged by the ZAP handler
            self._count_failure("", _WHY_STRANGER_FAILED[event], {"peer": "an incoming connection"})

    def _on_dealer(self, event: zmq.Event, name: str, events: list[LinkEvent]) -> None:
        address = self._addresses[name]
        if event == _UP:
            self._redial_at.pop(name, None)
            self._up.add(name)
            self._look_up(name, wanted=False)
            events.append(LinkUp(Link(dialled=name)))
        elif event == _TRIES_AGAIN:
            self._redial_at.pop(name, None)
        elif event == _NO_ANSWER:
            events.append(NoLink(name, f"nobody answers at {address}; start it, or correct its address in peers.yaml"))
        else:
            # Either libzmq dials again, which its next event reports, or it gives up, which no event reports.
            self._redial_at.setdefault(name, time.monotonic() + REDIAL_S)
            if event != _DISCONNECTED:
                self._count_failure(name, _WHY_FAILED[event], {"peer": name, "address": address})
                final = event != zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
                events.append(NoLink(name, f"no link to {address}: {_WHY_FAILED[event]}", refused=True, final=final))
            elif name in self._up:
                self._up.discard(name)
                self._look_up(name, wanted=True)
                events.append(LinkDown(Link(dialled=name), "connection lost"))

    def _count_failure(self, name: str, why: str, who: Mapping[str, str]) -> None:
        self.failed[name] += 1
        if is_worth_logging(self.failed[name]):
            log.warning("handshake failed", extra={**who, "why": why, "count": self.failed[name]})

    def _look_up(self, name: str, *, wanted: bool) -> None:
        if self._names is not None:
            self._names.want(name, wanted=wanted)

    def _redial(self) -> None:
        now = time.monotonic()
        for name in [name for name, at in self._redial_at.items() if at <= now]:
            del self._redial_at[name]
            if name not in self._up:
                self._connect(name, self._dialled[name])

    def _read(self, socket: zmq.Socket[bytes], name: str, events: list[LinkEvent]) -> None:
        """Read at most 64 messages of a socket."""
        backlog = self._backlogs[name]
        if len(backlog) > _BACKLOG_LINKS:
            backlog.clear()
        for _ in range(64):
            try:
                frames = _receive(socket)
            except zmq.Again:  # its connection has ended since the poll
                return
            self._on_message(frames, name, backlog, events)
            if not int(socket.getsockopt(_EVENTS)) & _READABLE:
                backlog.clear()
                return
        self._poller.used(socket)

    def _on_message(
        self, frames: list[zmq.Frame], name: str, backlog: dict[bytes, int], events: list[LinkEvent]
    ) -> None:
        key = b"" if name else frames[0].bytes
        if key in self._hung_up:
            return
        backlog[key] = waiting = backlog.get(key, 0) + 1
        link = Link(name, key)
        if waiting >= FLOOD_MESSAGES:
            del backlog[key]
            self._hang_up(link)
            return
        if name:
            events.append(Incoming(link, frames, name))
            return
        try:
            if link not in self._descriptor_of:
                self._take_in(link, frames[0].get(zmq.SRCFD), events)
            user = frames[0].get("User-Id") if self.zap is not None else ""
        except zmq.ZMQError:  # libzmq has no address: the connection had ended before it was accepted
            self.unattributed += 1
            return
        events.append(Incoming(link, frames[1:], str(user)))

    def _hang_up(self, link: Link) -> None:
        """End a connection; libzmq has no call for that."""
        log.warning(
            "disconnected",
            extra={"peer": link.dialled or "an incoming connection", "why": "it sends faster than this process reads"},
        )
        if link.dialled:
            if link.dialled in self._up:
                self._up.discard(link.dialled)
                self._lost.append(link)
            self._connect(link.dialled, self._dialled[link.dialled])
            return
        self._hung_up[link.routing_id] = None
        if len(self._hung_up) > _HUNG_UP:
            del self._hung_up[next(iter(self._hung_up))]
        descriptor = self._descriptor_of.get(link)
        if descriptor is not None:
            # Ends it at both sides, as an error; after shutdown() alone libzmq would still read.
            _libc.connect(descriptor, bytes(_SOCKADDR), _SOCKADDR)

    def _take_in(self, link: Link, descriptor: int, events: list[LinkEvent]) -> None:
        """Record the descriptor of a new link.

        The monitor's events are read first: then an earlier connection with this descriptor has ended, and so has this
        link if the descriptor is not open.
        """
        if self._router_monitor is not None:
            self._read_monitor(self._router_monitor, "", events)
        if descriptor in self._accepted:
            self._descriptor_of[link] = descriptor
            self._links_at.setdefault(descriptor, []).append(link)
        elif link not in self._lost:
            self._lost.append(link)

    def _forget(self, link: Link) -> None:
        descriptor = self._descriptor_of.pop(link, None)
        if descriptor is not None:
            links = self._links_at[descriptor]
            links.remove(link)
            if not links:
                del self._links_at[descriptor]


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Read a message like ``recv_multipart``, which asks the socket for more frames although each frame knows."""
    frame = socket.recv(_NOW, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(_NOW, copy=False)
        frames.append(frame)
    return frames
