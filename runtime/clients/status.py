"""The state of the peers of a ``peers.yaml``, seen from outside: what ``ls-edge status`` shows.

An observer dials every peer, greets it in the role ``observer`` and listens to its STATE. It needs no bundle; where the
file has keys it needs the secret key of a source. It takes no part in routing and costs a peer one link.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from ls_edge.core.errors import UsageError, WireError
from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.core.records import PeerState
from ls_edge.runtime.clients.dialler import Dialler
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Bye,
    Complaint,
    FindingRow,
    Findings,
    Hello,
    Inspect,
    State,
    Welcome,
)
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import Incoming, Link, LinkDown, LinkUp, NoLink
from ls_edge.runtime.transport.node import new_incarnation
from ls_edge.runtime.transport.problems import one_line

ASK_EVERY = 0.1
"""Least seconds between two HELLO to a peer."""
ASK_AGAIN = 0.5
"""Seconds after which a HELLO that was not answered is sent again."""
SAMPLES = 3
"""Greetings from which the latency of a link is taken, the fastest of them."""
GIVE_UP = 0.7
"""Seconds after which a peer that does not answer is reported; it might be just starting."""


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer as an observer found it: an entry of ``ls-edge status --json``."""

    reachable: bool
    """Whether a process answers at its address and the handshake succeeded."""
    key: str
    """``accepted``, ``refused``, ``none`` (the file has no keys) or ``unknown`` (nobody answers)."""
    state: PeerState
    bundle_id: str | None
    model_id: str | None
    blocks: tuple[int, ...]
    """Blocks that it announces; those of the file where it announced none yet."""
    warm: bool
    queue: int | None
    """Requests that wait for its engine."""
    credits: int | None
    """Requests that it would accept now."""
    block_ms: float | None
    """What one block takes it, usually."""
    latency_ms: float | None
    """A greeting and its answer: the link there and back, and the peer's loop."""
    engine: str
    reaches: tuple[str, ...]
    """Processes that it has a link to."""
    address: str
    reason: str | None
    """Why it cannot be used, or not yet; null where it is alive."""


@dataclass(eq=False)
class _Seen:
    """What is known of one peer."""

    peer: PeerConfig
    up: bool = False
    refused: bool = False
    final: bool = False
    """Whether another handshake would be refused too."""
    why: str = ""
    complaint: str = ""
    welcome: Welcome | None = None
    state: State | None = None
    asked_at: float = 0.0
    waiting: bool = False
    took: list[float] = field(default_factory=list)
    findings: tuple[FindingRow, ...] | None = None


