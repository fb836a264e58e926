"""Compare the exported parts with PyTorch: each part alone, then the chain of them.

The reference is the view itself in float32 on the CPU, the subject the files as ONNX Runtime runs them there. Batches
of one, two and the largest show that the batch axis is free, trained and shuffled orders that blocks follow each
other in any order that the bands allow. The tolerances by precision (:data:`TOLERANCES`):

- ``fp32``: largest difference at most 1e-5 of the largest value of the reference, for parts and logits. A part whose
  float32 is less exact than that in PyTorch itself (long sums, as in convolutional stems) may differ by
  :data:`OWN_ROUNDING` times PyTorch's own distance from float64, and never by more than :data:`MOST`.
- ``fp16``: 2e-3 of it, and each block also with tokens scaled up to 1,500, as residuals of trained models are.
- ``int8``: an error of the size of a rounding step is expected, so directions are compared: cosine of the
  logits at least 0.999, and of each part's result 0.99. With labelled calibration images also the accuracy, at most one
  point below PyTorch's on the half that nothing was fitted to.

Left out: speed (``ls-edge bench``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ls_edge.core.bundle import Bundle, ImageSpec, model_id_of
from ls_edge.core.errors import VerificationError
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.calibration import Samples
from ls_edge.export.targets import PartsView, prepare_for_export
from ls_edge.training.checkpoint import LoadedRun


@dataclass(frozen=True)
class Tolerance:
    """The agreement with PyTorch that a precision has to reach."""

    relative: float | None = None
    """Largest difference over the largest value of the reference."""
    cosine: float | None = None
    """Of logits with the reference's, the mean over images."""
    part_cosine: float | None = None
    """The same of one part's result."""
    large: bool = False
    """Whether blocks are also run on tokens of :data:`RESIDUAL`."""


TOLERANCES = {
    "fp32": Tolerance(relative=1e-5),
    "fp16": Tolerance(relative=2e-3, large=True),
    "int8": Tolerance(cosine=0.999, part_cosine=0.99),
}
OWN_ROUNDING = 4.0
"""Times PyTorch's own rounding: two ways to sum in float32 are each that far off, and verified images are few."""
MOST = 1e-3
"""Largest difference that rounding may excuse; beyond it float32 is no precision for the model."""
RESIDUAL = 1500.0
TOP1_DROP = 0.01
MAX_BATCH = 8
"""Largest batch that is verified, and that TensorRT engines take, by default."""
SHUFFLED = 2
"""How many shuffled orders the chain is checked in."""
_NOISE = 1e-9
"""A drop of exactly one point is allowed, whatever floating point makes of it."""


