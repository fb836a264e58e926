"""Status of the peers of a ``peers.yaml``, seen from outside, for ``ls-edge status``.

An observer dials every peer, greets it in the role ``observer`` and listens to its STATE. It does not need a bundle; if
the file has keys, it needs the secret key of a source. It takes no part in routing and costs a peer one link.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

from ls_edge.core.errors import LinkError
from ls_edge.core.parts import ShownPart, shown_parts
from ls_edge.core.peer_reports import PeerReport, PeerState
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import name_blocks, one_line
from ls_edge.runtime.clients.session import REACH_S, Client, Session, source_name
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Chunk, Complaint, FindingRow, Findings, Inspect, Message, Want, Welcome
from ls_edge.runtime.transport.connections import Link
from ls_edge.runtime.transport.keys import KeyPair

GREET_EVERY_S = 0.1
"""Seconds between two HELLO messages to a peer."""
LINKS_S = 1.0
"""Seconds after which a missing link between two peers is reported."""
SAMPLES = 3
"""Greetings per peer; its latency is that of the fastest one. The last one is large."""
LARGE = 16384
"""Bytes added to a large greeting and requested from the manifest, more than any packet carries."""
MTU = "large packets do not pass (MTU), so tokens will not either; lower the MTU of the interface or VPN on both ends"


class PeerStatus(PeerReport, frozen=True, kw_only=True):
    """Status of one peer: an entry of ``ls-edge status --json``."""

    reachable: bool
    """Whether a process answers at its address and the handshake succeeded."""
    key: str
    """``accepted``, ``refused``, ``none`` (the file has no keys) or ``unknown`` (no answer)."""
    model_id: str | None = None
    blocks: tuple[ShownPart, ...]
    """Announced blocks; before the first greeting, those of the file."""
    block_ms: float | None = None
    """Typical time of a block, in milliseconds."""
    latency_ms: float | None = None
    """Time from a greeting to its answer: the link in both directions, and the peer's loop."""
    address: str
    reached_through: tuple[str, ...] = ()
    """Peers that reach a peer which this process does not reach itself; requests go through them."""
    leads_to: tuple[ShownPart, ...] = ()
    """Blocks of peers that it reaches, directly or through others."""
    reason: str | None = None
    """Reason why it cannot be used, or does not serve the bundle that it should; null otherwise."""