class Observer(Dialler):
    """Links to all peers of a file; one thread uses it. A context manager."""

    def __init__(self, peers: PeersFile, *, keys: KeyPair | None = None) -> None:
        """Dial the peers; raises :class:`UsageError` and :class:`LinkError` for keys that do not fit the file."""
        hello = Hello(new_alias(_name_of(peers, keys)), "observer", new_incarnation(), wire.MINOR_OF_ONE, "", "")
        super().__init__(peers, hello, keys)
        self._seen = {peer.name: _Seen(peer) for peer in peers.peers}

    def _greeted(self) -> Iterable[str]:
        return [name for name, seen in self._seen.items() if seen.welcome is not None]

    def look(self, seconds: float) -> Mapping[str, PeerStatus]:
        """Greet all peers and return their status, once all are known and after ``seconds`` at the latest."""
        began = time.monotonic()
        for seen in self._seen.values():
            seen.took.clear()
        while time.monotonic() < began + seconds and any(self._open(began)):
            self._step(0.02)
        return self.view()

    def inspect(self, seconds: float) -> Mapping[str, tuple[FindingRow, ...] | str]:
        """Ask all peers to check their machines; returns what each found, or why nothing came within ``seconds``."""
        began = time.monotonic()
        asked: set[str] = set()
        while time.monotonic() < began + seconds:
            for name, seen in self._seen.items():
                if not seen.up:
                    asked.discard(name)
                elif seen.welcome is not None and name not in asked:
                    asked.add(name)
                    self._links.send(Link(dialled=name), [wire.encode(Inspect())])
            late = time.monotonic() > began + GIVE_UP
            if all(
                seen.findings is not None
                or seen.complaint
                or seen.final
                or (late and not seen.up and seen.why and not seen.refused)
                for seen in self._seen.values()
            ):
                break
            self._step(0.05)
        return {name: _silence(seen) if seen.findings is None else seen.findings for name, seen in self._seen.items()}

    def wait(self, seconds: float) -> None:
        """Listen for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._step(min(0.1, left), ask=False)

    def view(self) -> Mapping[str, PeerStatus]:
        """The status of each peer, as far as it is known."""
        return {name: self._status(seen) for name, seen in self._seen.items()}

    def _open(self, began: float) -> Iterator[bool]:
        """Whether there is more to be learnt, of each peer."""
        late = time.monotonic() > began + GIVE_UP
        for seen in self._seen.values():
            if seen.complaint:
                yield False
            elif seen.up:
                yield len(seen.took) < SAMPLES or seen.state is None
            else:
                yield not seen.final and (seen.refused or not (late and seen.why))

    def _step(self, seconds: float, *, ask: bool = True) -> None:
        for event in self._links.poll(seconds):
            if isinstance(event, LinkUp):
                self._seen[event.link.dialled] = _Seen(self._seen[event.link.dialled].peer, up=True)
                self._ask(event.link.dialled)
            elif isinstance(event, LinkDown):
                self._seen[event.link.dialled] = _Seen(self._seen[event.link.dialled].peer, why=event.why)
            elif isinstance(event, NoLink):
                seen = self._seen[event.name]
                seen.why, seen.refused, seen.final = event.why, event.refused, event.final
            else:
                self._on_message(self._seen[event.link.dialled], event)
        now = time.monotonic()
        for name, seen in self._seen.items():
            unanswered = seen.waiting and now >= seen.asked_at + ASK_AGAIN
            more = ask and not seen.waiting and len(seen.took) < SAMPLES and now >= seen.asked_at + ASK_EVERY
            if seen.up and not seen.complaint and (unanswered or more):
                self._ask(name)

    def _ask(self, name: str) -> None:
        seen = self._seen[name]
        seen.asked_at, seen.waiting = time.monotonic(), True
        self._send(name, self._hello)

    def _on_message(self, seen: _Seen, event: Incoming) -> None:
        try:
            message = wire.decode(event.frames[0].buffer)
        except WireError as error:
            seen.complaint = f"its message cannot be read: {error}"
            return
        if isinstance(message, Welcome):
            if seen.waiting:
                seen.took.append(time.monotonic() - seen.asked_at)
            seen.waiting, seen.welcome = False, message
        elif isinstance(message, State):
            seen.state = message
        elif isinstance(message, Findings):
            seen.findings = message.rows
        elif isinstance(message, Complaint):
            seen.complaint = one_line(message.what)
        elif isinstance(message, Bye):  # its links end next
            seen.up, seen.why = False, f"it left ({one_line(message.reason)})" if message.reason else "it left"

    def _status(self, seen: _Seen) -> PeerStatus:
        welcome, state = seen.welcome, seen.state
        what, reason = _judge(seen)
        key = "accepted" if seen.up else "refused" if seen.refused else "unknown"
        return PeerStatus(
            reachable=seen.up,
            key=key if self.peers.uses_keys else "none",
            state=what,
            bundle_id=welcome.bundle_id if welcome is not None else None,
            model_id=welcome.model_id if welcome is not None else None,
            blocks=welcome.blocks if welcome is not None else seen.peer.blocks,
            warm=state is not None and state.warm,
            queue=state.queue if state is not None else None,
            credits=state.credits if state is not None else None,
            block_ms=state.block_us / 1e3 if state is not None and state.block_us else None,
            latency_ms=min(seen.took) * 1e3 if seen.took else None,
            engine=one_line(welcome.engine) if welcome is not None else "",
            reaches=state.reaches if state is not None else (),
            address=seen.peer.address,
            reason=reason,
        )


def _silence(seen: _Seen) -> str:
    """Why a peer has not said what it found."""
    if seen.complaint:
        return seen.complaint
    if not seen.up:
        return seen.why or f"nobody has answered at {seen.peer.address} yet"
    return "it has not answered; is its check still running, or is it an older version of ls-edge?"


def _judge(seen: _Seen) -> tuple[PeerState, str | None]:
    """The state of a peer, and why it cannot be used."""
    peer, welcome, state = seen.peer, seen.welcome, seen.state
    if not seen.up:
        return (
            PeerState.REFUSED if seen.refused else PeerState.LOST
        ), seen.why or f"nobody has answered at {peer.address} yet"
    if seen.complaint:
        return PeerState.REFUSED, seen.complaint
    if welcome is None or state is None:
        return PeerState.SILENT, "it takes the link and does not answer the greeting; is it another version of ls-edge?"
    if welcome.name != peer.name:
        return (
            PeerState.REFUSED,
            f"the process at {peer.address} is {welcome.name!r}; correct the addresses in peers.yaml",
        )
    note = one_line(welcome.note) if welcome.note else None
    if not welcome.model_id:
        return PeerState.COLD, note or "it has no bundle; send it one with 'ls-edge push'"
    if set(welcome.blocks) - set(peer.blocks):
        return PeerState.REFUSED, f"it serves blocks {list(welcome.blocks)}, peers.yaml gives it {list(peer.blocks)}"
    if not state.warm:
        return PeerState.COLD, "its engines are still being loaded" + (f"; {note}" if note else "")
    if state.stuck:
        return PeerState.STUCK, "its engine has not answered for longer than it should"
    if state.draining:
        return PeerState.DRAINING, "it is leaving and accepts nothing new"
    return PeerState.ALIVE, note


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
    """The source whose key this is; any name without keys."""
    if keys is None:
        if peers.uses_keys:
            raise UsageError(f"{peers.path} has keys, so asking its peers needs a source's: give --secret-key FILE")
        return "observer"
    return peers.source_with_key(keys.public).name
