"""An audit: a share of a source's answers is computed a second time here, to detect peers that return wrong tokens.

The audited answers are drawn from secret random numbers after they returned, so peers cannot predict them. The second
computation takes the image's stem tokens through the recorded arrangement with the bundle's own block files, and its
logits may differ by the tolerance of a replay (guarantee R2). Where they differ by more, some tokens were wrong. The
same image is then sent once more with every hop through the source (the *challenge*): each hop's tokens are compared
with the output of its blocks for that hop's input, and the first hop that is wrong names its holder. Where no hop of
the challenge is wrong, all holders of the answer are suspects and counted as one of several.

A thread of the lowest priority does this. Answers never wait for it: where too many audits wait, the next is dropped
and counted. A peer can distinguish a challenge from other requests, since its hops go through the source. If it is
honest in those alone, it stays one of several, but its name returns with each further mismatch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.records import AuditSummary, Suspect
from ls_edge.engines.pipeline import Pipeline, relative_error
from ls_edge.runtime.protocol.codecs import REPLAY_TOLERANCE, decode, encode
from ls_edge.runtime.protocol.messages import Itinerary, Ran
from ls_edge.runtime.routing.events import Complete, Fail, Returned, Submit
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.source.results import itinerary_holders
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

MAX_WAITING = 16
"""Audits that may wait for the thread: each keeps an image's tokens."""
MAX_CHALLENGES = 4
"""Challenges in flight; where a peer spoils everything, the other mismatches name all holders immediately."""
_FIRST_CHALLENGE = 1 << 62
"""First number of a challenge, above those of all requests."""
NICENESS = 19
"""Niceness of the thread that computes audits: answers go first."""
_PRECISION_TOLERANCE = {"fp32": REPLAY_TOLERANCE["raw"], "fp16": REPLAY_TOLERANCE["fp16"]}
"""Least tolerance of a bundle by its precision, since engines of other devices round differently."""
_LOOSEST = max(REPLAY_TOLERANCE.values())


@dataclass(frozen=True, eq=False)
class Audit:
    """An answer that is to be computed again in this process."""

    request: int
    stem_tokens: np.ndarray
    """``[1, N, D]``."""
    itinerary: Itinerary
    logits: np.ndarray
    """``[C]``, of the answer."""
    hands: tuple[str, ...] = ()
    """Processes that had its tokens as far as this source saw, independent of the itinerary."""

    @property
    def holders(self) -> list[str]:
        """The processes that may have changed its tokens."""
        return list(dict.fromkeys([*itinerary_holders(self.itinerary), *self.hands]))


@dataclass(eq=False)
class Challenge:
    """An image that is sent once more to find the process that computed something else."""

    audit: Audit
    difference: float
    """Relative error of the answer."""
    returns: list[Returned] = field(default_factory=list)
    """Returns so far, in order."""


class Challenges:
    """Challenges of a source, from the request of the auditor to the last return."""

    def __init__(
        self, node: Node, itinerary: Callable[[tuple[int, ...]], Itinerary], bands: Bands, budget_s: float
    ) -> None:
        """``itinerary`` makes the itinerary of a request of an order."""
        self._node, self._itinerary, self._bands, self._budget_s = node, itinerary, bands, budget_s
        self._wanted: deque[Challenge] = deque()
        self._open: dict[int, Challenge] = {}
        self._numbers = itertools.count(_FIRST_CHALLENGE)

    def request(self, challenge: Challenge) -> None:
        """Queue a challenge; called on the auditor's thread."""
        self._wanted.append(challenge)
        self._node.wake()

    def start(self) -> None:
        """Send the stem tokens of the answers to challenge once more."""
        while self._wanted:
            challenge = self._wanted.popleft()
            number, answer = next(self._numbers), challenge.audit.itinerary
            self._open[number] = challenge
            itinerary = challenge_itinerary(self._itinerary(answer.remaining), answer, self._bands)
            deadline = time.monotonic() + self._budget_s
            self._node.feed(Submit(number, itinerary, challenge.audit.stem_tokens, deadline, watch_returns=True))

    def has(self, request: int) -> bool:
        """Return whether a number is that of a challenge."""
        return request in self._open

    def take(self, instruction: Complete | Fail | Returned) -> Challenge | None:
        """Note a return; return the challenge once it has ended."""
        if isinstance(instruction, Returned):
            self._open[instruction.request].returns.append(instruction)
            return None
        return self._open.pop(instruction.request)