def batches_of(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that are verified."""
    return tuple(sorted({1, min(2, max_batch), max_batch}))


@dataclass
class Verified:
    """The result of a verification."""

    precision: str
    source: str
    """Where the images came from."""
    engine: str
    batches: tuple[int, ...]
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    min_cosine: float = 1.0
    """Of logits."""
    parts: dict[str, float] = field(default_factory=dict)
    """Relative error of each part alone, over all batches."""
    chain: dict[str, float] = field(default_factory=dict)
    """Relative error of the logits, in trained and in shuffled orders."""
    large: float | None = None
    """Relative error of blocks on tokens of :data:`RESIDUAL`; None where the precision does not ask for it."""
    top1: dict[str, Any] | None = None
    """Accuracy of PyTorch and of the parts on held-out images; None without labels."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Settings of the export: blocks a part, form of int8."""

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the precision."""
        return TOLERANCES[self.precision]

    def to_json(self) -> dict[str, Any]:
        """For ``verified`` in the manifest."""
        tolerance = self.tolerance
        return {
            "max_abs_error": self.max_abs_error,
            "max_rel_error": self.max_rel_error,
            "min_cosine": self.min_cosine,
            "measure": "relative error" if tolerance.cosine is None else "cosine",
            "tolerance": tolerance.relative if tolerance.cosine is None else tolerance.cosine,
            "reference": f"pytorch {torch.__version__} float32 cpu",
            "engine": self.engine,
            "images": self.source,
            "batches": list(self.batches),
            "parts": self.parts,
            "chain": self.chain,
            "residual_1500": self.large,
            "top1": self.top1,
            **self.notes,
        }


def generated_images(image: ImageSpec, count: int = 3 + MAX_BATCH) -> np.ndarray:
    """Seeded images float32 ``[count, 3, H, W]`` as a normalisation leaves them: slow waves under noise."""
    rng = np.random.default_rng(0)
    height, width = image.size
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None, :]
    phase = rng.uniform(0, 2 * np.pi, (count, 3, 1, 1))
    speed = rng.uniform(1, 9, (2, count, 3, 1, 1))
    waves = np.sin(2 * np.pi * (speed[0] * y + speed[1] * x) + phase)
    images: np.ndarray = (waves + 0.3 * rng.standard_normal(waves.shape)).astype(np.float32)
    return images


def verify_numbers(
    view: PartsView,
    chain: Pipeline,
    images: np.ndarray,
    *,
    source: str,
    precision: str,
    batches: tuple[int, ...] = batches_of(MAX_BATCH),
) -> Verified:
    """Compare ``chain`` with ``view`` (float32, CPU, evaluation mode) on images ``[n, 3, H, W]``, repeated if too few.

    Raises :class:`VerificationError` naming the first part, or the order, that misses the tolerance of ``precision``.
    """
    if precision not in TOLERANCES:
        raise VerificationError(f"precision {precision!r} cannot be verified by this version, only {list(TOLERANCES)}")
    engine = f"onnxruntime {onnxruntime_module().__version__} {chain.provider}"
    result = Verified(precision, source, engine, batches)
    exact = _Exact(view)
    images = images[np.arange(sum(batches)) % len(images)]
    start = 0
    with torch.no_grad():
        for batch in batches:
            taken = images[start : start + batch]
            start += batch
            trained = _parts(view, chain, taken, result, exact)
            orders = [tuple(range(chain.num_blocks)), *view.bands.random_orders(SHUFFLED, seed=0)]
            for place, order in enumerate(orders):
                ours, theirs = chain.forward(taken, order), trained
                if place:
                    theirs = view.forward(torch.from_numpy(taken), order)
                error, angle = _compare(
                    result, f"the chain in order {list(order)}", ours, theirs, logits=True,
                    exact=functools.partial(exact.forward, taken, order),
                )  # fmt: skip
                key = "shuffled" if place else "trained"
                result.chain[key] = max(result.chain.get(key, 0.0), error)
                result.min_cosine = min(result.min_cosine, angle)
    return result


def verify_accuracy(view: PartsView, chain: Pipeline, samples: Samples, result: Verified) -> None:
    """Compare top-1 in trained order on labelled ``samples`` and write both into ``result``.

    Raises :class:`VerificationError` where the parts are more than a point below PyTorch.
    """
    right = {"pytorch": 0, "bundle": 0}
    order = tuple(range(chain.num_blocks))
    with torch.no_grad():
        for images, labels in samples.batches(max(result.batches)):
            right["bundle"] += int((chain.forward(images, order).argmax(1) == labels).sum())
            right["pytorch"] += int((view.forward(torch.from_numpy(images), order).numpy().argmax(1) == labels).sum())
    top1 = {name: count / len(samples) for name, count in right.items()}
    result.top1 = {**top1, "images": len(samples)}
    if top1["bundle"] < top1["pytorch"] - TOP1_DROP - _NOISE:
        raise VerificationError(
            f"the chain in {result.precision} answers {top1['bundle']:.4f} of {len(samples)} held-out images right, "
            f"PyTorch {top1['pytorch']:.4f}; more than {TOP1_DROP} is lost, export in fp16 or fp32"
        )


def verify_run(bundle: Bundle, run: LoadedRun, samples: Samples | None = None, source: str = "generated") -> Verified:
    """Compare a bundle with the run it was exported from, on ``samples`` or on generated images.

    Raises :class:`VerificationError` where it is another run's, or where the numbers differ.
    """
    m = bundle.manifest
    expected = model_id_of(run.weights_sha256, bundle.interface)
    if expected != m.model_id:
        raise VerificationError(
            f"{bundle.folder} is of model {m.model_id[:16]}…, {run.folder} is {expected[:16]}…; name the run that it "
            "was exported from, or export again"
        )
    view = _view_of(bundle, run)
    batches = batches_of(max(m.verified.get("batches", (MAX_BATCH,))))
    images = generated_images(m.image, sum(batches)) if samples is None else samples.images
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        result = verify_numbers(view, chain, images, source=source, precision=m.precision, batches=batches)
        if samples is not None and samples.labels is not None:
            verify_accuracy(view, chain, samples, result)
    return result


def _view_of(bundle: Bundle, run: LoadedRun) -> PartsView:
    """The run's model by the parts and in the bands of the bundle."""
    folded = bundle.folded
    view = PartsView(run.view, (run.view.num_blocks - folded.stem - folded.head) // bundle.num_blocks, folded=folded)
    view.bands = bundle.bands
    return view


class _Exact:
    """The same model in float64, built only if a part misses its tolerance: how far PyTorch's own float32 is off."""

    def __init__(self, view: PartsView) -> None:
        self._float32 = view

    @functools.cached_property
    def view(self) -> PartsView:
        return self._float32.of(prepare_for_export(self._float32.view).double())

    def forward(self, images: np.ndarray, order: Sequence[int]) -> torch.Tensor:
        return self.view.forward(torch.from_numpy(images).double(), order)


def _parts(view: PartsView, chain: Pipeline, images: np.ndarray, result: Verified, exact: _Exact) -> torch.Tensor:
    """Compare each part on PyTorch's own tokens; return PyTorch's logits."""

    def compare(name: str, ours: np.ndarray, theirs: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        error, _ = _compare(result, name, ours, theirs, exact=again)
        result.parts[name] = max(result.parts.get(name, 0.0), error)

    tokens = view.stem(torch.from_numpy(images))
    compare("stem", chain.stem(images), tokens, lambda: exact.view.stem(torch.from_numpy(images).double()))
    for index in range(chain.num_blocks):
        slot = torch.full((len(images),), index, dtype=torch.int64)
        after = view.block(index, tokens, slot)
        again = functools.partial(_double_block, exact, index, tokens, slot)
        compare(f"block {index}", chain.block(index, tokens.numpy(), index), after, again)
        if result.tolerance.large:
            _large(view, chain, index, tokens, result)
        tokens = after
    logits = view.head(tokens)
    compare("head", chain.head(tokens.numpy()), logits, lambda: exact.view.head(tokens.double()))
    return logits


def _double_block(exact: _Exact, index: int, tokens: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    return exact.view.block(index, tokens.double(), slot)


def _large(view: PartsView, chain: Pipeline, index: int, tokens: torch.Tensor, result: Verified) -> None:
    scaled = tokens * (RESIDUAL / float(tokens.abs().max().clamp_min(1e-30)))
    slot = torch.full((len(tokens),), index, dtype=torch.int64)
    what = f"block {index} with tokens up to {RESIDUAL:.0f}"
    ours, theirs = chain.block(index, scaled.numpy(), index), view.block(index, scaled, slot)
    error, _ = _compare(result, what, ours, theirs, count=False)
    result.large = max(result.large or 0.0, error)


def _compare(
    result: Verified,
    what: str,
    ours: np.ndarray,
    theirs: torch.Tensor,
    *,
    logits: bool = False,
    count: bool = True,
    exact: Callable[[], torch.Tensor] | None = None,
) -> tuple[float, float]:
    """Relative error and cosine; raises where they miss the tolerance.

    Float32 may miss it by as much as PyTorch's own float32 differs from ``exact``, the same in float64.
    """
    reference, tolerance = theirs.numpy(), result.tolerance
    batch, largest = len(reference), float(np.abs(reference).max())
    if not np.isfinite(largest):
        raise VerificationError(f"{what}: PyTorch itself gives values that are no numbers; the run cannot be exported")
    difference = float(np.abs(ours - reference).max())
    relative, angle = difference / max(largest, 1e-30), cosine(ours, reference)
    wanted = tolerance.cosine if logits else tolerance.part_cosine
    missed = tolerance.relative is not None and not relative <= tolerance.relative
    if missed and exact is not None and result.precision == "fp32":
        own = float((theirs.double() - exact()).abs().max()) / max(largest, 1e-30)
        allowed = min(OWN_ROUNDING * own, MOST)
        if relative <= allowed:
            tolerance = dataclasses.replace(tolerance, relative=allowed)
            result.notes["rounding"] = max(result.notes.get("rounding", 0.0), own)
    if tolerance.relative is not None and not relative <= tolerance.relative:
        raise VerificationError(
            f"{what} differs from PyTorch by {difference:.3g} ({relative:.2g} of the largest value {largest:.3g}) at "
            f"batch {batch}, the tolerance is {tolerance.relative:g}; it cannot be served, report this with the "
            "model's name"
        )
    if wanted is not None and not angle >= wanted:
        raise VerificationError(
            f"{what} in {result.precision} has a cosine of {angle:.5f} with PyTorch at batch {batch}, the tolerance is "
            f"{wanted:g}; export in fp16 or fp32"
        )
    if count:
        result.max_abs_error = max(result.max_abs_error, difference)
        result.max_rel_error = max(result.max_rel_error, relative)
    return relative, angle


def cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Mean over images of the cosine of the flattened values."""
    a, b = (np.asarray(values, np.float64).reshape(len(values), -1) for values in (ours, theirs))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean((a * b).sum(axis=1) / np.maximum(norms, 1e-30)))