class Observer(Client):
    """Observer of all peers of a file; used by one thread. A context manager."""

    def __init__(self, peers: PeersFile, *, keys: KeyPair | None = None) -> None:
        """Dial the peers; raise :class:`UsageError` and :class:`LinkError` for keys that do not match the file."""
        super().__init__(peers, keys, source_name(peers, keys, "observer"), "observer")
        self._digest = hashlib.sha256(peers.raw).digest()
        self._patience = peers.heartbeat.silence_ms(LARGE) / 1e3
        self._large: dict[str, tuple[Session, float, set[str]]] = {}
        """Session and time of the large messages to each peer, and what has not come back yet."""
        self.small_only: set[str] = set()
        """Peers from which the latest large message, or its answer, has not arrived."""

    def look(self, seconds: float) -> Mapping[str, PeerStatus]:
        """Greet all peers; return their status when all have answered, or after ``seconds``."""
        began = time.monotonic()
        for session in self.sessions.values():
            session.greetings.clear()
        self.wait_until(lambda: self._has_seen_all(began), seconds)
        return self.view()

    def step(self, seconds: float) -> Sequence[tuple[str, Message]]:
        """Handle events for at most ``seconds``, and measure the latency of peers by further greetings."""
        found = super().step(seconds)
        now = time.monotonic()
        for name, message in found:
            if name in self._large:
                awaited = self._large[name][2]
                if isinstance(message, Complaint) and Chunk.__name__ in awaited:  # it does not know the request
                    awaited.discard(Chunk.__name__)
                    self.sessions[name].complaint = ""
                awaited.discard(type(message).__name__)
        for name, session in self.sessions.items():
            due = not session.waiting and now >= session.greeted_at + GREET_EVERY_S
            if session.up and not session.complaint and due and len(session.greetings) < SAMPLES:
                self.greet(name)
                if len(session.greetings) == SAMPLES - 1:
                    self._send_large(name, session)
            self._judge_large(name, session, now)
        return found

    def _send_large(self, name: str, session: Session) -> None:
        """Send a greeting that fills several packets, and ask for as much of the manifest."""
        awaited = {Welcome.__name__}
        self._links.send(Link(dialed=name), [framing.encode_padded(self._hello, LARGE)])
        if session.welcome is not None and len(session.welcome.bundle_id) == 64:
            self.send(name, Want(bytes.fromhex(session.welcome.bundle_id), 0, LARGE))
            awaited.add(Chunk.__name__)
        self._large[name] = session, time.monotonic(), awaited

    def _judge_large(self, name: str, session: Session, now: float) -> None:
        """Record whether the large messages to a peer have been answered; their loss ends the link.

        A peer need not send its manifest. Messages behind a stuck piece of it do not arrive, so the answer to a later
        greeting decides.
        """
        asked, at, awaited = self._large.get(name, (session, now, set()))
        if awaited == {Chunk.__name__} and asked is session and now > at + self._patience / 2:
            at, awaited = now, {Welcome.__name__}
            self.greet(name)
            self._large[name] = session, at, awaited
        if name in self._large and (not awaited or asked is not session or now > at + self._patience):
            del self._large[name]
            (self.small_only.add if awaited else self.small_only.discard)(name)

    def _has_seen_all(self, began: float) -> bool:
        """Return whether looking longer would show nothing new; peers that just started get time for their links."""
        seen = not self._large and all(
            one.is_hopeless(began)
            or name in self.small_only
            or (len(one.greetings) >= SAMPLES and one.state is not None)
            for name, one in self.sessions.items()
        )
        return seen and (time.monotonic() > began + LINKS_S or not unreached(self.view()))

    def inspect(self, seconds: float) -> Mapping[str, tuple[FindingRow, ...] | str]:
        """Make all peers check their machines; return their findings, or the reason why there are none.

        Wait at most ``seconds``.
        """
        found = self._ask(list(self.sessions), Inspect(), seconds)
        return {name: one if isinstance(one, str) else one.rows for name, one in found.items()}

    def profile(self, name: str, duration: float, seconds: float) -> bytes:
        """Make a peer time its engines for ``duration`` seconds at each batch size; return its JSON document.

        Raise :class:`LinkError` with the reason if it has not arrived after ``seconds``.
        """
        found = self._ask([name], Inspect(max(1, round(duration * 1e3))), seconds)[name]
        if isinstance(found, str) or not found.document:
            why = found if isinstance(found, str) else "; ".join(row.detail for row in found.rows)
            raise LinkError(f"{name}: {one_line(why) or 'it is an older version of ls-edge, which does not measure'}")
        return found.document

    def events(self, seconds: float) -> Mapping[str, str]:
        """Return the latest events of routing of all peers, or the reason why there are none."""
        found = self._ask(list(self.sessions), Inspect(events=True), seconds)
        return {
            name: one if isinstance(one, str) else one.document.decode(errors="replace") for name, one in found.items()
        }

    def _ask(self, names: Sequence[str], message: Inspect, seconds: float) -> dict[str, Findings | str]:
        """Send a message to peers, on each new link; return the answers, or the reasons why there are none."""
        began = time.monotonic()
        asked: set[Session] = set()

        def has_all() -> bool:
            chosen = {name: self.sessions[name] for name in names}
            for name, session in chosen.items():
                if session.up and session.welcome is not None and session not in asked:
                    asked.add(session)
                    self.send(name, message)
            return all(
                one.findings is not None
                or one.is_hopeless(began)
                or name in self.small_only
                or (one.welcome is None and time.monotonic() > began + REACH_S)
                for name, one in chosen.items()
            )

        self.wait_until(has_all, seconds)
        return {name: self.sessions[name].findings or self._why_no_findings(name) for name in names}

    def view(self) -> Mapping[str, PeerStatus]:
        """Return the status of each peer as far as it is known."""
        return {name: self._status(session) for name, session in self.sessions.items()}

    def _status(self, session: Session) -> PeerStatus:
        welcome, state = session.welcome, session.state
        judged, reason = session.judge()
        if session.peer.name in self.small_only:
            judged, reason = PeerState.SILENT, MTU
        if runs := self.other_file(session):
            reason = f"{reason}; {runs}" if reason else runs
        key = "accepted" if session.up else "refused" if session.no_link.refused else "unknown"
        return PeerStatus(
            reachable=session.up,
            key=key if self.peers.uses_keys else "none",
            state=judged,
            bundle_id=welcome.bundle_id if welcome is not None else None,
            model_id=welcome.model_id if welcome is not None else None,
            blocks=shown_parts(session.peer.blocks.listed if welcome is None else welcome.blocks),
            warm=state is not None and state.warm,
            queue=state.queue if state is not None else None,
            credits=state.credits if state is not None else None,
            block_ms=state.block_us / 1e3 if state is not None and state.block_us else None,
            latency_ms=min(session.greetings) * 1e3 if session.greetings else None,
            engine=one_line(welcome.engine) if welcome is not None else "",
            reaches=state.reaches if state is not None else (),
            address=session.peer.address,
            reached_through=() if session.up else self._reached_through(session.peer.name),
            leads_to=() if state is None else shown_parts(state.reach_blocks),
            reason=reason,
        )

    def other_file(self, session: Session) -> str:
        """Return how the file that a peer runs differs from that of this process; empty if it does not.

        A file that was never applied may differ in comments, so only other blocks count.
        """
        welcome, here = session.welcome, session.peer.blocks
        if welcome is None or not welcome.files or any(file.digest == self._digest for file in welcome.files):
            return ""
        version = welcome.files[0].version
        are_other = bool(here.listed and welcome.blocks) and set(here) != set(welcome.blocks)
        if not version and (not are_other or welcome.note):
            return ""
        running = [one.welcome.files[0] for one in self.sessions.values() if one.welcome and one.welcome.files]
        ours = [file.version for file in running if file.digest == self._digest]
        which = "an older" if version < max(ours, default=0) else "another"
        number = f", version {version}" if version else ""
        blocks = f" ({name_blocks(welcome.blocks)}; here {name_blocks(here)})" if are_other else ""
        return f"it runs {which} peers.yaml{number}{blocks}; see 'ls-edge apply {self.peers.path} --dry-run'"

    def _why_no_findings(self, name: str) -> str:
        session, through = self.sessions[name], ", ".join(self._reached_through(name))
        if name in self.small_only:
            return MTU
        if session.has_refused or not session.up:
            return session.why_silent + (f"; it is reached through {through}" if through else "")
        return "it has not answered; is its check still running, or is it an older version of ls-edge?"

    def _reached_through(self, name: str) -> tuple[str, ...]:
        return tuple(
            other
            for other, one in self.sessions.items()
            if one.is_warm and one.state is not None and name in one.state.reaches
        )


def unreached(found: Mapping[str, PeerStatus]) -> dict[str, list[str]]:
    """Return, for each peer that lacks links to usable peers of its model, the names of those peers."""
    alive = {name: status for name, status in found.items() if status.state == PeerState.ALIVE}
    lacking = {
        name: [
            other
            for other, one in alive.items()
            if one.model_id == status.model_id and other not in (name, *status.reaches)
        ]
        for name, status in alive.items()
    }
    return {name: others for name, others in lacking.items() if others}


def unreached_text(lacking: Mapping[str, Sequence[str]]) -> str:
    """Return a line about the missing links, with advice."""
    pairs = "; ".join(f"{name} has no link to {', '.join(others)}" for name, others in lacking.items())
    return (
        f"{pairs}. Give these machines the same peers.yaml, with the key that each peer uses and an address that the "
        "others can reach, and restart their peers; the log of a peer says why a link failed"
    )
