"""Client of the peers of a file, with a session for each peer: the base of status and apply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ls_edge.core.closing import Closing
from ls_edge.core.errors import UsageError, WireError
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.core.text import name_blocks, one_line
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Bye,
    Chunk,
    Complaint,
    Findings,
    Hello,
    State,
    Stored,
    Welcome,
    new_alias,
    new_incarnation,
)
from ls_edge.runtime.transport.connections import Link, LinkDown, LinkEvent, LinkUp, NoLink
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.zap import curve_of

GREET_AGAIN_S = 0.5
"""Seconds after which an unanswered HELLO is repeated."""
GIVE_UP_S = 0.7
"""Seconds after which a peer that does not answer is reported; before that, it may be just starting."""
REACH_S = 5.0
"""Seconds within which a peer has to answer the first greeting, or the other peers to greet one that is warm again."""
STEP_S = 0.05
"""Seconds of a turn that waits for something else than a message."""
_FLUSH_S = 0.02
"""Seconds that :meth:`Client.close` gives libzmq's thread to write the last messages."""

_NO_REASON = NoLink("", "")


@dataclass(eq=False)
class Session:
    """State of a link to a peer; each new link has a new session."""

    peer: PeerConfig
    up: bool = False
    up_at: float = 0.0
    no_link: NoLink = _NO_REASON
    """Reason for the missing link; empty if it is unknown or there is a link."""
    complaint: str = ""
    """Complaint of the peer, or reason why its messages cannot be read."""
    greeted_at: float = 0.0
    waiting: bool = True
    """Whether the answer to a HELLO is outstanding."""
    greetings: list[float] = field(default_factory=list)
    """Seconds between each HELLO and its answer."""
    welcome: Welcome | None = None
    state: State | None = None
    stored: Stored | None = None
    findings: Findings | None = None
    fetched: bytearray = field(default_factory=bytearray)
    """File that the peer sends, as far as it has arrived."""
    asked_at: float = float("-inf")
    """Time of the latest request for a piece of it that was not answered."""

    @property
    def is_warm(self) -> bool:
        """Whether the peer has answered and is warm."""
        return self.up and self.welcome is not None and self.state is not None and self.state.warm

    @property
    def has_refused(self) -> bool:
        """Whether the peer has refused this process, so that waiting is useless."""
        return bool(self.complaint) or self.no_link.final

    @property
    def why_silent(self) -> str:
        """Reason why the peer has not answered."""
        return self.complaint or self.no_link.why or f"nobody has answered at {self.peer.address} yet"

    def is_hopeless(self, began: float) -> bool:
        """Return whether further waiting is useless, for a client that began to wait at ``began``."""
        found, is_late = self.no_link, time.monotonic() > began + GIVE_UP_S
        has_failed = bool(found.why) and not found.refused
        return bool(self.complaint) or (not self.up and (found.final or (is_late and has_failed)))

    def receive(self, message: wire.Message) -> None:
        """Handle a message of the peer."""
        if isinstance(message, Welcome):
            if self.waiting:
                self.greetings.append(time.monotonic() - self.greeted_at)
            self.waiting, self.welcome = False, message
        elif isinstance(message, Hello):  # its description has changed
            self.welcome = Welcome(*msgspec.structs.astuple(message))
        elif isinstance(message, State):
            self.state = message
        elif isinstance(message, Stored):
            self.stored = message
        elif isinstance(message, Findings):
            self.findings = message
        elif isinstance(message, Chunk) and message.offset == len(self.fetched):
            self.fetched += message.data
            self.asked_at = float("-inf")
        elif isinstance(message, Complaint):
            self.complaint = one_line(message.what)
        elif isinstance(message, Bye):  # the link ends next
            why = f"it left ({one_line(message.reason)})" if message.reason else "it left"
            self.up, self.no_link = False, NoLink(self.peer.name, why)

    def judge(self) -> tuple[PeerState, str | None]:
        """Return the state of the peer, and a note or the reason why it cannot be used."""
        peer, welcome, state = self.peer, self.welcome, self.state
        if not self.up:
            return PeerState.REFUSED if self.no_link.refused else PeerState.LOST, self.why_silent
        if self.complaint:
            return PeerState.REFUSED, self.complaint
        if welcome is None or state is None:
            return PeerState.SILENT, "it accepts the link but does not answer the greeting; is it another version?"
        if welcome.name != peer.name:
            why = f"the process at {peer.address} is {welcome.name!r}; correct the addresses in peers.yaml"
            return PeerState.REFUSED, why
        note = one_line(welcome.note) if welcome.note else None
        if not welcome.model_id:
            return PeerState.COLD, note or "it has no bundle; send it one with 'ls-edge apply'"
        if set(welcome.blocks) - set(peer.blocks):
            why = f"it serves {name_blocks(welcome.blocks)}, peers.yaml gives it {name_blocks(peer.blocks)}"
            return PeerState.REFUSED, why
        if not state.warm:
            return PeerState.COLD, "it is loading its engines" + (f"; {note}" if note else "")
        if state.stuck:
            return PeerState.STUCK, "its engine has not answered for longer than it should"
        if state.draining:
            return PeerState.DRAINING, "it is leaving and accepts no new requests"
        return PeerState.ALIVE, note