def require_block_files(bundle: Bundle) -> None:
    """Raise :class:`UsageError` where block files, which a source does not need otherwise, are not in the bundle."""
    missing = [part.file for part in bundle.manifest.parts.blocks if not (bundle.folder / part.file).is_file()]
    if missing:
        raise UsageError(
            f"{bundle.folder} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}, with which an audit "
            "computes answers again; copy the whole bundle to this machine, or leave the audit out"
        )


class Auditor:
    """Draws answers, computes them again and keeps count; for one source, whose thread calls :meth:`offer`."""

    def __init__(
        self,
        bundle: Bundle,
        share: float,
        codecs: Mapping[str, str],
        bundle_of: Callable[[str], str],
        challenge: Callable[[Challenge], None],
    ) -> None:
        """``codecs`` has the codec of tokens to each peer, ``bundle_of`` returns the bundle that it serves.

        ``challenge`` is called on the auditor's thread; its end is reported by :meth:`challenged`.
        """
        self.share = share
        self._bundle = bundle
        self._codecs = codecs
        self._bundle_of = bundle_of
        self._challenge = challenge
        self._random = random.SystemRandom()
        self._jobs: queue.Queue[Audit | Challenge | None] = queue.Queue()
        self._chain: Pipeline | None = None
        self._change = threading.Condition()
        self._open = 0
        """Audits that were begun or wait, challenges included."""
        self._challenges = 0
        self._matched = self._mismatched = self._dropped = 0
        self._suspects: dict[str, Suspect] = {}
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def offer(self, audit: Audit) -> None:
        """Take an answer that was just given, if it is drawn; never waits."""
        if self._random.random() >= self.share:
            return
        with self._change:
            if self._open >= MAX_WAITING:
                self._dropped += 1
                return
            self._open += 1
        self._jobs.put(audit)

    def challenged(self, challenge: Challenge) -> None:
        """Take the end of a challenge, with or without an answer."""
        self._jobs.put(challenge)

    def snapshot(self) -> AuditSummary:
        """Return the present counts."""
        with self._change:
            return AuditSummary(
                share=self.share,
                audited=self._matched + self._mismatched,
                matched=self._matched,
                mismatched=self._mismatched,
                dropped=self._dropped,
                waiting=self._open,
                suspects=dict(self._suspects),
            )

    def finish(self, timeout: float) -> None:
        """Wait until nothing is left to do, at most ``timeout`` seconds."""
        with self._change:
            self._change.wait_for(lambda: not self._open, timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Stop after the block that runs; what waits is dropped."""
        with contextlib.suppress(queue.Empty):
            while True:
                if self._jobs.get_nowait() is not None:
                    self._ended("_dropped")
        self._jobs.put(None)
        self._thread.join(timeout)

    # On the auditor's thread.

    def _run(self) -> None:
        if sys.platform == "linux":  # where each thread has its own niceness
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    self._judge(job) if isinstance(job, Challenge) else self._check(job)
                except Exception as error:
                    # An audit that fails, as where the bundle was damaged meanwhile, proves nothing about a peer.
                    known = isinstance(error, LsEdgeError)
                    log.error("an audit failed", extra={"why": str(error)}, exc_info=None if known else error)
                    self._ended("_dropped")
        finally:
            if self._chain is not None:
                self._chain.close()

    def _opened(self) -> Pipeline:
        if self._chain is None:
            self._chain = Pipeline.open(self._bundle, threads=1)
        return self._chain

    def _check(self, audit: Audit) -> None:
        chain, itinerary = self._opened(), audit.itinerary
        waves = tuple(tuple(tuple(block for block, _ in track) for track in wave) for wave in itinerary.waves)
        logits = chain.head(apply(Arrangement(waves), audit.stem_tokens, chain.block))[0]
        difference = relative_error(audit.logits, logits)
        holders = itinerary_holders(itinerary)
        if difference <= self._tolerance(holders):
            self._ended("_matched")
            return
        holders = audit.holders
        with self._change:
            self._mismatched += 1
            may_challenge = self._challenges < MAX_CHALLENGES
            self._challenges += may_challenge
        log.warning(
            "an audit does not match",
            extra={"request": audit.request, "why": f"logits differ by {difference:.2g}, holders {', '.join(holders)}"},
        )
        if may_challenge:
            self._challenge(Challenge(audit, difference))
        else:
            self._name(holders, difference)
            self._ended()

    def _judge(self, challenge: Challenge) -> None:
        with self._change:
            self._challenges -= 1
        found = self._first_wrong(challenge)
        if found is None:
            self._name(challenge.audit.holders, challenge.difference)
        else:
            self._name(*found)
        self._ended()

    def _first_wrong(self, challenge: Challenge) -> tuple[list[str], float] | None:
        """Return the holder of the first wrong hop of a challenge, and the relative error of that hop."""
        known: dict[tuple[Ran, ...], np.ndarray] = {(): challenge.audit.stem_tokens}
        for returned in challenge.returns:
            if any(len(wave) != 1 for wave in returned.itinerary.waves):
                return None
            steps = tuple(step for wave in returned.itinerary.waves for step in wave[0])
            before = next(steps[:length] for length in range(len(steps), -1, -1) if steps[:length] in known)
            names = list(dict.fromkeys([*(holder for _, holder in steps[len(before) :]), returned.sender]))
            tokens = self._as_received(names[0], known[before])
            for slot, (block, _) in enumerate(steps[len(before) :], len(before)):
                tokens = self._opened().block(block, tokens, slot)
            difference = relative_error(returned.tokens, tokens)
            if not difference <= self._tolerance(names):
                return names, difference
            known[steps] = returned.tokens
        return None

    def _as_received(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """Tokens after their way to a peer, whose codec rounds them."""
        codec, spec = self._codecs.get(name, "raw"), self._bundle.manifest.tokens
        frame = bytes(encode(codec, tokens))
        return decode(codec, frame, spec.count, spec.dim)

    def _tolerance(self, holders: Sequence[str]) -> float:
        """Largest difference that counts as equal: by codecs and precision, or the loosest where they are unknown."""
        manifest = self._bundle.manifest
        least = _PRECISION_TOLERANCE.get(manifest.precision, _LOOSEST)
        if any(name not in self._codecs or self._bundle_of(name) != manifest.bundle_id for name in holders):
            return _LOOSEST
        return max([least, *(REPLAY_TOLERANCE.get(self._codecs[name], _LOOSEST) for name in holders)])

    def _name(self, holders: Sequence[str], difference: float) -> None:
        last = difference if np.isfinite(difference) else None
        alone = len(holders) == 1
        with self._change:
            for name in holders:
                known = self._suspects.get(name, Suspect())
                self._suspects[name] = msgspec.structs.replace(
                    known, named=known.named + alone, one_of=known.one_of + (not alone), difference=last
                )
        log.warning(
            "a peer computes something else" if alone else "one of these peers computes something else",
            extra={"peer": ", ".join(holders), "why": f"it differs by {difference:.2g}"},
        )

    def _ended(self, count: str = "") -> None:
        with self._change:
            if count:
                setattr(self, count, getattr(self, count) + 1)
            self._open -= 1
            self._change.notify_all()


def challenge_itinerary(asked: Itinerary, answer: Itinerary, bands: Bands) -> Itinerary:
    """Return the itinerary of a challenge: the blocks in the order of the answer, all via the source.

    In each band the blocks that the answer skipped come last.
    """
    ran = tuple(block for wave in answer.waves for track in wave for block, _ in track)
    policy = "nearest" if policy_of(asked.policy).runs_in_waves else asked.policy
    return msgspec.structs.replace(
        asked, policy=policy, remaining=bands.sort((*ran, *answer.skipped)), via_source=True, waves_wanted=0,
        on_straggler="later",
    )  # fmt: skip
