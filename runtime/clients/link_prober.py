"""Measure the links between all processes of a ``peers.yaml``: what ``ls-edge profile --links`` does.

A prober greets every peer as a source and sends requests of one block that the second peer has to the first, to be
handed over (``Itinerary.hand_to``), whatever blocks the two hold. The first peer sends the tokens, which are real, on
and reports in RELEASE how long that took, from its decision until the second had them, decoded and checked. So peers
measure themselves, with one clock each. Links from and to the prober are measured by requests that are not handed over.
One request is on its way at a time. What the requests bring home also tells what an engine call takes a peer beyond
the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError, WireError
from ls_edge.core.peers_file import PeersFile
from ls_edge.device.profile import SCHEMA, CallTimes, LinkFit, LinksDocument, LinkTimes
from ls_edge.engines.opening import open_engine
from ls_edge.runtime.clients.dialler import Dialler
from ls_edge.runtime.protocol import codecs
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Accept,
    Bye,
    Complaint,
    Hello,
    Itinerary,
    Refuse,
    Release,
    Run,
    State,
    TransferId,
    Welcome,
)
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import Incoming, Link, LinkDown, LinkUp, NoLink
from ls_edge.runtime.transport.node import new_incarnation
from ls_edge.runtime.transport.problems import one_line

WARM_UP = 2
"""Transfers of each link and codec that do not count: TCP begins slowly."""
ANSWER_S = 5.0
"""How long a request of two blocks may take until the link is given up."""
_AGAIN_S = 0.05
"""Pause after a peer refused for being busy."""
_HELLO_AGAIN_S = 0.5
_CREDITS = 16


@dataclass(eq=False)
class _ProbedPeer:
    """What is known of one peer."""

    up: bool = False
    problem: str = ""
    """Why it cannot be used, where waiting does not help."""
    why: str = ""
    """Why there was no link when it was last dialled."""
    hello_at: float = 0.0
    welcome: Welcome | None = None
    state: State | None = None

    @property
    def is_ready(self) -> bool:
        return self.up and self.welcome is not None and self.state is not None and self.state.warm


class LinkProber(Dialler):
    """Links to all peers of a file, as a source that measures them; one thread uses it. A context manager."""

    def __init__(self, peers: PeersFile, bundle: Bundle, *, keys: KeyPair | None = None) -> None:
        """Dial the peers; raises :class:`UsageError` and :class:`LinkError` for keys that do not fit the file."""
        peers.check_blocks(bundle.num_blocks)
        self.source = _source_of(peers, keys)
        self._bundle = bundle
        self._name = new_alias(self.source)
        manifest = bundle.manifest
        hello = Hello(self._name, "source", new_incarnation(), wire.MINOR_OF_ONE, manifest.model_id, manifest.bundle_id)
        frame = codecs.wire_bytes("raw", manifest.tokens.count, manifest.tokens.dim)
        super().__init__(peers, hello, keys, tokens_frame=frame)
        self._seen = {peer.name: _ProbedPeer() for peer in peers.peers}
        self._tokens = _real_tokens(bundle)
        self._calls: dict[str, list[int]] = {}
        """Microseconds from a peer's having the tokens to its decision after the engine call, the call left out."""

    def _greeted(self) -> Iterable[str]:
        return [name for name, seen in self._seen.items() if seen.welcome is not None]

    def measure(
        self,
        *,
        transfers: int = 20,
        codec_names: Sequence[str] = tuple(codecs.CODECS),
        wait: float = 5.0,
        on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
    ) -> LinksDocument:
        """Measure ``transfers`` of each link in each codec; peers have ``wait`` seconds to be warm.

        Raises :class:`LinkError` where no peer can be used.
        """
        self._greet(wait)
        ready = [name for name, seen in self._seen.items() if seen.is_ready]
        if not ready:
            why = "; ".join(f"{name}: {self._why(seen)}" for name, seen in self._seen.items())
            raise LinkError(f"no peer of {self.peers.path} can be used ({why}); see 'ls-edge status'")
        missing = [
            (self.source, name, self._why(seen)) for name, seen in self._seen.items() if not seen.is_ready
        ]  # fmt: skip
        pairs = [(one, other) for one in [self.source, *ready] for other in [*ready, self.source] if one != other]
        found: list[LinkTimes] = []
        for number, (origin, to) in enumerate(pairs):
            on_step(number, len(pairs), f"{origin} to {to}")
            try:
                found += [self._measure(origin, to, codec, transfers) for codec in codec_names]
            except LinkError as error:
                missing.append((origin, to, str(error)))
        on_step(len(pairs), len(pairs), "done")
        return LinksDocument(
            SCHEMA, self._bundle.manifest.model_id, self.source, found, [fit_of(times) for times in _by_pair(found)],
            missing, self._call_times(),
        )  # fmt: skip

    def _call_times(self) -> list[CallTimes]:
        found: list[CallTimes] = []
        for name, microseconds in self._calls.items():
            ms = np.asarray(microseconds) / 1e3
            p50, p95 = (round(float(np.percentile(ms, percent)), 4) for percent in (50, 95))
            found.append(CallTimes(name, p50, round(float(ms.mean()), 4), p95, len(ms)))
        return found

    def _measure(self, origin: str, to: str, codec: str, transfers: int) -> LinkTimes:
        """Time one link in one codec; raises :class:`LinkError` where it cannot be."""
        route = self._route(origin, to)
        took = [self._probe(*route, codec, of_first=origin == self.source) for _ in range(WARM_UP + transfers)]
        ms = np.asarray(took[WARM_UP:]) * 1e3
        tokens = self._bundle.manifest.tokens
        return LinkTimes(
            origin=origin, to=to, codec=codec, bytes=codecs.wire_bytes(codec, tokens.count, tokens.dim),
            transfers=transfers, p50_ms=round(float(np.median(ms)), 4), p95_ms=round(float(np.percentile(ms, 95)), 4),
        )  # fmt: skip

    def _route(self, origin: str, to: str) -> tuple[int, str, str]:
        """A block to ask for, the peer that gets the tokens first, and the one that runs the block."""
        first = to if origin == self.source else origin
        last = origin if to == self.source else to
        welcome = self._seen[last].welcome
        if welcome is None or not welcome.blocks:
            raise LinkError(f"{last} serves no block")
        return welcome.blocks[0], first, last

    def _probe(self, block: int, first: str, last: str, codec: str, *, of_first: bool) -> float:
        """Seconds of one transfer: ``of_first`` the one from here, else the one that the first peer reports."""
        end = time.monotonic() + ANSWER_S
        while True:
            took = self._try_probe(block, first, last, codec, end, of_first=of_first)
            if took is not None:
                return took
            self._listen(_AGAIN_S)

    def _try_probe(
        self, block: int, first: str, last: str, codec: str, end: float, *, of_first: bool
    ) -> float | None:  # fmt: skip
        """The same; None where the peer was busy and it may be tried again."""
        transfer = TransferId(os.urandom(16), int.from_bytes(os.urandom(8), "big"), 1)
        skipped = tuple(other for other in range(self._bundle.num_blocks) if other != block)
        itinerary = Itinerary(
            self._name, "sequential", (block,), len(skipped), skipped=skipped, codec=codec,
            hand_to="" if first == last else last,
        )  # fmt: skip
        tokens = self._bundle.manifest.tokens
        began = time.monotonic()
        run = Run(transfer, round((end - began) * 1e6), itinerary, codec, tokens.count, tokens.dim)
        frames: list[bytes | memoryview] = [wire.encode(run), codecs.encode(codec, self._tokens)]
        if not self._links.send(Link(dialled=first), frames):
            raise LinkError(f"nothing can be sent to {first}")
        accepted = reported = None
        is_home = False
        while accepted is None or reported is None or not is_home:
            if time.monotonic() > end:
                raise LinkError(f"{first} and {last} did not answer within {ANSWER_S:.0f} s")
            for sender, message in self._listen(0.05):
                if isinstance(message, Accept) and message.transfer == transfer:
                    accepted = time.monotonic() - began
                elif isinstance(message, Refuse) and message.transfer == transfer:
                    if message.reason != wire.RefuseReason.BUSY or time.monotonic() > end - 2 * _AGAIN_S:
                        raise LinkError(f"{first} refused: {one_line(message.reason)}")
                    return None
                elif isinstance(message, Release) and message.transfer == transfer:
                    if first != last and message.holder != last:
                        to = "back to us" if message.holder == self._name else f"to {message.holder}"
                        raise LinkError(
                            f"{first} gave the tokens {to} and not to {last}: it has no link there, or an older "
                            "version; see 'ls-edge status'"
                        )
                    reported = message.link_us / 1e6
                elif isinstance(message, Run) and message.transfer.request == transfer.request:
                    self._send(sender, Accept(message.transfer, _CREDITS))
                    is_home = True
                    if message.itinerary.remaining:
                        raise LinkError(f"{sender} gave the tokens back: {one_line(message.returning)}")
                    self._learn_calls(message.itinerary)
            for name in (first, last):
                if self._seen[name].problem:
                    raise LinkError(f"{name}: {self._seen[name].problem}")
        if not of_first and not reported:
            raise LinkError(f"{first} does not report what a transfer took; install the same version everywhere")
        return accepted if of_first else reported

    def _learn_calls(self, itinerary: Itinerary) -> None:
        for visit in itinerary.visits:
            if visit.blocks and visit.holder in self._seen:
                self._calls.setdefault(visit.holder, []).append(visit.queue_us)

    def _greet(self, wait: float) -> None:
        end = time.monotonic() + wait
        while time.monotonic() < end and not all(seen.is_ready or seen.problem for seen in self._seen.values()):
            self._listen(0.05)
            for name, seen in self._seen.items():
                if seen.up and seen.welcome is None and time.monotonic() >= seen.hello_at + _HELLO_AGAIN_S:
                    self._say_hello(name)

    def _say_hello(self, name: str) -> None:
        self._seen[name].hello_at = time.monotonic()
        self._send(name, self._hello)

    def _listen(self, seconds: float) -> list[tuple[str, wire.Message]]:
        """Take in what comes within ``seconds``, at least one round; return messages about transfers."""
        found: list[tuple[str, wire.Message]] = []
        for event in self._links.poll(seconds):
            if isinstance(event, LinkUp):
                self._seen[event.link.dialled] = _ProbedPeer(up=True)
                self._say_hello(event.link.dialled)
            elif isinstance(event, LinkDown):
                self._seen[event.link.dialled] = _ProbedPeer(problem=event.why)
            elif isinstance(event, NoLink):
                seen = self._seen[event.name]
                seen.problem, seen.why = event.why if event.final else "", event.why
            elif event.link.dialled:
                message = self._take(self._seen[event.link.dialled], event)
                if message is not None:
                    found.append((event.link.dialled, message))
        return found

    def _take(self, seen: _ProbedPeer, event: Incoming) -> wire.Message | None:
        try:
            message = wire.decode(event.frames[0].buffer)
        except WireError as error:
            seen.problem = f"what it sends cannot be read: {error}"
            return None
        if isinstance(message, Welcome):
            seen.welcome = message
        elif isinstance(message, State):
            seen.state = message
        elif isinstance(message, Complaint):
            seen.problem = one_line(message.what)
        elif isinstance(message, Bye):
            seen.problem = f"it left ({one_line(message.reason)})" if message.reason else "it left"
        else:
            return message
        return None

    def _why(self, seen: _ProbedPeer) -> str:
        if seen.problem:
            return seen.problem
        if not seen.up:
            return seen.why or "nobody answers"
        return "it does not greet" if seen.welcome is None else "its engines are still being loaded"