class Client(Closing):
    """Context manager with a session for each peer of a file; used by one thread."""

    def __init__(
        self,
        peers: PeersFile,
        keys: KeyPair | None,
        owner: str,
        role: str,
    ) -> None:
        """Dial the peers as ``owner``; raise :class:`LinkError` for keys that do not match the file."""
        self.peers = peers
        self.sessions = {peer.name: Session(peer) for peer in peers.peers}
        self._hello = Hello(new_alias(owner), role, new_incarnation(), wire.MINOR, "", "")
        self._links = Links(
            {peer.name: peer.address for peer in peers.peers},
            bind=None,
            heartbeat=peers.heartbeat,
            max_frame=framing.MAX_HEADER,
            curve=curve_of(peers, self._hello.name, keys),
        )

    def close(self) -> None:
        """Send BYE to every peer that has answered, so that it drops the work of this process, and close the links."""
        for name, session in self.sessions.items():
            if session.welcome is not None:
                self.send(name, Bye())
        time.sleep(_FLUSH_S)
        self._links.close()

    def send(self, name: str, message: wire.Message) -> bool:
        """Send a message; return False if the link does not take it."""
        return self._links.send(Link(dialed=name), [framing.encode(message)])

    def fetch(self, session: Session, digest: bytes, patience: float) -> None:
        """Ask a peer for the next piece of a file, unless it was asked less than ``patience`` seconds ago."""
        if time.monotonic() > session.asked_at + patience:
            session.asked_at = time.monotonic()
            self.send(session.peer.name, wire.Want(digest, len(session.fetched), wire.MAX_CHUNK))

    def step(self, seconds: float) -> Sequence[tuple[str, wire.Message]]:
        """Handle events for at most ``seconds``, repeat greetings, and return the messages with their senders."""
        found = []
        for event in self._links.poll(max(0.0, seconds)):
            name = event.name if isinstance(event, NoLink) else event.link.dialed
            found += [(name, message) for message in self._receive(name, event)]
        now = time.monotonic()
        for name, session in self.sessions.items():
            if session.up and not session.complaint and session.waiting and now >= session.greeted_at + GREET_AGAIN_S:
                self.greet(name)
        return found

    def wait_until(self, is_true: Callable[[], bool], seconds: float) -> bool:
        """Handle events until ``is_true()`` returns true; return False after ``seconds``."""
        end = time.monotonic() + seconds
        while not is_true():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.step(min(left, STEP_S))
        return True

    def greet(self, name: str) -> None:
        """Send HELLO."""
        session = self.sessions[name]
        session.greeted_at, session.waiting = time.monotonic(), True
        self.send(name, self._hello)

    def _receive(self, name: str, event: LinkEvent) -> Sequence[wire.Message]:
        session = self.sessions[name]
        if isinstance(event, LinkUp):
            self.sessions[name] = Session(session.peer, up=True, up_at=time.monotonic())
        elif isinstance(event, LinkDown):
            self.sessions[name] = Session(session.peer, up_at=session.up_at, no_link=NoLink(name, event.why))
        elif isinstance(event, NoLink):
            session.no_link = event
        else:
            try:
                messages = framing.decode(event.frames[0].buffer)
            except WireError as error:
                session.complaint = f"its message cannot be read: {error}"
            else:
                for message in messages:
                    session.receive(message)
                    if isinstance(message, Welcome) and message.name != name:
                        self._links.dialer.pass_by(name)
                return messages
        return ()


def source_name(peers: PeersFile, keys: KeyPair | None, default: str) -> str:
    """Return the name of the source with this key; ``default`` if the file has no keys."""
    if keys is not None:
        for source in peers.sources:
            if source.public_key and source.public_key.encode() == keys.public:
                return source.name
        raise UsageError(f"the secret key belongs to no source of {peers.path}; add its public key under 'sources'")
    if peers.uses_keys:
        raise UsageError(f"{peers.path} has keys, so this needs the key of a source: give --secret-key NAME.key_secret")
    return default
