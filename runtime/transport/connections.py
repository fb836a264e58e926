"""Connections of a process: a ROUTER that other processes dial, and one DEALER for each peer that this one dials.

With separate DEALERs each connection is watched separately: the socket's monitor reports a lost one immediately, ZMTP
heartbeats report a silent one. libzmq dials lost connections again; where it gives up (after a failed handshake or an
oversized frame) :class:`Dialer` does. Host names are looked up on another thread, since libzmq would block meanwhile. A
connection that another process dialled is identified by its routing id, and its end by the file descriptor of its
messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from ls_edge.core.errors import LinkError
from ls_edge.core.logs import LoggedCounts
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.transport.host_names import HostNameResolver, numeric
from ls_edge.runtime.transport.keys import Curve
from ls_edge.runtime.transport.poller import SocketPoller

_UP, _ACCEPTED, _DISCONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
_NO_ANSWER, _TRIES_AGAIN = zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED
_REFUSED, _NOT_ZMTP = zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_ENDED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_FAILED = _ENDED | _NOT_ZMTP | _REFUSED
_WHY_FAILED = {
    _REFUSED: "it refused our key, which is not in its peers.yaml; copy the same file to both",
    _NOT_ZMTP: "one of the two uses keys and the other does not, or the keys differ; copy the same peers.yaml to both",
    _ENDED: "the connection ended during the handshake; compare the keys in both peers.yaml, and what listens there",
}
_WHY_STRANGER_FAILED = {
    _NOT_ZMTP: "it has no key or a wrong key for us, or does not use ZMTP 3 as ls-edge does",
    _ENDED: "the connection ended during the handshake",
}
RECONNECT_MS, MAX_RECONNECT_MS = 50, 400
"""Least and longest wait between two attempts to dial; guarantee R8 needs an attempt within half a second."""
CURVE_OVERHEAD = 64
"""Bytes that CURVE may add to a frame (33 in CurveZMQ: command, nonce, flags, authentication)."""
MAX_UNREAD = 0
"""Largest number of unread messages of a link; 0 means no bound. If libzmq stops reading at a bound and the connection
ends then, the next heartbeat fails an assertion of libzmq 4.3.5, which ends the process."""
MAX_UNSENT = 256
"""Largest number of unsent messages of a link; beyond it sending fails."""
REDIAL_S = 0.5
"""Seconds until a peer is dialled again after libzmq has given up."""
DEALER_HEARTBEATS_SLOWER = 10
"""Factor between the heartbeat interval of a DEALER of a peer and that of a ROUTER."""
_HUNG_UP = 256
"""Number of the latest ended links whose remaining messages are dropped unread."""
_SOCKADDR = 16
"""Size of a zeroed address of AF_UNSPEC; connecting a socket to it ends its connection."""
_libc = ctypes.CDLL(None)
_MAX_TTL_MS = 6_553_500
"""Longest time to live in ZMTP: 65535 tenths of a second."""
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
    why: str = "connection lost"


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


class Sockets:
    """The sockets of one process: made with the same options, waited for, and closed together."""

    def __init__(
        self, poller: SocketPoller, heartbeat: HeartbeatSettings, max_frame: int, tokens_frame: int, curve: Curve | None
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = poller
        self.heartbeat = heartbeat
        self.curve = curve
        self.failures = LoggedCounts()
        """Failed handshakes by dialled peer; under ``""`` those of processes that dialled this one without CURVE."""
        self.names: dict[zmq.Socket[bytes], str] = {}
        """The peer that each DEALER dials; ``""`` for the ROUTER."""
        self.monitors: dict[zmq.Socket[bytes], str] = {}
        self._silence_ms = heartbeat.silence_ms(tokens_frame)
        self._max_frame = max_frame + (CURVE_OVERHEAD if curve is not None else 0)

    def make(self, kind: int, name: str, *, heartbeat_ms: int, events: int) -> zmq.Socket[bytes]:
        """Return a new socket; its monitor reports ``events``."""
        socket = self.context.socket(kind)
        self.names[socket] = name
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, min(self._silence_ms, _MAX_TTL_MS))
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        if self.curve is not None:
            socket.curve_publickey, socket.curve_secretkey = self.curve.keys.public, self.curve.keys.secret
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(int(events))
        monitor.linger = 0
        self.monitors[monitor] = name
        self.poller.add(monitor)
        self.poller.add(socket)
        return socket

    def discard(self, socket: zmq.Socket[bytes]) -> None:
        """Close one socket and its monitor; unsent messages are dropped."""
        name = self.names.pop(socket)
        monitor = next(one for one, of in self.monitors.items() if of == name)
        del self.monitors[monitor]
        for one in (socket, monitor):
            self.poller.remove(one)
        with contextlib.suppress(zmq.ZMQError):
            socket.disable_monitor()
        socket.close(0)
        monitor.close(0)

    def close(self) -> None:
        """Close all sockets; unsent messages are dropped."""
        # The monitors are closed last: libzmq reports the end of monitoring to them and waits until it can.
        for socket in self.names:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
            socket.close(0)
        for monitor in self.monitors:
            monitor.close(0)
        self.names, self.monitors = {}, {}
        self.context.destroy(linger=0)


class Listener:
    """The ROUTER, and the descriptors of the connections that it has accepted."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        """Listen; raise :class:`LinkError` if the address is in use or cannot be bound."""
        events = _ACCEPTED | _DISCONNECTED | _FAILED
        self.socket = sockets.make(zmq.ROUTER, "", heartbeat_ms=sockets.heartbeat.every_ms, events=events)
        self.monitor = next(monitor for monitor, name in sockets.monitors.items() if not name)
        self._failures = sockets.failures
        self._accepted: set[int] = set()
        self._links_at: dict[int, list[Link]] = {}
        self._descriptor_of: dict[Link, int] = {}
        self._hung_up: dict[bytes, None] = {}
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if sockets.curve is not None:
            self.socket.curve_server = True
        if "[" in address:
            self.socket.setsockopt(zmq.IPV6, 1)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise LinkError(
                    f"{address} is in use; stop the process that listens there, or change the port in peers.yaml"
                ) from None
            raise LinkError(
                f"cannot listen on {address}: {error.strerror}; 'bind' in peers.yaml must be an address of this machine"
            ) from None

    def on_monitor(self, event: zmq.Event, descriptor: int) -> Iterable[Link]:
        """Take in an event of the monitor; return the links that have ended."""
        if event == _ACCEPTED:
            self._accepted.add(descriptor)
        elif event == _DISCONNECTED:
            self._accepted.discard(descriptor)
            # None of these is newer than the connection that ended: see take_in.
            ended = self._links_at.pop(descriptor, [])
            for link in ended:
                del self._descriptor_of[link]
            return ended
        elif event != _REFUSED:  # counted and logged by the ZAP handler
            self._failures.note("", "handshake failed", peer="an incoming connection", why=_WHY_STRANGER_FAILED[event])
        return ()

    def knows(self, link: Link) -> bool:
        """Return whether a link was taken in and has not ended."""
        return link in self._descriptor_of

    def take_in(self, link: Link, descriptor: int) -> bool:
        """Record the descriptor of a new link; return False if its connection has already ended.

        The monitor's events must have been read: then an earlier connection with this descriptor has ended, and so has
        this link if the descriptor is not open.
        """
        if descriptor not in self._accepted:
            return False
        self._descriptor_of[link] = descriptor
        self._links_at.setdefault(descriptor, []).append(link)
        return True

    def forget(self, link: Link) -> None:
        """Forget a link that cannot be sent on any more."""
        descriptor = self._descriptor_of.pop(link, None)
        if descriptor is not None:
            links = self._links_at[descriptor]
            links.remove(link)
            if not links:
                del self._links_at[descriptor]

    def hung_up(self, routing_id: bytes) -> bool:
        """Return whether this process has ended a connection, so that what was left of it is dropped."""
        return routing_id in self._hung_up

    def hang_up(self, link: Link) -> None:
        """End a connection; libzmq has no call for that."""
        self._hung_up[link.routing_id] = None
        if len(self._hung_up) > _HUNG_UP:
            del self._hung_up[next(iter(self._hung_up))]
        descriptor = self._descriptor_of.get(link)
        if descriptor is not None:
            # Ends it at both sides, as an error; after shutdown() alone libzmq would still read.
            _libc.connect(descriptor, bytes(_SOCKADDR), _SOCKADDR)


class _Route(NamedTuple):
    """Way to a peer: its address, its public key, and our own."""

    address: str
    server_key: bytes
    own_key: bytes


def _route(address: str, curve: Curve | None, name: str) -> _Route:
    return _Route(address, b"", b"") if curve is None else _Route(address, curve.peer_keys[name], curve.keys.public)


class Dialer:
    """The DEALERs: dials the peers, and dials again."""

    def __init__(self, sockets: Sockets, addresses: Mapping[str, str], *, heartbeat_ms: int) -> None:
        """Dial ``addresses``, by name of the peer."""
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        self._all, self._heartbeat_ms = sockets, heartbeat_ms
        self._failures, self._poller = sockets.failures, sockets.poller
        self._addresses: dict[str, str] = {}
        self._route_of: dict[str, _Route] = {}
        self._dialled: dict[str, str] = {}
        """The numeric address that each peer is dialled at."""
        self._up: set[str] = set()
        self._redial_at: dict[str, float] = {}
        self._resting: set[str] = set()
        self._names: HostNameResolver | None = None
        self.change(addresses)

    def change(self, addresses: Mapping[str, str]) -> list[str]:
        """Dial these peers from now on, with the keys of now; return the names of peers whose link this has ended.

        A peer whose address and keys are those of before keeps its link.
        """
        routes = {name: _route(address, self._all.curve, name) for name, address in addresses.items()}
        changed = [name for name, route in self._route_of.items() if routes.get(name) != route]
        ended = [name for name in changed if name in self._up]
        for name in changed:
            self._all.discard(self.sockets.pop(name))
            self._up.discard(name)
            self._resting.discard(name)
            self._dialled.pop(name, None)
            self._redial_at.pop(name, None)
        self._addresses, self._route_of = dict(addresses), routes
        for name in addresses:
            if name not in self.sockets:
                self._open(name)
        self._look_up_again()
        return ended

    def _open(self, name: str) -> None:
        events = _UP | _DISCONNECTED | _NO_ANSWER | _TRIES_AGAIN | _FAILED
        dealer = self._all.make(zmq.DEALER, name, heartbeat_ms=self._heartbeat_ms, events=events)
        self.sockets[name] = dealer
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 500)
        if self._all.curve is not None:
            dealer.curve_serverkey = self._all.curve.peer_keys[name]
        if numeric(self._addresses[name]):
            self._connect(name, self._addresses[name])

    def _look_up_again(self) -> None:
        """Look up the host names of the present addresses, and no others."""
        if self._names is not None:
            self._poller.remove_descriptor(self._names.descriptor)
            self._names.close()
            self._names = None
        looked_up = {name: address for name, address in self._addresses.items() if not numeric(address)}
        if looked_up:
            self._names = HostNameResolver(looked_up)
            self._poller.add_descriptor(self._names.descriptor)
            for name in self._up | self._resting:
                self._names.want(name, wanted=False)

    def dial_again(self) -> None:
        """Dial peers on which libzmq has given up, once their wait is over."""
        now = time.monotonic()
        for name in [name for name, at in self._redial_at.items() if at <= now]:
            del self._redial_at[name]
            if name not in self._up:
                self._connect(name, self._dialled[name])

    @property
    def is_waiting(self) -> bool:
        """Whether :meth:`dial_again` has to be called within :data:`REDIAL_S`."""
        return bool(self._redial_at)

    def on_host_names(self) -> list[LinkEvent]:
        """Dial the addresses that were looked up; return the names without one."""
        unknown: list[LinkEvent] = []
        if self._names is None or not self._poller.can_read(self._names.descriptor):
            return unknown
        for name, addresses, why in self._names.found():
            if name in self._up or name in self._resting:
                continue
            if not addresses:
                unknown.append(NoLink(name, why))
            elif self._dialled.get(name) not in addresses:
                self._connect(name, addresses[0])
        return unknown

    def on_monitor(self, name: str, event: zmq.Event) -> LinkEvent | None:
        """Take in an event of the monitor of a DEALER; return what it means for the link."""
        if name in self._resting:
            return None
        address = self._addresses[name]
        if event == _UP:
            self._redial_at.pop(name, None)
            self._up.add(name)
            self._look_up(name, wanted=False)
            return LinkUp(Link(dialled=name))
        if event == _TRIES_AGAIN:
            self._redial_at.pop(name, None)
            return None
        if event == _NO_ANSWER:
            return NoLink(name, f"nobody answers at {address}; start it, or correct its address in peers.yaml")
        # Either libzmq dials again, which its next event reports, or it gives up, which no event reports.
        self._redial_at.setdefault(name, time.monotonic() + REDIAL_S)
        if event != _DISCONNECTED:
            self._failures.note(name, "handshake failed", peer=name, address=address, why=_WHY_FAILED[event])
            return NoLink(name, f"no link to {address}: {_WHY_FAILED[event]}", refused=True, final=event != _ENDED)
        if name not in self._up:
            return None
        self._up.discard(name)
        self._look_up(name, wanted=True)
        return LinkDown(Link(dialled=name))

    def hang_up(self, name: str) -> bool:
        """End the connection to a peer and dial it again; return whether it was up."""
        was_up = name in self._up
        self._up.discard(name)
        self._connect(name, self._dialled[name])
        return was_up

    def rest(self, name: str) -> None:
        """Close the connection to a peer, which has dialled this process, and do not dial it until :meth:`resume`."""
        self._resting.add(name)
        self._up.discard(name)
        self._redial_at.pop(name, None)
        with contextlib.suppress(zmq.ZMQError):  # it has just ended
            self.sockets[name].disconnect(self._dialled[name])
        self._poller.used(self.sockets[name])

    def resume(self, name: str) -> None:
        """Dial a peer again after :meth:`rest`."""
        if name in self._resting:
            self._resting.discard(name)
            self._look_up(name, wanted=True)
            self._connect(name, self._dialled[name])

    def close(self) -> None:
        """Stop looking up host names."""
        if self._names is not None:
            self._names.close()

    def _connect(self, name: str, address: str) -> None:
        """Dial the numeric ``address`` instead of the one before."""
        dealer, before = self.sockets[name], self._dialled.get(name)
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

    def _look_up(self, name: str, *, wanted: bool) -> None:
        if self._names is not None:
            self._names.want(name, wanted=wanted)
