"""Outgoing messages of a turn, grouped by receiver.

RELEASE and MOVED wait a little for another message to the same process, since no process waits for them. All other
messages are sent at the end of the turn and share a header. Long tokens are sent separately from messages that the
receiver could use sooner, since a ZeroMQ message arrives as a whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.protocol.payload import IMAGE, LOGITS, write_payload
from ls_edge.runtime.routing.state.events import MAY_WAIT, Forward, Send
from ls_edge.runtime.transport.connections import Link
from ls_edge.runtime.transport.links import Links

SMALL_TOKENS = 64 * 1024
"""Largest tokens, in bytes, that are sent together with other messages."""
HOLD_S = 0.1
"""Maximum wait of a RELEASE or MOVED for another message to the same process, in seconds; alone, it would only wake its
receiver. The wait is short compared with ``HopLimit.floor`` and ``HopLimit.away``."""
MAX_HELD = 4
"""Limit on such messages for one process, since it keeps copies until their RELEASE arrives."""
_MAX_BODIES = framing.MAX_HEADER - 8
"""Limit on the messages in a header, in bytes."""
NO_CODEC = "none"
"""Key of :class:`LinkCounts` for everything but tokens."""


class LinkCounts:
    """Counts of messages of a node, which any thread may read."""

    def __init__(self, peers: Iterable[str]) -> None:
        """Count suspicions of ``peers``, the names in ``peers.yaml``; others would need unlimited memory."""
        self.sent = Counter(dict.fromkeys((NO_CODEC, *CODECS, IMAGE, LOGITS), 0))
        """Number of bytes by codec, as in ``received``."""
        self.received = Counter(self.sent)
        self.suspicions = dict.fromkeys(peers, 0)
        """Number of suspicions by peer, after deadlines without progress."""


class _Outgoing(NamedTuple):
    body: bytes
    tokens: memoryview | None
    codec: str
    instruction: Send | Forward


class Outbox:
    """Messages to be sent, by receiver."""

    def __init__(self, name: str, links: Links, links_of: Mapping[str, Sequence[Link]], counts: LinkCounts) -> None:
        """Send messages of the process ``name``; ``links_of`` has the current links of each receiver."""
        self.held_until = float("inf")
        """Time at which :meth:`let_go` is due."""
        self._name = name
        self._links = links
        self._links_of = links_of
        self.counts = counts
        self.codec_of: dict[str, str] = {}
        """Codec for tokens to each greeted process."""
        self._now: dict[str, list[_Outgoing]] = {}
        """Messages of the next :meth:`send`."""
        self._held: dict[str, list[Send]] = {}
        """Messages that wait for another message to the same process, or for :meth:`let_go`."""

    @property
    def is_empty(self) -> bool:
        """Whether :meth:`send` has nothing to send."""
        return not self._now

    def forget(self, receiver: str) -> None:
        """Drop the waiting messages for a process without links."""
        self.codec_of.pop(receiver, None)
        self._held.pop(receiver, None)

    def put(self, send: Send) -> None:
        """Add a message to this turn, or let it wait for another one."""
        name = send.to
        held = self._held.get(name, [])
        can_wait = type(send.message) in MAY_WAIT and name in self.codec_of
        if not can_wait or name in self._now or len(held) >= MAX_HELD:
            self._now.setdefault(name, []).append(_encoded(send))
            return
        self._held[name] = [*held, send]
        self.held_until = min(self.held_until, time.monotonic() + HOLD_S)

    def put_tokens(self, forward: Forward) -> None:
        """Add tokens to this turn, as a RUN."""
        self._now.setdefault(forward.to, []).append(self._run_of(forward))

    def let_go(self) -> None:
        """Add the waiting messages to this turn."""
        for name in self._held:
            self._now.setdefault(name, [])
        self.held_until = float("inf")

    def send(self) -> list[Send | Forward]:
        """Send the messages of this turn; return the instructions whose messages cannot be sent."""
        failed: list[Send | Forward] = []
        outbox, self._now = self._now, {}
        for name, new in outbox.items():
            held = [_encoded(send) for send in self._held.pop(name, ())]
            # Long tokens do not wait for messages that can wait.
            outgoing = [*new, *held] if any(len(one.tokens or b"") > SMALL_TOKENS for one in new) else [*held, *new]
            links = self._links_of.get(name)
            for group in _groups(outgoing):
                frames: list[bytes | memoryview] = [framing.join([one.body for one in group])]
                frames += [one.tokens for one in group if one.tokens is not None]
                if links and any(self._links.send(link, frames) for link in links):
                    self._count(group)
                else:
                    failed += [one.instruction for one in group]
        if not self._held:
            self.held_until = float("inf")
        return failed

    def _count(self, group: list[_Outgoing]) -> None:
        for one in group:
            if one.tokens is not None:
                self.counts.sent[one.codec] += len(one.tokens)

    def _run_of(self, forward: Forward) -> _Outgoing:
        """Return the RUN for tokens, encoded with the codec of the itinerary or else of the receiver."""
        wanted = (forward.itinerary.codec, self.codec_of.get(forward.to), "raw")
        codec = next(one for one in wanted if one in CODECS)
        started = time.perf_counter_ns()
        payload, codec, count, dim = write_payload(forward.tokens, codec)
        spent = (time.perf_counter_ns() - started) // 1000
        run = forward.run(codec, count, dim)
        run = msgspec.structs.replace(run, itinerary=_add_codec_time(run.itinerary, self._name, spent))
        return _Outgoing(framing.encode_body(run), payload, codec, forward)


def _groups(outgoing: list[_Outgoing]) -> Iterable[list[_Outgoing]]:
    """Divide messages into groups that share a header each."""
    if len(outgoing) == 1:
        yield outgoing
        return
    group: list[_Outgoing] = []
    size = tokens = 0
    for one in outgoing:
        more = 0 if one.tokens is None else len(one.tokens)
        full = len(group) >= framing.MAX_TOGETHER or size + len(one.body) > _MAX_BODIES
        # Messages before a long frame of tokens do not wait for it.
        if group and (full or (more and tokens + more > SMALL_TOKENS)):
            yield group
            group, size, tokens = [], 0, 0
        group.append(one)
        size, tokens = size + len(one.body), tokens + more
    yield group


def _encoded(send: Send) -> _Outgoing:
    return _Outgoing(framing.encode_body(send.message), None, NO_CODEC, send)


def _add_codec_time(itinerary: wire.Itinerary, name: str, codec_us: int) -> wire.Itinerary:
    visits = itinerary.visits
    if not visits or visits[-1].holder != name:
        return itinerary
    last = msgspec.structs.replace(visits[-1], codec_us=visits[-1].codec_us + codec_us)
    return msgspec.structs.replace(itinerary, visits=(*visits[:-1], last))
