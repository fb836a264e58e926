"""Measurement of the links between all processes of a ``peers.yaml``, for ``ls-edge profile --links``.

The prober greets every peer as a source. To measure the link between two peers, it sends the first one a request for a
block of the second one that has to be handed over (``Itinerary.hand_to``), regardless of the blocks that the first one
holds. The first peer sends the tokens on and reports in RELEASE how long that took, from its decision until the second
one had decoded and checked them. So peers measure their links themselves, each with its own clock. Links from and to
the prober are measured by requests that are not handed over. There is one request at a time. Returned requests also
tell how long an engine call takes a peer, apart from the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError
from ls_edge.core.parts import ENDS
from ls_edge.core.peers_file import PeersFile
from ls_edge.device.profile import SCHEMA, CallOverhead, LinkFit, LinksDocument, LinkTimes
from ls_edge.engines.opening import open_engine
from ls_edge.runtime.clients.session import STEP_S, Client, source_name
from ls_edge.runtime.protocol import codecs
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Accept, Itinerary, Refuse, Release, Run, TransferId
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.problems import one_line

WARM_UP = 2
"""Transfers of each link and codec that are not counted: TCP starts slowly."""
ANSWER_S = 5.0
"""Seconds until a request without an answer fails."""
MEETING_S = 1.0
"""Seconds that warm peers have to establish links among themselves, which they announce within 0.1 s."""
_AGAIN_S = 0.05
"""Seconds of pause after a peer refused because it is busy."""
_CREDITS = 16


class LinkProber(Client):
    """A source that measures the links of a file; used by one thread. A context manager."""

    def __init__(self, peers: PeersFile, bundle: Bundle, *, keys: KeyPair | None = None) -> None:
        """Dial the peers; raise :class:`UsageError` and :class:`LinkError` for keys that do not fit the file."""
        peers = peers.of_model(bundle.num_blocks)
        self.source = source_name(peers, keys, peers.sources[0].name if peers.sources else "prober")
        self._bundle = bundle
        manifest = bundle.manifest
        frame = codecs.wire_bytes("raw", manifest.tokens.count, manifest.tokens.dim)
        super().__init__(
            peers, keys, self.source, "source", (manifest.model_id, manifest.bundle_id), tokens_frame=frame
        )
        self._tokens = _real_tokens(bundle)
        self._calls: dict[str, list[int]] = {}
        """Microseconds that peers took for an engine call, from tokens to decision, in addition to the call itself."""

    def measure(
        self,
        *,
        transfers: int = 20,
        codec_names: Sequence[str] = tuple(codecs.CODECS),
        wait: float = 5.0,
        on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
    ) -> LinksDocument:
        """Measure each link with ``transfers`` in each codec; peers have ``wait`` seconds to become warm.

        Raise :class:`LinkError` if no peer can be used.
        """
        end = time.monotonic() + wait
        self.wait_until(lambda: all(s.is_warm or s.has_refused for s in self.sessions.values()), wait)
        ready = [name for name, session in self.sessions.items() if session.is_warm]
        faults = {name: str(session.judge()[1]) for name, session in self.sessions.items() if not session.is_warm}
        if not ready:
            why = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
            raise LinkError(f"no peer of {self.peers.path} can be used ({why}); see 'ls-edge status'")
        self.wait_until(lambda: self._are_linked(ready), min(end - time.monotonic(), MEETING_S))
        missing = [(self.source, name, fault) for name, fault in faults.items()]
        pairs = [(one, other) for one in [self.source, *ready] for other in [*ready, self.source] if one != other]
        found: list[LinkTimes] = []
        fits: list[LinkFit] = []
        for number, (origin, to) in enumerate(pairs):
            on_step(number, len(pairs), f"{origin} to {to}")
            try:
                samples = self._measure_codecs(origin, to, codec_names, transfers, retry_until=end)
            except LinkError as error:
                missing.append((origin, to, str(error)))
                continue
            found += [
                LinkTimes(
                    origin,
                    to,
                    codec,
                    self._bytes(codec),
                    transfers,
                    p50_ms=round(float(np.median(ms)), 4),
                    p95_ms=round(float(np.percentile(ms, 95)), 4),
                )
                for codec, ms in samples.items()
            ]
            fits.append(fit_of(origin, to, {self._bytes(codec): ms for codec, ms in samples.items()}))
        on_step(len(pairs), len(pairs), "done")
        model_id = self._bundle.manifest.model_id
        return LinksDocument(SCHEMA, model_id, self.source, found, fits, missing, self._call_times())

    def _bytes(self, codec: str) -> int:
        tokens = self._bundle.manifest.tokens
        return codecs.wire_bytes(codec, tokens.count, tokens.dim)

    def _are_linked(self, names: Sequence[str]) -> bool:
        states = {name: self.sessions[name].state for name in names}
        return all(state is None or {*names} <= {name, *state.reaches} for name, state in states.items())

    def _call_times(self) -> list[CallOverhead]:
        found: list[CallOverhead] = []
        for name, microseconds in self._calls.items():
            ms = np.asarray(microseconds) / 1e3
            p50, p95 = (round(float(np.percentile(ms, percent)), 4) for percent in (50, 95))
            found.append(CallOverhead(name, p50, round(float(ms.mean()), 4), p95, len(ms)))
        return found

    def _measure_codecs(
        self, origin: str, to: str, codec_names: Sequence[str], transfers: int, *, retry_until: float
    ) -> dict[str, np.ndarray]:
        """Time one link in all codecs; retry until ``retry_until``, because two peers may just be linking."""
        while True:
            try:
                return {codec: self._measure(origin, to, codec, transfers) for codec in codec_names}
            except LinkError:
                if time.monotonic() > retry_until:
                    raise
            self.step(_AGAIN_S)

    def _measure(self, origin: str, to: str, codec: str, transfers: int) -> np.ndarray:
        """Return the milliseconds of each transfer in one codec; raise :class:`LinkError` if one fails."""
        route = self._route(origin, to)
        took = [self._probe(*route, codec, of_first=origin == self.source) for _ in range(WARM_UP + transfers)]
        return np.asarray(took[WARM_UP:]) * 1e3

    def _route(self, origin: str, to: str) -> tuple[int, str, str]:
        """Return a block to request, the first peer that gets the tokens, and the peer that runs the block."""
        first = to if origin == self.source else origin
        last = origin if to == self.source else to
        welcome = self.sessions[last].welcome
        blocks = () if welcome is None else sorted(set(welcome.blocks) - ENDS.keys())
        if not blocks:
            raise LinkError(f"{last} serves no block")
        return blocks[0], first, last

    def _probe(self, block: int, first: str, last: str, codec: str, *, of_first: bool) -> float:
        """Return the seconds of one transfer: with ``of_first`` to the first peer, else from the first to the last."""
        end = time.monotonic() + ANSWER_S
        while True:
            took = self._try_probe(block, first, last, codec, end, of_first=of_first)
            if took is not None:
                return took
            self.step(_AGAIN_S)

    def _try_probe(self, block: int, first: str, last: str, codec: str, end: float, *, of_first: bool) -> float | None:
        """Try a transfer once; return None if the peer was busy."""
        transfer = TransferId(os.urandom(16), int.from_bytes(os.urandom(8), "big"), 1)
        skipped = tuple(other for other in range(self._bundle.num_blocks) if other != block)
        itinerary = Itinerary(
            self._hello.name,
            "sequential",
            (block,),
            len(skipped),
            skipped=skipped,
            codec=codec,
            hand_to="" if first == last else last,
        )
        tokens = self._bundle.manifest.tokens
        began = time.monotonic()
        run = Run(transfer, round((end - began) * 1e6), itinerary, codec, tokens.count, tokens.dim)
        if not self.send(first, run, codecs.encode(codec, self._tokens)):
            raise LinkError(f"nothing can be sent to {first}")
        accepted = reported = None
        is_home = False
        while accepted is None or reported is None or not is_home:
            if time.monotonic() > end:
                raise LinkError(f"{first} and {last} did not answer within {ANSWER_S:.0f} s")
            for sender, message in self.step(STEP_S):
                if isinstance(message, Run) and message.transfer.request == transfer.request:
                    self._come_home(sender, message)
                    is_home = True
                elif isinstance(message, Accept) and message.transfer == transfer:
                    accepted = time.monotonic() - began
                elif isinstance(message, Release) and message.transfer == transfer:
                    reported = self._reported(message, first, last)
                elif isinstance(message, Refuse) and message.transfer == transfer:
                    if message.reason != wire.RefuseReason.BUSY or time.monotonic() > end - 2 * _AGAIN_S:
                        raise LinkError(f"{first} refused: {one_line(message.reason)}")
                    return None
            for name in (first, last):
                session = self.sessions[name]
                if session.complaint or not session.up:
                    raise LinkError(f"{name}: {session.judge()[1]}")
        if not of_first and not reported:
            raise LinkError(f"{first} does not report the time of a transfer; install the same version everywhere")
        return accepted if of_first else reported

    def _reported(self, release: Release, first: str, last: str) -> float:
        """Return the seconds that the first peer reports; raise :class:`LinkError` if the tokens went elsewhere."""
        if first != last and release.holder != last:
            to = "back to us" if release.holder == self._hello.name else f"to {release.holder}"
            raise LinkError(
                f"{first} gave the tokens {to} and not to {last}: it has no link there, or an older version; see "
                "'ls-edge status'"
            )
        return release.link_us / 1e6

    def _come_home(self, sender: str, run: Run) -> None:
        """Accept returned tokens and record how long the peers had them."""
        self.send(sender, Accept(run.transfer, _CREDITS))
        if run.itinerary.remaining:
            raise LinkError(f"{sender} returned the tokens: {one_line(run.returning)}")
        for visit in run.itinerary.visits:
            if visit.blocks and visit.holder in self.sessions:
                self._calls.setdefault(visit.holder, []).append(visit.queue_us)


def fit_of(origin: str, to: str, samples: Mapping[int, Sequence[float] | np.ndarray]) -> LinkFit:
    """Fit ``ms = latency + bytes / bandwidth`` to the times by size, with a 95 % interval (Theil and Sen).

    The median of the slopes between all transfers of different sizes ignores outliers. No bandwidth is given if its
    slope may be zero: on a fast link, codecs take more time than bytes.
    """
    sizes = np.concatenate([np.full(len(ms), size, dtype=float) for size, ms in samples.items()])
    times = np.concatenate([np.asarray(ms, dtype=float) for ms in samples.values()])
    one, other = np.triu_indices(len(sizes), 1)
    further = sizes[other] - sizes[one]
    slopes = np.sort((times[other] - times[one])[further != 0] / further[further != 0])
    if not len(slopes):
        return LinkFit(origin, to, None, None)
    counts = np.array([len(sizes), *map(len, samples.values())])
    pairs = counts * (counts - 1) * (2 * counts + 5) / 18
    half = 1.96 * np.sqrt(pairs[0] - pairs[1:].sum()) / 2  # Kendall's standard deviation; sizes are tied in a codec
    middle = len(slopes) / 2
    low, high = slopes[[max(0, int(middle - half)), min(len(slopes) - 1, int(middle + half))]]
    slope = float(np.median(slopes))
    latency = float(np.median(times - slope * sizes))
    if low <= 0 or latency < 0:
        return LinkFit(origin, to, None, None)
    least, best, most = (round(8e-3 / float(value), 3) for value in (high, slope, low))
    return LinkFit(origin, to, round(latency, 4), best, (least, most))


def _real_tokens(bundle: Bundle) -> np.ndarray:
    """Return the stem tokens of a noise image, float32 ``[1, N, D]``."""
    image = np.random.default_rng(0).standard_normal((1, 3, *bundle.manifest.image.size), dtype=np.float32)
    engine = open_engine(bundle, "stem", kind="onnx", threads=1)
    try:
        return np.ascontiguousarray(engine.run({"images": image}), dtype=np.float32)
    finally:
        engine.close()
