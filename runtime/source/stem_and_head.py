"""Stem and head: the two parts of the model that run in the source's own process."""

from __future__ import annotations

import time

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import ImageRejected, NotFinite, RequestError
from ls_edge.core.parts import ENDS, HEAD, STEM
from ls_edge.core.peers_file import SourceEntry
from ls_edge.engines.engine import warm_up
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import EngineChoice, announce, open_parts
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.source.results import InFlightRequest, PartResult, RequestState, itinerary_holders
from ls_edge.runtime.source.settings import Settings


class StemAndHead:
    """Engines of stem and head; jobs run one at a time, on the source thread or on the worker."""

    def __init__(self, bundle: Bundle, settings: Settings, entry: SourceEntry) -> None:
        """Open and warm up the engines of the settings, or else of ``entry`` in ``peers.yaml``."""
        self.threads = settings.threads or entry.threads or 1
        provider = settings.provider or (entry.provider if settings.engine in (None, "onnx") else None)
        image = bundle.manifest.image
        self._largest = max(max(mean, 1 - mean) / std for mean, std in zip(image.mean, image.std, strict=True))
        """Largest absolute value of a preprocessed image."""
        self.engine = ""
        """Engine and provider, and the alternatives that were rejected."""
        engines = open_parts(
            bundle,
            ("stem", "head"),
            kind=settings.engine or entry.engine,
            provider=provider,
            threads=self.threads,
            gpu_mem_limit=entry.gpu_mem_limit,
            on_choice=self._on_choice,
        )
        self._executor = Executor({part: engines[name] for part, name in ENDS.items()})
        self.usual_us = {part: round(warm_up(engines[name]) * 2e3) for part, name in ENDS.items()}
        """Usual times in microseconds, overestimated rather than underestimated."""

    def _on_choice(self, choice: EngineChoice) -> None:
        announce(choice)
        self.engine = str(choice)

    def close(self) -> None:
        """Close the engines."""
        self._executor.close()

    def run_stem(self, inflight: InFlightRequest) -> PartResult:
        """Run the stem for a request."""
        image = inflight.image
        if not isinstance(image, np.ndarray) or _is_over(inflight):
            return PartResult(inflight, STEM)
        inflight.begun = True
        result = self._run(inflight, STEM, image[np.newaxis])
        inflight.stem_us = result.us
        return result

    def run_head(self, inflight: InFlightRequest, answered: Complete) -> PartResult:
        """Run the head on the returned tokens of a request."""
        if _is_over(inflight):
            return PartResult(inflight, HEAD)
        return self._run(inflight, HEAD, answered.tokens)

    def _run(self, inflight: InFlightRequest, part: int, array: np.ndarray) -> PartResult:
        started = time.perf_counter()
        try:
            output = self._executor.run((part,), array)
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            failed = RequestError(f"request {inflight.request}: the {ENDS[part]} failed: {error}")
            failed.__cause__ = error.with_traceback(None)
            return PartResult(inflight, part, error=failed)
        if not is_finite(output):
            is_odd = part == STEM and bool(np.abs(array).max() > 1.01 * self._largest)  # 1.01: rounding
            return PartResult(inflight, part, error=_not_finite(inflight, is_odd=is_odd))
        spent = round((time.perf_counter() - started) * 1e6)
        self.usual_us[part] = max(spent, self.usual_us[part] * 9 // 10)
        return PartResult(inflight, part, output, spent)


def _not_finite(inflight: InFlightRequest, *, is_odd: bool) -> RequestError:
    """Return the error of a request whose tokens or logits are not finite although its input was finite.

    It is the image's fault if that has values that no preprocessed image has (``is_odd``), or else the model's.
    """
    if inflight.answered is None:
        problem = f"the stem returned NaN or infinity for {inflight.name or 'the image'}"
        if is_odd:
            return ImageRejected(f"request {inflight.request}: {problem}; check the values of the image")
        return NotFinite(f"request {inflight.request}: {problem}; check the bundle with 'ls-edge verify'")
    holders = itinerary_holders(inflight.answered.itinerary)
    return NotFinite(
        f"request {inflight.request}: the head returned NaN or infinity for the tokens of "
        f"{', '.join(holders) or 'no peer'}; check these peers, and the bundle with 'ls-edge verify'",
        holders=tuple(holders),
    )


def _is_over(inflight: InFlightRequest) -> bool:
    """Return whether a request no longer needs an engine; called just before one runs."""
    ended = inflight.state is RequestState.ENDED or inflight.future.cancelled()
    return ended or time.monotonic() >= inflight.deadline
