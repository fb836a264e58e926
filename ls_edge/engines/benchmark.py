"""Time a bundle on this machine: its parts one after the other (the chain), and one engine of the whole (the monolith).

Chain and monolith run by the same library with the same options, in turns of a few runs each, so that other load
on the machine affects both; figures are medians. The monolith with ONNX Runtime's default options is timed
afterwards, because its threads spin and would slow the others (ONNX Runtime only). Images are noise: the time does
not depend on them.

The caller brings the bytes of the monolith; ``ls_edge.export.merge``, which needs ``onnx``, makes them from the parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import EngineKind
from ls_edge.device.profile import Times
from ls_edge.engines.chain_accuracy import ChainAccuracy
from ls_edge.engines.engine import Engine, signature_of
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module, open_session
from ls_edge.engines.opening import choose, open_engine, usable_threads
from ls_edge.engines.pipeline import Pipeline

RUNS_A_TURN = 6
"""Most runs of a turn that count: fewer leave cold caches in the figures, more let slow drifts fall on one side."""


class Bench(msgspec.Struct, frozen=True):
    """The document of ``ls-edge bench --json``."""

    bundle_id: str
    model: str
    precision: str
    engine: str
    provider: str
    threads: int
    batch: int
    duration: float
    """Seconds of alternate timing that were asked for."""
    repeats: int
    """Runs of the chain in it."""
    stem_ms: Times
    head_ms: Times
    blocks_ms: list[Times]
    chain_ms: Times
    monolith_ms: Times | None
    chain_over_monolith: float | None
    """Ratio of the medians."""
    monolith_default_ms: Times | None
    monolith: str | None
    """Where the monolith came from; None where there is none."""
    monolith_reason: str | None
    """Why there is none."""
    accuracy: ChainAccuracy | None = None
    """Where images were given."""


def bench(
    bundle: Bundle,
    *,
    threads: int | None = None,
    batch: int = 1,
    duration: float = 4.0,
    provider: str | None = None,
    kind: EngineKind = "auto",
    monolith: bytes | None = None,
    origin: str | None = None,
    reason: str | None = None,
) -> Bench:
    """Time a bundle for about ``duration`` seconds and half as long again for parts and defaults.

    ``monolith`` is the ONNX file of the whole model and ``origin`` where it came from; without it ``reason`` is why
    there is none. Raises :class:`UsageError` for a batch or duration that is not positive, else as
    :meth:`Pipeline.open`.
    """
    if batch < 1 or not 0 < duration < float("inf"):
        raise UsageError(f"batch {batch} for {duration} seconds cannot be timed; both must be above 0")
    threads = usable_threads(threads)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, 3, *bundle.manifest.image.size), dtype=np.float32)
    choice = choose(bundle, kind, provider)
    used_kind = choice.kind
    if used_kind == "tensorrt" and bundle.manifest.parts.whole is None:
        monolith, reason = None, "TensorRT times only a whole.onnx of the bundle; export it with --whole"
    with Pipeline.open(
        bundle, threads=threads, provider=choice.named_provider, kind=used_kind, max_batch=batch
    ) as pipeline:
        whole = _whole(bundle, pipeline, monolith, threads, batch)
        calls: list[Callable[[], Any]] = [lambda: pipeline.forward(images)]
        if whole is not None:
            calls.append(lambda: whole.run({"images": images}))
        chain_s, *whole_s = _alternate(calls, duration)
        parts = _profile(pipeline, images, duration / 4)
        used = pipeline.provider
        if whole is not None:
            whole.close()
    default = None
    if monolith is not None and used_kind == "onnx":
        session = open_session(monolith, "whole", provider=used, threads=None, plain=True)
        default = _alternate([lambda: session.run(None, {"images": images})], duration / 4)[0]
        del session
    chain_ms, whole_ms = Times.of(chain_s), Times.of(whole_s[0]) if whole_s else None
    return Bench(
        bundle_id=bundle.manifest.bundle_id, model=bundle.manifest.model, precision=bundle.manifest.precision,
        engine=f"onnxruntime {onnxruntime_module().__version__}" if used_kind == "onnx" else "tensorrt",
        provider=used, threads=threads, batch=batch,
        duration=duration, repeats=len(chain_s),
        stem_ms=Times.of(parts[0]), blocks_ms=[Times.of(part) for part in parts[1:-1]], head_ms=Times.of(parts[-1]),
        chain_ms=chain_ms, monolith_ms=whole_ms,
        chain_over_monolith=None if whole_ms is None else round(chain_ms.p50 / whole_ms.p50, 4),
        monolith_default_ms=None if default is None else Times.of(default),
        monolith=None if monolith is None else origin, monolith_reason=reason if monolith is None else None,
    )  # fmt: skip


def _whole(bundle: Bundle, pipeline: Pipeline, monolith: bytes | None, threads: int, batch: int) -> Engine | None:
    if monolith is None:
        return None
    if pipeline.stem_engine.kind == "tensorrt":
        return open_engine(bundle, "whole", kind="tensorrt", max_batch=batch)
    signature = signature_of(bundle.manifest, "whole")
    return OnnxEngine(monolith, "whole", signature, provider=pipeline.provider, threads=threads)


def _alternate(calls: list[Callable[[], Any]], duration: float) -> list[list[float]]:
    """Seconds of each call, in turns of a few runs, the order reversed every round; three runs at least.

    The first run of a turn finds the weights of another call in the caches, as no service does, and does not count.
    """
    started = time.perf_counter()
    for call in calls:
        call()
    once = time.perf_counter() - started
    runs = min(RUNS_A_TURN, max(1, int(duration / (4 * once))))
    seconds: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + duration
    turn = list(range(len(calls)))
    while time.perf_counter() < end or len(seconds[0]) < 3:
        for which in turn:
            calls[which]()
            for _ in range(runs):
                start = time.perf_counter()
                calls[which]()
                seconds[which].append(time.perf_counter() - start)
        turn.reverse()
    return seconds


def _profile(pipeline: Pipeline, images: np.ndarray, duration: float) -> list[list[float]]:
    """Seconds of stem, each block and head within whole runs."""
    runs: list[list[float]] = []
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(runs) < 3:
        runs.append(pipeline.profile(images)[1])
    return [list(part) for part in zip(*runs, strict=True)]
