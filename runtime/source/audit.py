"""Audits: recompute a fraction of a source's answers, to detect peers that return wrong tokens.

Answers are selected by secret random numbers after they have returned, so peers cannot predict the selection. The
recomputation runs the image's stem tokens through the recorded arrangement with the bundle's own block files; the
logits may differ by the tolerance of a replay. If they differ by more, some tokens were wrong. Then the source sends
the same image once more with every hop through itself (the *challenge*) and compares the tokens of each hop with the
output of its blocks for the input of that hop. The first wrong hop names its holder. If no hop is wrong, all holders of
the answer are suspects, each counted as one of several.

A thread of the lowest priority does this. Answers never wait for it: if too many audits wait, the next one is dropped
and counted. A peer can distinguish a challenge from other requests, since its hops go through the source. A peer that
is honest only in challenges stays one of several suspects, but is named again with each further mismatch.

A source without a bundle recomputes nothing. It sends the image once more, to a trusted peer that holds stem, head and
all blocks and repeats the order of the answer alone (:class:`PeerAuditor`). No other peer learns which answers are
audited. If the logits differ, all holders except for the auditor are suspects.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.arrangement import apply
from ls_edge.core.bundle import Bundle, Manifest
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.records import AuditSummary, Suspect
from ls_edge.device.worker import Worker
from ls_edge.engines.pipeline import Pipeline, relative_error
from ls_edge.runtime.protocol.codecs import REPLAY_TOLERANCE, decode, encode
from ls_edge.runtime.protocol.messages import Itinerary, Ran
from ls_edge.runtime.routing.state.events import Complete, Fail, Returned, Submit
from ls_edge.runtime.source.results import itinerary_holders
from ls_edge.runtime.source.settings import Itineraries
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

MAX_WAITING = 16
"""Maximum number of audits that wait for the thread; each keeps the tokens of an image."""
MAX_CHALLENGES = 4
"""Maximum number of challenges in flight; beyond it, a mismatch names all holders immediately."""
_FIRST_CHALLENGE = 1 << 62
"""First number of a challenge, above the numbers of all requests."""
NICENESS = 19
"""Niceness of the audit thread: answers have priority."""
_PRECISION_TOLERANCE = {"fp32": REPLAY_TOLERANCE["raw"], "fp16": REPLAY_TOLERANCE["fp16"]}
"""Minimum tolerance by the precision of a bundle, since engines of other devices round differently."""
_LOOSEST = max(REPLAY_TOLERANCE.values())


@dataclass(frozen=True, eq=False)
class Audit:
    """An answer to recompute."""

    request: int
    sent: Any
    """Input that the source sent: stem tokens ``[1, N, D]``, or an encoded image."""
    itinerary: Itinerary
    logits: np.ndarray
    """Logits of the answer, ``[C]``."""
    hands: tuple[str, ...] = ()
    """Processes that this source saw handle its tokens, regardless of the itinerary."""

    @property
    def holders(self) -> list[str]:
        """Processes that may have changed its tokens."""
        return list(dict.fromkeys([*itinerary_holders(self.itinerary), *self.hands]))


@dataclass(eq=False)
class Challenge:
    """An image that is sent once more to find the process that returned wrong tokens."""

    audit: Audit
    difference: float
    on_end: Callable[[Challenge], None]
    """Callback on the source thread."""
    returns: list[Returned] = field(default_factory=list)
    end: Complete | Fail | None = None


class Challenges:
    """Challenges of a source, from the auditor's request to the last return."""

    def __init__(self, node: Node, itineraries: Itineraries, budget_s: float) -> None:
        self._node, self._itineraries, self._budget_s = node, itineraries, budget_s
        self._wanted: deque[Challenge] = deque()
        self._open: dict[int, Challenge] = {}
        self._numbers = itertools.count(_FIRST_CHALLENGE)

    def request(self, challenge: Challenge) -> None:
        """Queue a challenge; any thread may call it."""
        self._wanted.append(challenge)
        self._node.wake()

    def start(self) -> None:
        """Send the stem tokens, or images, of the requested challenges."""
        while self._wanted:
            challenge, number = self._wanted.popleft(), next(self._numbers)
            self._open[number] = challenge
            itinerary = self._itineraries.challenge(challenge.audit.itinerary)
            deadline = time.monotonic() + self._budget_s
            self._node.feed(Submit(number, itinerary, challenge.audit.sent, deadline, watch_returns=True))

    def execute(self, instruction: Complete | Fail | Returned) -> bool:
        """Record a return or the end of a challenge; return False if the instruction belongs to no challenge."""
        challenge = self._open.get(instruction.request)
        if challenge is None:
            return False
        if isinstance(instruction, Returned):
            challenge.returns.append(instruction)
        else:
            del self._open[instruction.request]
            challenge.end = instruction
            challenge.on_end(challenge)
        return True


