"""What a turn of a node sends: the messages of each process together, and what may wait for them.

RELEASE and MOVED wait a little for another message to the same process, since nobody waits for them. Everything else
goes at the end of the turn, as one message where its receiver reads several in one header, but for tokens that are
long: a message is taken in when all of it is there, so only what could wait goes with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ls_edge.core.bundle import TokenSpec
from ls_edge.runtime.protocol import codecs
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Message, Moved, Release
from ls_edge.runtime.routing.events import Forward, Send
from ls_edge.runtime.transport.links import Link, Links

SMALL_TOKENS = 64 * 1024
"""Most bytes of tokens that are sent as one message: a message is taken in when all of it is there."""
HOLD_RELEASE_S, HOLD_MOVED_S = 0.05, 0.1
"""Longest that a RELEASE or MOVED waits for another message to the same process: nobody waits for it, and by itself it
would wake that process. Both are small beside the time without which a process is suspected, ``Limits.hop_floor`` and
``Limits.away_floor``."""
MAX_HELD = 4
"""Most of these that wait for one process, since a copy in custody stays until its RELEASE has come."""
_HOLD_S: dict[type[Message], float] = {Release: HOLD_RELEASE_S, Moved: HOLD_MOVED_S}
_MAX_BODIES = wire.MAX_HEADER - 8
"""Most bytes of messages in one header, its own beginning taken off."""


class _Outgoing(NamedTuple):
    """A message on its way to a process."""

    body: bytes
    tokens: memoryview | None
    instruction: Send | Forward | None
    """What asked for it; None where it does not matter if it cannot be sent."""


class Outbox:
    """Messages that are to be sent, by receiver."""

    def __init__(self, name: str, tokens: TokenSpec, links: Links, links_of: Mapping[str, Sequence[Link]]) -> None:
        """``name`` is that of this process; ``links_of`` has the links of each process, which its owner changes."""
        self.held_until = float("inf")
        """When :meth:`let_go` is due."""
        self._name = name
        self._tokens = tokens
        self._links = links
        self._links_of = links_of
        self._codec_of: dict[str, str] = {}
        self._reads_several: set[str] = set()
        """Processes that read several messages in one header."""
        self._now: dict[str, list[_Outgoing]] = {}
        """What :meth:`send` sends."""
        self._held: dict[str, list[Send]] = {}
        """What goes to a process with the next message, or when :meth:`let_go` is called."""

    @property
    def is_empty(self) -> bool:
        """Whether :meth:`send` has nothing to send; what waits for another message does not count."""
        return not self._now

    def greeted(self, receiver: str, codec: str, *, reads_several: bool) -> None:
        """Note what a process reads: the codec for its tokens, and whether it takes several messages in one header."""
        self._codec_of[receiver] = codec if codec in codecs.CODECS else "raw"
        (self._reads_several.add if reads_several else self._reads_several.discard)(receiver)

    def forget(self, receiver: str) -> None:
        """Drop what waits for a process whose links are gone."""
        self._codec_of.pop(receiver, None)
        self._reads_several.discard(receiver)
        self._held.pop(receiver, None)

    def put(self, send: Send) -> None:
        """Have a message sent with this turn, or a little later with another one."""
        name = send.to
        held = self._held.get(name, [])
        hold = _HOLD_S.get(type(send.message)) if name in self._reads_several else None
        if hold is None or name in self._now or len(held) >= MAX_HELD:
            self._now.setdefault(name, []).append(_encoded(send))
            return
        self._held[name] = [*held, send]
        self.held_until = min(self.held_until, time.monotonic() + hold)

    def put_tokens(self, forward: Forward) -> None:
        """Have tokens sent with this turn, as a RUN."""
        self._now.setdefault(forward.to, []).append(self._run_of(forward))

    def put_optional(self, receiver: str, message: Message) -> None:
        """Have a message sent with this turn of which it does not matter if it cannot be."""
        self._now.setdefault(receiver, []).append(_Outgoing(wire.encode_body(message), None, None))

    def let_go(self) -> None:
        """Have what waits for other messages sent with this turn."""
        for name in self._held:
            self._now.setdefault(name, [])
        self.held_until = float("inf")

    def send(self) -> list[Send | Forward]:
        """Send what is to be sent now; return what asked for messages that cannot be."""
        failed: list[Send | Forward] = []
        outbox, self._now = self._now, {}
        for name, new in outbox.items():
            held = [_encoded(send) for send in self._held.pop(name, ())]
            # Long tokens do not wait for what could.
            outgoing = [*new, *held] if any(map(_is_long, new)) else [*held, *new]
            links = self._links_of.get(name)
            for group in self._groups(outgoing, name):
                frames: list[bytes | memoryview] = [wire.join([one.body for one in group])]
                frames += [one.tokens for one in group if one.tokens is not None]
                if not links or not any(self._links.send(link, frames) for link in links):
                    failed += [one.instruction for one in group if one.instruction is not None]
        if not self._held:
            self.held_until = float("inf")
        return failed

    def _groups(self, outgoing: list[_Outgoing], name: str) -> Iterable[list[_Outgoing]]:
        """What goes to a process, cut into messages of one header each."""
        if len(outgoing) == 1:
            yield outgoing
            return
        most = wire.MAX_TOGETHER if name in self._reads_several else 1
        group: list[_Outgoing] = []
        size = tokens = 0
        for one in outgoing:
            more = 0 if one.tokens is None else len(one.tokens)
            # A long frame of tokens is no reason to wait for what stands before it.
            full = len(group) >= most or size + len(one.body) > _MAX_BODIES or (more and tokens + more > SMALL_TOKENS)
            if group and full:
                yield group
                group, size, tokens = [], 0, 0
            group.append(one)
            size, tokens = size + len(one.body), tokens + more
        yield group

    def _run_of(self, forward: Forward) -> _Outgoing:
        """Encode tokens with the codec that their itinerary asks for, else their receiver's, and make their RUN."""
        asked = forward.itinerary.codec
        codec = asked if asked in codecs.CODECS else self._codec_of.get(forward.to, "raw")
        started = time.perf_counter_ns()
        payload = codecs.encode(codec, forward.tokens)
        spent = (time.perf_counter_ns() - started) // 1000
        run = forward.run(codec, self._tokens.count, self._tokens.dim)
        run = msgspec.structs.replace(run, itinerary=_add_codec_time(run.itinerary, self._name, spent))
        return _Outgoing(wire.encode_body(run), payload, forward)


def _encoded(send: Send) -> _Outgoing:
    return _Outgoing(wire.encode_body(send.message), None, send)


def _is_long(outgoing: _Outgoing) -> bool:
    return outgoing.tokens is not None and len(outgoing.tokens) > SMALL_TOKENS


def _add_codec_time(itinerary: wire.Itinerary, name: str, codec_us: int) -> wire.Itinerary:
    visits = itinerary.visits
    if not visits or visits[-1].holder != name:
        return itinerary
    last = msgspec.structs.replace(visits[-1], codec_us=visits[-1].codec_us + codec_us)
    return msgspec.structs.replace(itinerary, visits=(*visits[:-1], last))
