"""Connections of a process: a ROUTER that other processes dial, and a DEALER for each peer that it dials.

With separate DEALERs each connection is watched separately: the socket's monitor reports a lost connection immediately,
ZMTP heartbeats report a silent one. libzmq redials lost connections; if it gives up, after a failed handshake or an
oversized frame, :class:`Dialer` redials. Host names are resolved on other threads, since libzmq would block; their
addresses are dialed in turn. An incoming connection is identified by its routing id, and its end by the file descriptor
of its messages.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from ls_edge.core.errors import AddressMissing, LinkError
from ls_edge.core.logs import LoggedCounts
from ls_edge.core.peers_file import HeartbeatSettings, is_loopback
from ls_edge.runtime.transport.host_names import HostNameResolver, numeric
from ls_edge.runtime.transport.poller import SocketPoller, abort, abort_if_to_itself
from ls_edge.runtime.transport.zap import Curve

log = logging.getLogger("ls_edge.runtime")

_CONNECTED = zmq.Event.CONNECTED
_UP, _ACCEPTED, _DISCONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
_NO_ANSWER, _TRIES_AGAIN = zmq.Event.CLOSED, zmq.Event.CONNECT_RETRIED
_REFUSED, _NOT_ZMTP = zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_ENDED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_FAILED = _ENDED | _NOT_ZMTP | _REFUSED
_WHY_FAILED = {
    _REFUSED: "it refused our key, which is not in its peers.yaml; copy the same file to both",
    _NOT_ZMTP: "only one side uses keys, or the keys differ; copy the same peers.yaml to both",
    _ENDED: "the connection ended during the handshake; compare the keys in both peers.yaml and check the address",
}
_WHY_ENDED_PLAINLY = "the connection ended during the handshake; it may hang, or use keys; check it and the address"
"""Reason if this process has no keys that could be compared."""
_WHY_STRANGER_FAILED = {
    _NOT_ZMTP: "it has no key, another key for this process, or no ZMTP 3",
    _ENDED: "the connection ended during the handshake",
}
RECONNECT_MS, MAX_RECONNECT_MS = 50, 400
"""Shortest and longest wait between attempts to dial; guarantee R8 needs an attempt within half a second."""
CURVE_OVERHEAD = 64
"""Number of bytes that CURVE may add to a frame (33 in CurveZMQ: command, nonce, flags, authentication)."""
MAX_UNREAD = 0
"""Limit on unread messages of a link; 0 means none. If libzmq 4.3.5 stops reading at a limit and the connection ends,
the next heartbeat fails an assertion, which ends the process."""
MAX_UNSENT = 256
"""Limit on unsent messages of a link; beyond it, sending fails."""
REDIAL_S = 0.5
"""Seconds until a peer is dialed again after libzmq has given up."""
DEALER_HEARTBEATS_SLOWER = 10
"""Heartbeat interval of a peer's DEALER, relative to that of its ROUTER."""
_HUNG_UP = 256
"""Number of links, the last that this process has ended, whose remaining messages are dropped."""
_MAX_TTL_MS = 6_553_500
"""Maximum time to live in ZMTP: 65535 tenths of a second."""
_ZAP_DOMAIN = "ls-edge"
"""Domain that makes sockets refuse greetings of ZMTP 1.0 and 2.0: their connections have no metadata and can fail an
assertion of libzmq. Without keys there is no ZAP handler, so the domain costs nothing."""


class Link(NamedTuple):
    """Connection that this process dialed (``dialed``, the name of the peer) or accepted (``routing_id``)."""

    dialed: str = ""
    routing_id: bytes = b""


@dataclass(frozen=True)
class LinkUp:
    """A link that this process dialed is up."""

    link: Link


@dataclass(frozen=True)
class LinkDown:
    """A link has ended; messages in flight are lost."""

    link: Link
    why: str = "connection lost"


@dataclass(frozen=True)
class NoLink:
    """A peer cannot be dialed."""

    name: str
    why: str
    refused: bool = False
    """Whether a process replied, but the handshake failed."""
    final: bool = False
    """Whether further attempts fail until keys are changed; otherwise the peer may be restarting."""


class Incoming(NamedTuple):
    """Frames of a message; ``user`` is the owner of the CURVE key, empty without CURVE."""

    link: Link
    frames: list[zmq.Frame]
    user: str


