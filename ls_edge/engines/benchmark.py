"""Benchmark of a bundle on this machine: the chain of its parts, and one engine of the whole model (the monolith).

Chain and monolith use the same library and options and alternate after a few runs, so that other load affects both. The
monolith with ONNX Runtime's default options is timed afterwards, because its threads spin and would slow down the
others (ONNX Runtime only).

The caller provides the monolith; ``ls_edge.export.merge``, which needs ``onnx``, can make it from the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import EngineKind
from ls_edge.device.profile import BatchTimes, Times
from ls_edge.device.sensors import Sensors
from ls_edge.engines.engine import Engine, signature_of
from ls_edge.engines.measuring import library_of, resident_bytes, taken_bytes, time_batch, time_calls
from ls_edge.engines.onnxruntime import OnnxEngine, open_session
from ls_edge.engines.opening import open_engine, usable_threads
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import noise_images
from ls_edge.engines.tensorrt.build import EngineOptions

RUNS_A_TURN = 6
"""Maximum number of timed runs per turn: fewer give cold caches more weight, more let slow drifts affect one side."""


class Bench(BatchTimes, frozen=True, kw_only=True):
    """The document of ``ls-edge bench --json``."""

    bundle_id: str
    model: str
    precision: str
    engine: str
    provider: str
    threads: int
    batch: int
    duration: float
    """Seconds for timing chain and monolith alternately."""
    memory_bytes: int
    """Growth of host and GPU memory when the parts are opened."""
    monolith_ms: Times | None
    chain_over_monolith: float | None
    monolith_default_ms: Times | None
    monolith: str | None
    """Origin of the monolith; None if there is none."""
    monolith_reason: str | None


def bench(
    bundle: Bundle,
    *,
    threads: int | None = None,
    batch: int = 1,
    duration: float = 4.0,
    provider: str | None = None,
    kind: EngineKind = "auto",
    monolith: tuple[bytes | None, str] = (None, "it was not requested"),
) -> Bench:
    """Time a bundle for about 1.75 times ``duration`` seconds, including single parts and default options.

    ``monolith`` is the ONNX file of the whole model and its origin, or None and the reason why there is none. Raise
    :class:`UsageError` for a batch or duration that is not positive, and the errors of :meth:`Pipeline.open`.
    """
    if batch < 1 or not 0 < duration < float("inf"):
        raise UsageError(f"cannot time batch {batch} for {duration} seconds; give numbers above 0")
    threads = usable_threads(threads)
    images, resident = noise_images(bundle, batch), resident_bytes()
    with Pipeline.open(bundle, threads=threads, provider=provider, kind=kind, max_batch=batch) as pipeline:
        choice, files = pipeline.choice, {part for name, part in bundle.manifest.part_names() if name != "whole"}
        memory = taken_bytes(sum(part.bytes for part in files), resident, pipeline.executor.workspace)
        raw, origin = monolith
        if choice.kind == "tensorrt" and bundle.manifest.parts.whole is None:
            raw, origin = None, "TensorRT needs a whole.onnx in the bundle; export it with --whole"
        whole = _whole(bundle, pipeline, raw, threads, batch)
        calls: list[Callable[[], Any]] = [lambda: pipeline.forward(images)]
        if whole is not None:
            calls.append(lambda: whole.run({"images": images}))
        chain_s, *whole_s = time_calls(calls, duration, most_runs=RUNS_A_TURN)
        parts, _ = time_batch(pipeline, batch, duration / 4, Sensors(), visits_s=duration / 4)
        if whole is not None:
            whole.close()
    default_ms = None
    if raw is not None and choice.kind == "onnx":
        session = open_session(raw, "whole", provider=pipeline.provider, threads=None, plain=True)
        run = partial(session.run, None, {"images": images})
        default_ms = Times.of(time_calls([run], duration / 4, most_runs=RUNS_A_TURN)[0])
    chain_ms, whole_ms = Times.of(chain_s), Times.of(whole_s[0]) if whole_s else None
    return Bench(
        **{**msgspec.structs.asdict(parts), "chain_ms": chain_ms, "repeats": len(chain_s)},
        bundle_id=bundle.manifest.bundle_id,
        model=bundle.manifest.model,
        precision=bundle.manifest.precision,
        engine=library_of(choice.kind),
        provider=pipeline.provider,
        threads=threads,
        batch=batch,
        duration=duration,
        memory_bytes=memory,
        monolith_ms=whole_ms,
        chain_over_monolith=None if whole_ms is None else round(chain_ms.p50 / whole_ms.p50, 4),
        monolith_default_ms=default_ms,
        monolith=None if raw is None else origin,
        monolith_reason=origin if raw is None else None,
    )


def _whole(bundle: Bundle, pipeline: Pipeline, monolith: bytes | None, threads: int, batch: int) -> Engine | None:
    if monolith is None:
        return None
    if pipeline.choice.kind == "tensorrt":
        return open_engine(bundle, "whole", kind="tensorrt", max_batch=batch)
    signature = signature_of(bundle.manifest, "whole")
    options = EngineOptions.of(batch)
    return OnnxEngine(monolith, "whole", signature, provider=pipeline.provider, threads=threads, options=options)
