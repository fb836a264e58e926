"""Stem and head of a source: the two parts of the model that run in its own process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import NotFinite, RequestError
from ls_edge.core.peers_file import EngineKind, SourceEntry
from ls_edge.engines.engine import warm_up
from ls_edge.engines.opening import EngineChoice, announce, open_parts
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.routing.events import Complete
from ls_edge.runtime.source.results import InFlightRequest, RequestState, itinerary_holders
from ls_edge.runtime.source.settings import Settings

SHORT_US = 2000
"""Limit on the usual time of a part that the source thread runs itself, since messages wait meanwhile."""


@dataclass(frozen=True, eq=False)
class StemResult:
    """End of a stem job."""

    inflight: InFlightRequest
    tokens: np.ndarray | None
    """None if the stem failed, or did not run because the request had ended."""
    error: RequestError | None = None


@dataclass(frozen=True, eq=False)
class HeadResult:
    """End of a head job."""

    inflight: InFlightRequest
    logits: np.ndarray | None
    """None if the head failed, or did not run because the request had ended."""
    head_us: int = 0
    error: RequestError | None = None


class StemAndHead:
    """Engines of stem and head; jobs run on the source thread or on the worker, one at a time."""

    def __init__(self, bundle: Bundle, settings: Settings, entry: SourceEntry) -> None:
        """Open and warm up the engines that the settings choose, else ``peers.yaml`` (``entry``)."""
        self.threads = settings.threads or entry.threads or 1
        kind: EngineKind = settings.engine or entry.engine
        provider = settings.provider or (entry.provider if settings.engine is None else None)
        self.engine = ""
        """Engine and provider, and the ones that were passed over."""
        self._engines = open_parts(
            bundle, ("stem", "head"), kind=kind, provider=provider, threads=self.threads, on_choice=self._on_choice
        )
        self.stem_us, self.head_us = (round(warm_up(engine) * 2e3) for engine in self._engines.values())
        """Usual times, rather too long than too short."""

    def _on_choice(self, choice: EngineChoice) -> None:
        announce(choice)
        self.engine = str(choice)

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()

    def run_stem(self, inflight: InFlightRequest) -> StemResult:
        """Run the stem for a request."""
        image = inflight.image
        if image is None or _is_over(inflight):
            return StemResult(inflight, None)
        inflight.begun = True
        started = time.perf_counter()
        try:
            tokens = self._engines["stem"].run({"images": image[np.newaxis]})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return StemResult(inflight, None, RequestError(f"request {inflight.request}: the stem failed: {error}"))
        if not is_finite(tokens):
            failed = NotFinite(
                f"request {inflight.request}: the stem returned NaN or infinity for {inflight.name or 'the image'}; "
                "check the values of the image"
            )
            return StemResult(inflight, None, failed)
        inflight.image = None
        inflight.stem_us = round((time.perf_counter() - started) * 1e6)
        return StemResult(inflight, tokens)

    def run_head(self, inflight: InFlightRequest, answered: Complete) -> HeadResult:
        """Run the head on the last tokens of a request."""
        if _is_over(inflight):
            return HeadResult(inflight, None)
        started = time.perf_counter()
        try:
            logits = self._engines["head"].run({"tokens": answered.tokens})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            failed = RequestError(f"request {inflight.request}: the head failed: {error}")
            return HeadResult(inflight, None, error=failed)
        if not is_finite(logits):
            return HeadResult(inflight, None, error=_not_finite(answered))
        return HeadResult(inflight, logits, round((time.perf_counter() - started) * 1e6))


def _is_over(inflight: InFlightRequest) -> bool:
    """Return whether a request needs no engine any more; called just before one would run."""
    ended = inflight.state is RequestState.ENDED or inflight.future.cancelled()
    return ended or time.monotonic() >= inflight.deadline


def _not_finite(answered: Complete) -> NotFinite:
    """Return the error of a request whose logits are not finite although its tokens were."""
    holders = ", ".join(itinerary_holders(answered.itinerary)) or "no peer"
    return NotFinite(
        f"request {answered.request}: the head returned NaN or infinity for the tokens of {holders}; check these "
        "peers, and the bundle with 'ls-edge verify'"
    )