LinkEvent = LinkUp | LinkDown | NoLink | Incoming


class Sockets:
    """Sockets of a process, with the same options."""

    def __init__(
        self, poller: SocketPoller, heartbeat: HeartbeatSettings, max_frame: int, tokens_frame: int, curve: Curve | None
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = poller
        self.heartbeat = heartbeat
        self.curve = curve
        self.failures = LoggedCounts()
        """Number of failed handshakes by dialed peer; ``""`` counts incoming connections without CURVE."""
        self.names: dict[zmq.Socket[bytes], str] = {}
        """Peer that each DEALER dials; ``""`` for the ROUTER."""
        self.monitors: dict[zmq.Socket[bytes], str] = {}
        self._silence_ms = heartbeat.silence_ms(tokens_frame)
        self._max_frame = max_frame + (CURVE_OVERHEAD if curve is not None else 0)

    def make(self, kind: int, name: str, *, heartbeat_ms: int, events: int) -> zmq.Socket[bytes]:
        """Return a new socket whose monitor reports ``events``."""
        socket = self.context.socket(kind)
        self.names[socket] = name
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, min(self._silence_ms, _MAX_TTL_MS))
        # With keys, a handshake takes three round trips after dialing.
        socket.setsockopt(zmq.HANDSHAKE_IVL, 4 * self.heartbeat.connect_ms)
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
        """Close a socket and its monitor, and drop unsent messages."""
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
        """Close all sockets, and drop unsent messages."""
        # Close the monitors last: libzmq blocks until it has reported the end of monitoring to them.
        for socket in self.names:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
            socket.close(0)
        for monitor in self.monitors:
            monitor.close(0)
        self.names, self.monitors = {}, {}
        self.context.destroy(linger=0)


