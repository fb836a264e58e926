"""Reference outputs of a bundle, with which each engine is compared before it serves.

The values are outputs on noise that is the same on every machine. TensorRT 10.3, which JetPack 6 has, computes some
vision transformers wrong (NVIDIA/TensorRT issues 4558 and 4723), which nothing else would reveal.
"""

from __future__ import annotations

import itertools

import numpy as np

from ls_edge.core.bundle import REFERENCE_VALUES, Bundle, Manifest
from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import Engine

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
    return np.asarray(output.ravel()[np.linspace(0, output.size - 1, REFERENCE_VALUES).astype(int)])


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
    """Run an engine on noise, alone and in batches; raise :class:`EngineError` if a bundle's reference differs.

    If several blocks share the engine, it runs in the slot of each.
    """
    outputs, parts = bundle.manifest.verified.get("outputs", {}), dict(bundle.manifest.part_names())
    known = outputs | {"whole": outputs.get("chain")}
    names = [name for name, part in parts.items() if part == parts.get(engine.part)] or [engine.part]
    first, *slot = engine.signature.inputs
    turn = itertools.cycle(names)
    # The second run may launch a graph, whose result must not be what the first one left in memory.
    for batch, sign in ((1, -1), (1, 1), (2, 1), (largest, -1), *[(largest, 1)] * (1 + len(names) // largest)):
        noise = sign * (noise_images if engine.part in ("stem", "whole") else noise_tokens)(bundle, 1)
        rows = list(itertools.islice(turn, batch))
        inputs = {first.name: np.repeat(noise, batch, axis=0)}
        inputs |= {tensor.name: np.array([int(name.split()[1]) for name in rows]) for tensor in slot}
        for name, row in zip(rows, engine.run(inputs), strict=True):
            if sign < 0 or known.get(name) is None:
                continue
            error = relative_error(sample(row), np.asarray(known[name]))
            if not error <= limit_of(bundle.manifest):
                raise EngineError(
                    f"{name} computes wrong values on {engine.provider}: a relative error of {error:.2g} in a "
                    f"batch of {batch}, at most {limit_of(bundle.manifest):g} is rounding; run with --engine onnx"
                )
