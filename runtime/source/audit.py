"""Audits: recompute a fraction of a source's answers, to detect peers that return wrong tokens.

The recomputation runs the image's stem tokens through the recorded arrangement with the bundle's own block files; the
logits may differ by the tolerance of a replay. If they differ by more, the holders of the answer are counted as
suspects: the faulty one is the name that appears each time.

A thread of the lowest priority does this. Answers never wait for it: if too many audits wait, the next one is dropped
and counted.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from ls_edge.core.arrangement import apply
from ls_edge.core.bundle import Bundle, Manifest
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.records import AuditSummary, Suspect
from ls_edge.device.threads import Worker
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import relative_error
from ls_edge.runtime.protocol.codecs import CODECS, codec_of
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.source.results import itinerary_holders

log = logging.getLogger("ls_edge.runtime")

MAX_WAITING = 16
"""Maximum number of audits that wait for the thread; each keeps the tokens of an image."""
NICENESS = 19
"""Niceness of the audit thread: answers have priority."""
_PRECISION_TOLERANCE = {"fp32": CODECS["raw"].replay_tolerance, "fp16": CODECS["fp16"].replay_tolerance}
"""Minimum tolerance by the precision of a bundle, since engines of other devices round differently."""
_LOOSEST = max(codec.replay_tolerance for codec in CODECS.values())


@dataclass(frozen=True, eq=False)
class Audit:
    """An answer to recompute."""

    request: int
    stem_tokens: np.ndarray
    """Tokens that the source sent, ``[1, N, D]``."""
    itinerary: Itinerary
    logits: np.ndarray
    """Logits of the answer, ``[C]``."""


class Auditor:
    """Recomputation of selected answers, with counts of the results; the source thread calls :meth:`offer`."""

    def __init__(self, share: float, recomputation: Recomputation) -> None:
        """Audit the fraction ``share`` of the answers."""
        self.recomputation = recomputation
        self._random = random.SystemRandom()
        self._change = threading.Condition()
        self.summary = AuditSummary(share, 0, 0, 0, 0)
        """Current counts; immutable."""
        self._worker: Worker[None] = Worker("audit", lambda: None, niceness=NICENESS)

    def offer(self, audit: Audit) -> None:
        """Queue an audit of an answer if it is selected; never wait."""
        if self._random.random() >= self.summary.share:
            return
        if self.summary.waiting >= MAX_WAITING:
            self._add(dropped=1)
            return
        self._add(waiting=1)
        self._worker.submit(partial(self._check, audit))

    def finish(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until no audit is left."""
        with self._change:
            self._change.wait_for(lambda: not self.summary.waiting, timeout)

    def close(self) -> None:
        """Stop after the current audit, and drop the waiting ones."""
        if self._worker.close():
            self.recomputation.close()
        dropped = len(self._worker)
        self._add(dropped=dropped, waiting=-dropped)

    def _check(self, audit: Audit) -> None:
        """Recompute an answer, on the auditor's thread."""
        try:
            difference, matches = self.recomputation.compare(audit.stem_tokens, audit.itinerary, audit.logits)
        except Exception as error:
            # A failed audit, for example because the bundle was damaged meanwhile, proves nothing about a peer.
            log.error(
                "an audit failed",
                extra={"why": str(error)},
                exc_info=None if isinstance(error, LsEdgeError) else error,
            )
            self._add(dropped=1, waiting=-1)
            return
        if matches:
            self._add(audited=1, matched=1, waiting=-1)
            return
        holders, suspects = itinerary_holders(audit.itinerary), dict(self.summary.suspects)
        for name in holders:
            wrong = suspects[name].wrong if name in suspects else 0
            suspects[name] = Suspect(wrong + 1, difference if np.isfinite(difference) else None)
        why = f"logits differ by {difference:.2g}, holders {', '.join(holders)}"
        log.warning("an audit does not match", extra={"request": audit.request, "why": why})
        self._add(suspects, audited=1, mismatched=1, waiting=-1)

    def _add(self, suspects: Mapping[str, Suspect] | None = None, **counts: int) -> None:
        """Add to the counts of the summary; any thread may call it."""
        with self._change:
            new = {name: getattr(self.summary, name) + more for name, more in counts.items()}
            suspects = self.summary.suspects if suspects is None else suspects
            self.summary = msgspec.structs.replace(self.summary, suspects=suspects, **new)
            self._change.notify_all()


class Recomputation:
    """Blocks and head of a bundle in this process, to check answers of peers; used by one thread."""

    def __init__(self, bundle: Bundle, codecs: dict[str, str], bundle_of: Callable[[str], str]) -> None:
        """Open no engine yet; ``codecs`` are those of the peers, ``bundle_of`` returns the id of a peer's bundle.

        Raise :class:`UsageError` if the bundle lacks block files, which a source does not need otherwise.
        """
        missing = [part.file for part in bundle.manifest.parts.blocks if not (bundle.folder / part.file).is_file()]
        if missing:
            raise UsageError(
                f"{bundle.folder} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}, which an audit "
                "needs to recompute answers; copy the whole bundle to this machine, or omit the audit"
            )
        self.codecs = codecs
        self._bundle, self._bundle_of = bundle, bundle_of
        self._pipeline: Pipeline | None = None

    def close(self) -> None:
        """Close the engines."""
        if self._pipeline is not None:
            self._pipeline.close()

    def compare(self, stem_tokens: np.ndarray, itinerary: Itinerary, logits: np.ndarray) -> tuple[float, bool]:
        """Return the relative error of an answer, and whether it is within the tolerance."""
        chain = self._pipeline = self._pipeline or Pipeline.on_demand(self._bundle)
        difference = relative_error(logits, chain.head(apply(itinerary.arrangement, stem_tokens, chain.block))[0])
        return difference, difference <= self._tolerance(itinerary_holders(itinerary), self._bundle.manifest)

    def _tolerance(self, holders: Sequence[str], manifest: Manifest) -> float:
        """Return the largest tolerance of these holders, by codec and precision; the loosest if those are unknown."""
        codecs = self.codecs
        if any(name not in codecs or self._bundle_of(name) != manifest.bundle_id for name in holders):
            return _LOOSEST
        least = _PRECISION_TOLERANCE.get(manifest.precision, _LOOSEST)
        return max([least, *(codec_of(codecs[name]).replay_tolerance for name in holders)])