class Listener:
    """ROUTER, and the descriptors of its connections."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        """Listen; raise :class:`LinkError` if the address is in use or cannot be bound."""
        events = _ACCEPTED | _DISCONNECTED | _FAILED
        self.socket = sockets.make(zmq.ROUTER, "", heartbeat_ms=sockets.heartbeat.every_ms, events=events)
        self.monitor = next(monitor for monitor, name in sockets.monitors.items() if not name)
        self._failures = sockets.failures
        self._accepted: set[int] = set()
        self._links_at: dict[int, list[Link]] = {}
        self.descriptor_of: dict[Link, int] = {}
        """File descriptor of each recorded link that has not ended."""
        self.hung_up: dict[bytes, None] = {}
        """Routing ids of connections that this process has ended, and whose remaining messages are dropped."""
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
            why = (
                f"cannot listen on {address}: {error.strerror}; 'bind' in peers.yaml must be an address of this machine"
            )
            raise (AddressMissing if error.errno == zmq.EADDRNOTAVAIL else LinkError)(why) from None
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(bound.rpartition(":")[2])
        if is_loopback(bound) and not is_loopback(address):
            why = f"{address} is {bound} here, which others cannot reach; add 'bind: tcp://0.0.0.0:PORT' in peers.yaml"
            log.warning("listening on the loopback only", extra={"address": address, "why": why})

    def on_monitor(self, event: zmq.Event, descriptor: int) -> Iterable[Link]:
        """Handle an event of the monitor; return the links that have ended."""
        if event == _ACCEPTED:
            self._accepted.add(descriptor)
        elif event == _DISCONNECTED:
            self._accepted.discard(descriptor)
            # None of these links is newer than the ended connection, see take_in.
            ended = self._links_at.pop(descriptor, [])
            for link in ended:
                del self.descriptor_of[link]
            return ended
        elif event != _REFUSED:  # counted and logged by the ZAP handler
            self._failures.note("", "handshake failed", peer="an incoming connection", why=_WHY_STRANGER_FAILED[event])
        return ()

    def take_in(self, link: Link, descriptor: int) -> bool:
        """Record the descriptor of a new link; return False if its connection has already ended.

        The caller has to read the monitor's events first: an earlier connection with this descriptor is then known to
        have ended, and so is this link if the descriptor is not open.
        """
        if descriptor not in self._accepted:
            return False
        self.descriptor_of[link] = descriptor
        self._links_at.setdefault(descriptor, []).append(link)
        return True

    def forget(self, link: Link) -> None:
        """Forget a link on which nothing can be sent any more."""
        descriptor = self.descriptor_of.pop(link, None)
        if descriptor is not None:
            links = self._links_at[descriptor]
            links.remove(link)
            if not links:
                del self._links_at[descriptor]

    def hang_up(self, link: Link) -> None:
        """End a connection through its descriptor, since libzmq has no call for that."""
        self.hung_up[link.routing_id] = None
        if len(self.hung_up) > _HUNG_UP:
            del self.hung_up[next(iter(self.hung_up))]
        descriptor = self.descriptor_of.get(link)
        if descriptor is not None:
            abort(descriptor, self._port)  # after shutdown() libzmq would still read

    def hang_up_others(self, kept: Collection[Link]) -> None:
        """End all connections but the links ``kept``, also those that have not sent a message."""
        for link in self.descriptor_of.keys() - kept:
            self.hang_up(link)
        for descriptor in self._accepted - self._links_at.keys():
            abort(descriptor, self._port)


class Dialer:
    """DEALERs, which dial the peers."""

    def __init__(self, sockets: Sockets, addresses: Mapping[str, str], *, heartbeat_ms: int) -> None:
        """Dial ``addresses``, which maps names of peers to addresses."""
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        self._all, self._heartbeat_ms = sockets, heartbeat_ms
        self._failures, self._poller = sockets.failures, sockets.poller
        self._route_of: dict[str, tuple[str, bytes, bytes]] = {}
        """Address and public key of each peer, and the key of this process; the keys are empty without CURVE."""
        self._dialed: dict[str, str] = {}
        """Numeric address at which each peer is dialed."""
        self._choices: dict[str, tuple[str, ...]] = {}
        """Numeric addresses of each peer, which are dialed in turn."""
        self._up: set[str] = set()
        self._redial_at: dict[str, float] = {}
        self._resting: set[str] = set()
        self._names: HostNameResolver | None = None
        self.change(addresses)

    def change(self, addresses: Mapping[str, str]) -> list[str]:
        """Dial these peers from now on, with the current keys; return the peers whose links were ended.

        A peer keeps its link if neither its address nor its key has changed.
        """
        curve = self._all.curve
        routes = {
            name: (
                address,
                b"" if curve is None else curve.peer_keys[name],
                b"" if curve is None else curve.keys.public,
            )
            for name, address in addresses.items()
        }
        changed = [name for name, route in self._route_of.items() if routes.get(name) != route]
        ended = [name for name in changed if name in self._up]
        for name in changed:
            self._all.discard(self.sockets.pop(name))
            self._up.discard(name)
            self._resting.discard(name)
            self._dialed.pop(name, None)
            self._choices.pop(name, None)
            self._redial_at.pop(name, None)
        self._route_of = routes
        for name in addresses:
            if name not in self.sockets:
                self._open(name)
        self._look_up_again()
        return ended

    def _open(self, name: str) -> None:
        events = _CONNECTED | _UP | _DISCONNECTED | _NO_ANSWER | _TRIES_AGAIN | _FAILED
        dealer = self._all.make(zmq.DEALER, name, heartbeat_ms=self._heartbeat_ms, events=events)
        self.sockets[name] = dealer
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, self._all.heartbeat.connect_ms)
        if self._all.curve is not None:
            dealer.curve_serverkey = self._all.curve.peer_keys[name]
        if numeric(address := self._route_of[name][0]):
            self._choices[name] = (address,)
            self._dial(name)

    def _look_up_again(self) -> None:
        """Resolve the host names of the current addresses only."""
        if self._names is not None:
            self._poller.remove_descriptor(self._names.descriptor)
            self._names.close()
            self._names = None
        looked_up = {name: address for name, (address, _, _) in self._route_of.items() if not numeric(address)}
        if looked_up:
            self._names = HostNameResolver(looked_up)
            self._poller.add_descriptor(self._names.descriptor)
            for name in looked_up.keys() - self._up - self._resting:
                self._names.want(name, wanted=True)

    def dial_again(self) -> float:
        """Dial peers again after a wait if libzmq has given up on them, or at their next address.

        Return the seconds after which to call this again.
        """
        now = time.monotonic()
        for name in [name for name, at in self._redial_at.items() if at <= now]:
            if name not in self._up:
                self._dial(name)
        return max(0.0, min(self._redial_at.values(), default=math.inf) - time.monotonic())

    def on_host_names(self) -> list[LinkEvent]:
        """Dial resolved addresses; return an event for each name that cannot be resolved."""
        unknown: list[LinkEvent] = []
        if self._names is None or not self._poller.can_read(self._names.descriptor):
            return unknown
        for name, addresses, why in self._names.found():
            if name in self._up or (name in self._resting and name not in self._redial_at):
                continue
            if not addresses:
                unknown.append(NoLink(name, why))
                continue
            self._choices[name] = addresses
            if self._dialed.get(name) not in addresses:
                self._dial(name)
        return unknown

    def on_monitor(self, name: str, event: zmq.Event, endpoint: str, value: int) -> LinkEvent | None:
        """Handle an event of a DEALER's monitor; return the event of the link, if any."""
        takes_turns = len(self._choices.get(name, ())) > 1
        if name in self._resting or (takes_turns and endpoint != self._dialed[name]):
            return None  # not about the address that is dialed now
        if event == _CONNECTED:
            if not abort_if_to_itself(value):
                return None
            self._disconnect(name)
            return self._no_answer(name)
        if event == _UP:
            self._redial_at.pop(name, None)
            self._up.add(name)
            self._look_up(name, wanted=False)
            return LinkUp(Link(dialed=name))
        if event == _TRIES_AGAIN and not takes_turns:
            self._redial_at.pop(name, None)
        elif event != _NO_ANSWER or takes_turns:
            # libzmq either dials the same address again, which its next event reports, or gives up without an event.
            pause = MAX_RECONNECT_MS / 1e3 / len(self._choices[name]) if takes_turns else REDIAL_S
            self._redial_at.setdefault(name, time.monotonic() + pause)
        if event == _TRIES_AGAIN:
            return None
        if event == _NO_ANSWER:
            return self._no_answer(name)
        if event != _DISCONNECTED:
            address = self._dialed[name]
            why = _WHY_ENDED_PLAINLY if event == _ENDED and self._all.curve is None else _WHY_FAILED[event]
            self._failures.note(name, "handshake failed", peer=name, address=address, why=why)
            return NoLink(name, f"no link to {address}: {why}", refused=True, final=event != _ENDED)
        if name not in self._up:
            return None
        self._up.discard(name)
        self._look_up(name, wanted=True)
        return LinkDown(Link(dialed=name))

    def _no_answer(self, name: str) -> NoLink:
        address = self._route_of[name][0]
        tried = ", ".join(self._choices[name])
        where = address if tried == address else f"{address} ({tried})"
        return NoLink(name, f"nobody answers at {where}; start it, or correct its address in peers.yaml")

    def hang_up(self, name: str) -> bool:
        """End the connection to a peer and dial it again; return whether it was up."""
        was_up = name in self._up
        self._up.discard(name)
        self._look_up(name, wanted=True)
        self._dial(name)
        return was_up

    def pass_by(self, name: str) -> None:
        """End the connection to a process that is not ``name``, since the host name may have a new address."""
        if name in self._up and not numeric(self._route_of[name][0]):
            self._disconnect(name)
            self._look_up(name, wanted=True)

    def rest(self, name: str) -> None:
        """Close the connection to a peer that has dialed this process, and do not dial it until :meth:`resume`."""
        self._disconnect(name)
        del self._redial_at[name]

    def resume(self, name: str) -> None:
        """Dial a peer again after :meth:`rest`."""
        if name in self._resting:
            self._look_up(name, wanted=True)
            self._dial(name)

    def _disconnect(self, name: str) -> None:
        """End a connection and ignore its further events, and dial again after a pause."""
        self._resting.add(name)
        self._up.discard(name)
        self._redial_at[name] = time.monotonic() + REDIAL_S
        with contextlib.suppress(zmq.ZMQError):  # it has just ended
            self.sockets[name].disconnect(self._dialed[name])
        self._poller.used(self.sockets[name])

    def close(self) -> None:
        """Stop resolving host names."""
        if self._names is not None:
            self._names.close()

    def _dial(self, name: str) -> None:
        """Dial the next address of a peer instead of the previous one."""
        dealer, before, choices = self.sockets[name], self._dialed.get(name), self._choices[name]
        self._redial_at.pop(name, None)
        self._resting.discard(name)
        if before is not None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq has already forgotten the endpoint
                dealer.disconnect(before)
        at = choices.index(before) + 1 if before in choices else 0
        self._dialed[name] = address = choices[at % len(choices)]
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