class Auditor:
    """Recomputation of selected answers, with counts of the results; the source thread calls :meth:`offer`."""

    def __init__(
        self, share: float, recomputation: Recomputation | None, challenge: Callable[[Challenge], None]
    ) -> None:
        """Audit the fraction ``share`` of the answers; call ``challenge`` on another thread to start a challenge."""
        self._recomputation = recomputation
        self._challenge = challenge
        self._random = random.SystemRandom()
        self._change = threading.Condition()
        self.summary = AuditSummary(share, 0, 0, 0, 0)
        """Current counts; immutable."""
        self._num_challenges = 0
        self._worker: Worker[None] = Worker("audit", lambda: None, niceness=NICENESS)

    def offer(self, audit: Audit) -> None:
        """Queue an audit of an answer if it is selected; never wait."""
        if self._random.random() >= self.summary.share:
            return
        if self.summary.waiting >= MAX_WAITING:
            self._add(dropped=1)
            return
        self._add(waiting=1)
        self._submit(partial(self._check, audit))

    def finish(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until no audit is left."""
        with self._change:
            self._change.wait_for(lambda: not self.summary.waiting, timeout)

    def close(self) -> None:
        """Stop after the current audit, and drop the waiting ones."""
        if self._worker.close() and self._recomputation is not None:
            self._recomputation.close()
        dropped = len(self._worker)
        self._add(dropped=dropped, waiting=-dropped)

    def _submit(self, job: Callable[[], None]) -> None:
        self._worker.submit(partial(self._guarded, job))

    # On the auditor's thread.

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            # A failed audit, for example because the bundle was damaged meanwhile, proves nothing about a peer.
            known = isinstance(error, LsEdgeError)
            log.error("an audit failed", extra={"why": str(error)}, exc_info=None if known else error)
            self._add(dropped=1, waiting=-1)

    def _check(self, audit: Audit) -> None:
        assert self._recomputation is not None
        difference, matches = self._recomputation.compare(audit.sent, audit.itinerary, audit.logits)
        if self._count(audit, difference, matches=matches):
            return
        if self._num_challenges < MAX_CHALLENGES:
            self._num_challenges += 1
            self._challenge(Challenge(audit, difference, lambda ended: self._submit(partial(self._judge, ended))))
        else:
            self._name(audit.holders, difference)

    def _count(self, audit: Audit, difference: float, *, matches: bool) -> bool:
        """Count an audit; return whether it matches."""
        if matches:
            self._add(audited=1, matched=1, waiting=-1)
        else:
            self._add(audited=1, mismatched=1)
            why = f"logits differ by {difference:.2g}, holders {', '.join(audit.holders)}"
            log.warning("an audit does not match", extra={"request": audit.request, "why": why})
        return matches

    def _judge(self, challenge: Challenge) -> None:
        """Name the process whose hop in the challenge is wrong, or all holders of the answer."""
        self._num_challenges -= 1
        assert self._recomputation is not None
        found = self._recomputation.first_wrong(challenge.audit.sent, challenge.returns)
        self._name(*(found or (challenge.audit.holders, challenge.difference)))

    def _name(self, holders: Sequence[str], difference: float) -> None:
        """End an audit by naming its suspects."""
        alone = len(holders) == 1
        suspects = dict(self.summary.suspects)
        for name in holders:
            known = suspects.get(name, Suspect())
            suspects[name] = Suspect(
                known.named + alone, known.one_of + (not alone), difference if np.isfinite(difference) else None
            )
        log.warning(
            "a peer returns wrong results" if alone else "one of these peers returns wrong results",
            extra={"peer": ", ".join(holders), "why": f"it differs by {difference:.2g}"},
        )
        self._add(suspects, waiting=-1)

    def _add(self, suspects: Mapping[str, Suspect] | None = None, **counts: int) -> None:
        """Add to the counts of the summary; any thread may call it."""
        with self._change:
            new = {name: getattr(self.summary, name) + more for name, more in counts.items()}
            suspects = self.summary.suspects if suspects is None else suspects
            self.summary = msgspec.structs.replace(self.summary, suspects=suspects, **new)
            self._change.notify_all()


class PeerAuditor(Auditor):
    """Auditor that makes a trusted peer repeat the selected answers, for a source without a bundle."""

    def __init__(
        self,
        share: float,
        challenge: Callable[[Challenge], None],
        peer: str,
        tolerances: Tolerances,
    ) -> None:
        """Make the trusted peer ``peer`` repeat answers."""
        super().__init__(share, None, challenge)
        self._peer, self._tolerances = peer, tolerances

    def _check(self, audit: Audit) -> None:
        self._challenge(Challenge(audit, 0.0, lambda ended: self._submit(partial(self._compare, ended))))

    def _compare(self, challenge: Challenge) -> None:
        """Compare an answer with the auditor's answer; drop the audit if that failed or others took part in it."""
        audit, end = challenge.audit, challenge.end
        if not isinstance(end, Complete) or {*itinerary_holders(end.itinerary), *end.seen_holders} != {self._peer}:
            self._add(dropped=1, waiting=-1)
            return
        difference = relative_error(audit.logits, end.tokens[0])
        if not self._count(audit, difference, matches=difference <= self._tolerances.of(audit.holders)):
            self._name([name for name in audit.holders if name != self._peer] or [self._peer], difference)


class Tolerances:
    """Differences of logits or tokens that count as equal."""

    def __init__(self, manifest: Manifest, codecs: Mapping[str, str], bundle_of: Callable[[str], str]) -> None:
        """Use the codec of each peer, and the id of the bundle that it serves, which ``bundle_of`` returns."""
        self.codecs = dict(codecs)
        self._manifest, self._bundle_of = manifest, bundle_of

    def of(self, holders: Sequence[str]) -> float:
        """Return the largest tolerance of these holders, by codec and precision; the loosest if those are unknown."""
        codecs, manifest = self.codecs, self._manifest
        if any(name not in codecs or self._bundle_of(name) != manifest.bundle_id for name in holders):
            return _LOOSEST
        least = _PRECISION_TOLERANCE.get(manifest.precision, _LOOSEST)
        return max([least, *(REPLAY_TOLERANCE.get(codecs[name], _LOOSEST) for name in holders)])


class Recomputation:
    """Blocks and head of a bundle in this process, to check tokens of peers; used by one thread."""

    def __init__(self, bundle: Bundle, tolerances: Tolerances) -> None:
        """Open no engine yet.

        Raise :class:`UsageError` if the bundle lacks block files, which a source does not need otherwise.
        """
        missing = [part.file for part in bundle.manifest.parts.blocks if not (bundle.folder / part.file).is_file()]
        if missing:
            raise UsageError(
                f"{bundle.folder} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}, which an audit "
                "needs to recompute answers; copy the whole bundle to this machine, or omit the audit"
            )
        self._bundle, self._tolerances = bundle, tolerances
        self._opened: Pipeline | None = None

    def close(self) -> None:
        """Close the engines."""
        if self._opened is not None:
            self._opened.close()

    def compare(self, stem_tokens: np.ndarray, itinerary: Itinerary, logits: np.ndarray) -> tuple[float, bool]:
        """Return the relative error of an answer, and whether it is within the tolerance."""
        chain = self._pipeline
        difference = relative_error(logits, chain.head(apply(itinerary.arrangement, stem_tokens, chain.block))[0])
        return difference, difference <= self._tolerances.of(itinerary_holders(itinerary))

    def first_wrong(self, stem_tokens: np.ndarray, hops: Sequence[Returned]) -> tuple[list[str], float] | None:
        """Return the holder of the first wrong hop and its relative error; None if all hops are right.

        Return several names if one of them handed on tokens that another one computed.
        """
        known: dict[tuple[Ran, ...], np.ndarray] = {(): stem_tokens}
        for hop in hops:
            if any(len(wave) != 1 for wave in hop.itinerary.waves):
                return None
            steps = tuple(step for wave in hop.itinerary.waves for step in wave[0])
            before = next(steps[:length] for length in range(len(steps), -1, -1) if steps[:length] in known)
            names = list(dict.fromkeys([*(holder for _, holder in steps[len(before) :]), hop.sender]))
            # The first holder received the tokens rounded by the codec.
            codec, spec = self._tolerances.codecs.get(names[0], "raw"), self._bundle.manifest.tokens
            tokens = decode(codec, bytes(encode(codec, known[before])), spec.count, spec.dim)
            for slot, (block, _) in enumerate(steps[len(before) :], len(before)):
                tokens = self._pipeline.block(block, tokens, slot)
            difference = relative_error(hop.tokens, tokens)
            if not difference <= self._tolerances.of(names):
                return names, difference
            known[steps] = hop.tokens
        return None

    @property
    def _pipeline(self) -> Pipeline:
        if self._opened is None:
            self._opened = Pipeline.open(self._bundle, threads=1)
        return self._opened