def fit_of(times: Sequence[LinkTimes]) -> LinkFit:
    """Latency and bandwidth of one link: the least squares line ``ms = latency + bytes / bandwidth`` of its codecs.

    Null where a larger frame does not take longer: on a fast link what codecs take is more than what bytes take.
    """
    origin, to = times[0].origin, times[0].to
    sizes = np.array([one.bytes for one in times], dtype=float)
    ms = np.array([one.p50_ms for one in times])
    if len(set(sizes)) < 2:
        return LinkFit(origin, to, None, None)
    slope, latency = (float(value) for value in np.polyfit(sizes, ms, 1))
    if slope <= 0 or latency < 0:
        return LinkFit(origin, to, None, None)
    return LinkFit(origin, to, round(latency, 4), round(8e-3 / slope, 3))


def _by_pair(times: Sequence[LinkTimes]) -> Iterator[list[LinkTimes]]:
    pairs: dict[tuple[str, str], list[LinkTimes]] = {}
    for one in times:
        pairs.setdefault((one.origin, one.to), []).append(one)
    yield from pairs.values()


def _real_tokens(bundle: Bundle) -> np.ndarray:
    """What the stem makes of noise, float32 ``[1, N, D]``."""
    image = np.random.default_rng(0).standard_normal((1, 3, *bundle.manifest.image.size), dtype=np.float32)
    engine = open_engine(bundle, "stem", kind="onnx", threads=1)
    try:
        return np.ascontiguousarray(engine.run({"images": image}), dtype=np.float32)
    finally:
        engine.close()


def _source_of(peers: PeersFile, keys: KeyPair | None) -> str:
    """The source whose key this is; without keys the first one of the file, or any name."""
    if keys is None:
        if peers.uses_keys:
            raise UsageError(f"{peers.path} has keys, so measuring needs those of a source: give --secret-key FILE")
        return peers.sources[0].name if peers.sources else "prober"
    return peers.source_with_key(keys.public).name
