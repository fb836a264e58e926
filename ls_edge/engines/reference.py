"""Reference outputs of a bundle, with which each engine is compared before it serves.

The values are outputs on noise that is the same on every machine. TensorRT 10.3, which JetPack 6 has, computes some
vision transformers wrong (NVIDIA/TensorRT issues 4558 and 4723), which nothing else would reveal.
"""

from __future__ import annotations

import numpy as np

from ls_edge.core.bundle import Bundle, Manifest
from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import Engine

REFERENCE_VALUES = 32
"""Number of values that a bundle stores of each output: a few KB for all parts."""
LEAST_LIMIT = 1e-3
"""Difference due to rounding between two machines; beyond it, float32 is not precise enough for the model."""
INT8_LIMIT = 0.05
"""Maximum difference between two machines in int8, relative to the largest value."""


def noise_images(bundle: Bundle, batch: int) -> np.ndarray:
    """Return a batch of noise, float32 ``[B, 3, H, W]``; the time of an engine does not depend on its input."""
    return np.random.default_rng(0).standard_normal((batch, 3, *bundle.manifest.image.size), dtype=np.float32)


def noise_tokens(bundle: Bundle, batch: int) -> np.ndarray:
    """Return a batch of noise ``[B, N, D]``."""
    tokens = bundle.manifest.tokens
    return np.random.default_rng(0).standard_normal((batch, tokens.count, tokens.dim)).astype(tokens.dtype)


def sample(output: np.ndarray) -> np.ndarray:
    """Return the values of an output that a bundle stores."""
    rows = np.linspace(0, output.size - 1, REFERENCE_VALUES).astype(int)
    return np.asarray(output.ravel()[rows])


def relative_error(values: np.ndarray, reference: np.ndarray) -> float:
    """Return ``max |values - reference| / max |reference|``, or infinity if a value is not finite."""
    error = float(np.abs(reference - values).max() / max(float(np.abs(reference).max()), 1e-30))
    return error if np.isfinite(error) else float("inf")


def limit_of(manifest: Manifest) -> float:
    """Return the largest relative error of an output: the tolerance of the export, or more for rounding."""
    if manifest.precision == "int8":
        return INT8_LIMIT
    return max(float(manifest.verified.get("tolerance") or 0.0), LEAST_LIMIT)


def check_engine(bundle: Bundle, engine: Engine, largest: int = 2) -> None:
    """Run an engine on noise, alone and in batches; raise :class:`EngineError` if a bundle's reference differs."""
    wanted = bundle.manifest.verified.get("outputs", {}).get("chain" if engine.part == "whole" else engine.part)
    first, *slot = engine.signature.inputs
    # The second run may launch a graph, whose result must not be what the first one left in memory.
    for batch, sign in ((1, -1), (1, 1), (2, 1), (largest, 1)):
        noise = sign * (noise_images if engine.part in ("stem", "whole") else noise_tokens)(bundle, 1)
        inputs = {first.name: np.repeat(noise, batch, axis=0)} | {t.name: np.zeros(batch, np.int64) for t in slot}
        rows = engine.run(inputs)
        for row in rows if sign > 0 and wanted is not None else ():
            error = relative_error(sample(row), np.asarray(wanted))
            if not error <= limit_of(bundle.manifest):
                raise EngineError(
                    f"{engine.part} computes wrong values on {engine.provider}: a relative error of {error:.2g} in a "
                    f"batch of {batch}, at most {limit_of(bundle.manifest):g} is due to rounding; use --engine onnx"
                )
