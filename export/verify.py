"""Comparison of exported parts with PyTorch: each part alone, then all parts as a chain.

The reference is the view in float32 on the CPU; the files run in ONNX Runtime, also on the CPU. Each part runs on
batches of one to three images and of the maximum size, which shows that the batch axis is free; the reference runs
once, on the :data:`PART_IMAGES` that these batches repeat, since PyTorch's batch axis is free. The chain runs on
:data:`CHAIN_IMAGES` in trained and in shuffled orders, which shows that blocks work in any order that the bands allow.
The tolerances by precision are (:data:`TOLERANCES`):

- ``fp32``: the largest difference is at most 1e-5 of the reference's largest value, for parts and logits. If PyTorch's
  own float32 is less exact (because of long sums, as in convolutional stems), a part may differ by
  :data:`OWN_ROUNDING` times PyTorch's own distance from float64, but by at most :data:`LEAST_LIMIT`.
- ``fp16``: the largest difference is at most 2e-3 of it; each block also runs on tokens scaled up to 1,500, like
  residuals of trained models. No half-precision value inside a part may be infinite, which a plain run on a CPU would
  not reveal. The latter also holds for int8 for TensorRT.
- ``int8``: rounding errors are expected, so directions are compared: for the worst image, the cosine of the logits and
  of each part's output is at least 0.99. (A ViT-S with 0.998 answered as many of 1,000 images correctly as in float32.)
  The mean of an image's logits is subtracted first, since softmax ignores it and a large mean would hide all other
  errors. With labeled calibration images, the accuracy on the held-out half is at most one point below PyTorch's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle, ImageSpec, model_id_of
from ls_edge.core.errors import VerificationError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.text import short_id
from ls_edge.engines.engine import signature_of
from ls_edge.engines.measuring import reference_outputs
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CPU
from ls_edge.engines.reference import INT8_LIMIT, LEAST_LIMIT, limit_of, relative_error
from ls_edge.export.calibration import Samples
from ls_edge.export.fp16 import LARGEST, beyond_half
from ls_edge.export.settings import MAX_BATCH
from ls_edge.export.targets import PartsView
from ls_edge.training.runs.checkpoint import LoadedRun


@dataclass(frozen=True)
class Tolerance:
    """Required agreement of a precision with PyTorch."""

    relative: float | None = None
    """Maximum difference relative to the reference's largest value."""
    cosine: float | None = None
    """Minimum cosine of the logits and of each part's output."""
    large: bool = False
    """Whether blocks also run on tokens that are scaled up to :data:`RESIDUAL`."""


TOLERANCES = {
    "fp32": Tolerance(relative=1e-5),
    "fp16": Tolerance(relative=2e-3, large=True),
    "int8": Tolerance(cosine=0.99),
}
OWN_ROUNDING = 4.0
"""Allowed multiple of PyTorch's own rounding error, since both sums have one and there are few images."""
RESIDUAL = 1500.0
TOP1_DROP = 0.01
PART_IMAGES = 3
"""Number of different images that run through the parts: rows of a batch that are exchanged differ."""
CHAIN_IMAGES = 2
"""Number of images that run through the whole chain in each order."""
AGREEMENT_SLACK = 0.17
"""Maximum excess of a recorded agreement over one measured on another CPU: one of the six compared answers."""
COSINE_SLACK = 5e-4
SHUFFLED = 2
_NOISE = 1e-9
"""Allowance for rounding, so that a drop of exactly one point is accepted."""


def batches_of(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes to verify."""
    return tuple(sorted({*range(1, min(3, max_batch) + 1), max_batch}))


@dataclass
class Verified:
    """Result of a verification."""

    precision: str
    source: str
    engine: str
    batches: tuple[int, ...]
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    min_cosine: float = 1.0
    """Minimum cosine of an image's centered logits over trained and shuffled orders."""
    agreed: list[bool] = field(default_factory=list)
    """Whether the predicted class equals PyTorch's, for each image in trained and in shuffled orders."""
    parts: dict[str, float] = field(default_factory=dict)
    """Maximum relative error of each part alone over all batches."""
    chain: dict[str, float] = field(default_factory=dict)
    """Maximum relative error of the logits in trained and in shuffled orders."""
    large: float | None = None
    """Maximum relative error of blocks on tokens up to :data:`RESIDUAL`, if the precision requires this check."""
    top1: dict[str, Any] | None = None
    """Accuracy of PyTorch and of the parts on held-out images, if these have labels."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Other entries of ``verified``: blocks per part, form of int8, nodes in float32, outputs."""

    @property
    def tolerance(self) -> Tolerance:
        """Tolerance of the precision."""
        return TOLERANCES[self.precision]

    def to_json(self) -> dict[str, Any]:
        """Return the section ``verified`` of the manifest."""
        tolerance = self.tolerance
        return {
            "max_abs_error": self.max_abs_error,
            "max_rel_error": self.max_rel_error,
            "min_cosine": self.min_cosine,
            "agreement": sum(self.agreed) / len(self.agreed),
            "measure": "relative error" if tolerance.cosine is None else "cosine",
            "tolerance": tolerance.relative if tolerance.cosine is None else tolerance.cosine,
            "reference": f"pytorch {torch.__version__} float32 cpu",
            "engine": self.engine,
            "images": self.source.rstrip("/").rpartition("/")[2],  # bundles travel, without the folders of a machine
            "batches": list(self.batches),
            "parts": self.parts,
            "chain": self.chain,
            "residual_1500": self.large,
            "top1": self.top1,
            **self.notes,
        }


def generated_images(image: ImageSpec, count: int = MAX_BATCH) -> np.ndarray:
    """Return seeded images float32 ``[count, 3, H, W]``, normalized: slow waves under noise."""
    rng = np.random.default_rng(0)
    height, width = image.size
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None, :]
    phase = rng.uniform(0, 2 * np.pi, (count, 3, 1, 1))
    speed = rng.uniform(1, 9, (2, count, 3, 1, 1))
    waves: np.ndarray = np.sin(2 * np.pi * (speed[0] * y + speed[1] * x) + phase)
    waves += 0.3 * rng.standard_normal(waves.shape)
    return waves.astype(np.float32)


def verify_numbers(
    view: PartsView,
    chain: Pipeline,
    images: np.ndarray,
    *,
    source: str,
    precision: str,
    batches: tuple[int, ...] = batches_of(MAX_BATCH),
) -> Verified:
    """Compare ``chain`` with ``view`` (float32, CPU, evaluation mode) on the first images of ``[n, 3, H, W]``.

    Raise :class:`VerificationError` with the first part or order that misses the tolerance of ``precision``.
    """
    if precision not in TOLERANCES:
        raise VerificationError(f"precision {precision!r} cannot be verified by this version, only {list(TOLERANCES)}")
    engine = f"onnxruntime {onnxruntime_module().__version__} {chain.provider}"
    comparison = _Comparison(view, chain, Verified(precision, source, engine, batches))
    if source != "generated":
        comparison.result.notes["images_sha256"] = hashlib.sha256(images.tobytes()).hexdigest()
    with torch.no_grad():
        few = images[:CHAIN_IMAGES]
        trained = comparison.parts(images[:PART_IMAGES])[:CHAIN_IMAGES]
        comparison.chain_in("trained", range(chain.num_blocks), few, trained)
        for order in view.bands.random_orders(SHUFFLED, seed=0):
            comparison.chain_in("shuffled", order, few, view.forward(torch.from_numpy(few), order))
        if chain.bundle.manifest.parts.whole is not None:
            signature = signature_of(chain.bundle.manifest, "whole")
            whole = OnnxEngine(chain.bundle.read("whole"), "whole", signature, provider=CPU, threads=1)
            comparison.whole(whole.run({"images": few}), few, trained)
            whole.close()
    return comparison.result


def check_half_range(bundle: Bundle, images: np.ndarray) -> None:
    """Raise :class:`VerificationError` with the part and the value that half precision cannot represent."""
    for part, names in beyond_half(bundle, images, range_orders(bundle.bands)).items():
        raise VerificationError(
            f"{part}: the value {names[0]!r} exceeds {LARGEST:,.0f}, the range of float16, so a GPU would answer NaN; "
            "export again, or in fp32"
        )


def range_orders(bands: Bands) -> list[Sequence[int]]:
    """Return the orders in which values are checked against the range of float16."""
    return [range(bands.num_blocks), *bands.random_orders(SHUFFLED, seed=0)]


def verify_accuracy(view: PartsView, chain: Pipeline, samples: Samples, result: Verified) -> None:
    """Compare top-1 in trained order on labeled ``samples``, and add both accuracies to ``result``.

    Raise :class:`VerificationError` if the parts are more than one point below PyTorch.
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
            f"the chain in {result.precision} answers {top1['bundle']:.4f} of {len(samples)} held-out images "
            f"correctly, PyTorch {top1['pytorch']:.4f}; the loss is more than {TOP1_DROP}; export in fp16 or fp32"
        )


def verify_run(bundle: Bundle, run: LoadedRun, samples: Samples | None = None, source: str = "generated") -> Verified:
    """Compare a bundle with the run that it was exported from, on ``samples`` or on generated images.

    Raise :class:`VerificationError` if it belongs to another run, or if classes, preprocessing, or results differ.
    """
    m, folded = bundle.manifest, bundle.folded
    for what, ours, theirs in (
        ("list of classes", m.classes, run.record.classes),
        ("preprocessing", m.image, run.record.image),
    ):
        if ours != theirs:
            raise VerificationError(
                f"the {what} of {bundle.folder} differs from {run.folder}: {_first_difference(ours, theirs)}; name the "
                "run that it was exported from, or export again"
            )
    expected = model_id_of(run.weights_sha256, bundle.interface)
    if expected != m.model_id:
        raise VerificationError(
            f"{bundle.folder} belongs to model {short_id(m.model_id)}, {run.folder} is {short_id(expected)}; name the "
            "run that it was exported from, or export again"
        )
    view = PartsView(run.view, folded=folded)
    view.bands = bundle.bands
    images = generated_images(m.image) if samples is None else samples.images
    check_half_range(bundle, images)  # first: it names the cause of what differs
    with Pipeline.on_demand(bundle) as chain:
        result = verify_numbers(
            view,
            chain,
            images,
            source=source,
            precision=m.precision,
            batches=batches_of(max(m.verified.get("batches", (MAX_BATCH,)))),
        )
        if samples is not None and samples.labels is not None:
            verify_accuracy(view, chain, samples, result)
        outputs = reference_outputs(bundle, chain.executor.run)
    result.notes.update(int8_form(bundle))
    _check_outputs(m.verified.get("outputs", {}), outputs, limit_of(m))
    _check_claims(m.verified, result)
    return result


def int8_form(bundle: Bundle) -> dict[str, str]:
    """Return the entry ``int8`` of ``verified``, or an empty dictionary in other precisions."""
    if bundle.manifest.precision != "int8":
        return {}
    return {"int8": "explicit" if b"DequantizeLinear" in bundle.read("block 0") else "dynamic"}


def _check_outputs(recorded: Mapping[str, Any], found: Mapping[str, np.ndarray], limit: float) -> None:
    for name, values in recorded.items():
        wanted = found.get(name)
        if wanted is None or not relative_error(np.asarray(values), wanted) <= limit:
            raise VerificationError(
                f"the manifest's outputs of {name} differ from those of its file, and boards compare with them; "
                "export again"
            )


def _check_claims(recorded: Mapping[str, Any], result: Verified) -> None:
    """Raise :class:`VerificationError` with the first entry of ``verified`` that is better than the measured one.

    Numbers are only compared if they were measured on the same images.
    """
    found, limit = result.to_json(), result.tolerance.relative or INT8_LIMIT
    for name in ("measure", "tolerance", "int8"):
        if name in recorded and recorded[name] != found.get(name):
            raise _false_claim(name, recorded[name], found.get(name))
    if _images_of(recorded) != _images_of(found):
        return
    claimed, measured = _numbers_of(recorded), _numbers_of(found)
    slack = {"agreement": AGREEMENT_SLACK, "min_cosine": COSINE_SLACK, "top1 bundle": TOP1_DROP + _NOISE}
    for name in claimed.keys() & measured.keys():
        better = (claimed[name] - measured[name]) * (1 if name in slack else -1)
        if not better <= slack.get(name, limit / 2 + result.notes.get("rounding", 0.0) * OWN_ROUNDING):
            raise _false_claim(name, claimed[name], measured[name])


def _false_claim(name: str, claimed: object, measured: object) -> VerificationError:
    return VerificationError(f"the manifest says verified.{name} is {claimed}, but it is {measured}; export again")


def _images_of(verified: Mapping[str, Any]) -> tuple[Any, ...]:
    labeled = (verified.get("top1") or {}).get("images")
    return verified.get("images"), verified.get("images_sha256"), labeled, tuple(verified.get("batches", ()))


def _numbers_of(verified: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured numbers by name: errors, agreement, cosine, and the bundle's accuracy."""
    numbers = {name: verified.get(name) for name in ("max_rel_error", "residual_1500", "agreement", "min_cosine")}
    for group in ("parts", "chain"):
        numbers.update({f"{group} {name}": value for name, value in verified.get(group, {}).items()})
    numbers["top1 bundle"] = (verified.get("top1") or {}).get("bundle")
    return {name: value for name, value in numbers.items() if value is not None}


def _first_difference(ours: Sequence[str] | ImageSpec, theirs: Sequence[str] | ImageSpec) -> str:
    """Describe the first difference between two lists of classes or two preprocessings."""
    a, b = (
        msgspec.to_builtins(value) if isinstance(value, ImageSpec) else dict(enumerate(value))
        for value in (ours, theirs)
    )
    key = next(key for key in (*a, *b) if a.get(key) != b.get(key))
    return f"{key} is {a.get(key)!r}, not {b.get(key)!r}"


class _Comparison:
    def __init__(self, view: PartsView, chain: Pipeline, result: Verified) -> None:
        self.view, self.chain, self.result = view, chain, result

    def _exact(self, part: int) -> PartsView:
        """Return a part in float64, which is only needed if a part misses its tolerance."""
        alone = self.view.alone(part)
        alone.view.double()
        return alone

    def _exact_logits(self, images: np.ndarray, order: Sequence[int]) -> Tensor:
        tokens = self._exact(STEM).stem(torch.from_numpy(images).double())
        for slot, index in enumerate(order):
            tokens = self._exact(index).block(index, tokens, slot)
        return self._exact(HEAD).head(tokens)

    def parts(self, images: np.ndarray) -> Tensor:
        """Compare each part on PyTorch's tokens; return PyTorch's logits."""
        pixels = torch.from_numpy(images)
        tokens = self.view.stem(pixels)
        self._part("stem", self.chain.stem, pixels, tokens, lambda rows: self._exact(STEM).stem(rows))
        for index in range(self.chain.num_blocks):
            tokens = self._block(index, tokens)
        logits = self.view.head(tokens)
        self._part("head", self.chain.head, tokens, logits, lambda rows: self._exact(HEAD).head(rows))
        return logits

    def _block(self, index: int, tokens: Tensor) -> Tensor:
        name, result = f"block {index}", self.result

        def run(rows: np.ndarray) -> np.ndarray:
            return self.chain.block(index, rows, index)

        after = self.view.block(index, tokens, index)
        self._part(name, run, tokens, after, lambda rows: self._exact(index).block(index, rows, index))
        if result.tolerance.large:
            scaled = tokens[:1] * (RESIDUAL / float(tokens[:1].abs().max().clamp_min(1e-30)))
            scaled = torch.cat((scaled, -scaled))
            ours, theirs = run(scaled.numpy()), self.view.block(index, scaled, index)
            error = self._compare(f"{name} with tokens up to {RESIDUAL:.0f}", ours, theirs)[1]
            result.large = max(result.large or 0.0, error)
        return after

    def _part(
        self,
        name: str,
        run: Callable[[np.ndarray], np.ndarray],
        inputs: Tensor,
        outputs: Tensor,
        exact: Callable[[Tensor], Tensor],
    ) -> None:
        """Compare ``run`` with PyTorch's outputs in batches of each size, which repeat the images."""
        for batch in self.result.batches:
            which = torch.arange(batch) % len(inputs)
            rows = inputs[which]
            found = self._compare(name, run(rows.numpy()), outputs[which], partial(exact, rows.double()))
            self._count(name, found)

    def chain_in(self, kind: str, order: Sequence[int], images: np.ndarray, theirs: Tensor) -> None:
        """Compare the logits of the chain in one order; ``kind`` is ``trained`` or ``shuffled``."""
        result, ours = self.result, self.chain.forward(images, order)
        found = self._compare(
            f"the chain in order {list(order)}", ours, theirs, lambda: self._exact_logits(images, order)
        )
        self._count(kind, found, result.chain)
        result.min_cosine = min(result.min_cosine, found[2])
        result.agreed += (ours.argmax(1) == theirs.numpy().argmax(1)).tolist()

    def whole(self, ours: np.ndarray, images: np.ndarray, theirs: Tensor) -> None:
        """Compare the logits of the whole model in one file, ``whole.onnx``."""
        order = range(self.chain.num_blocks)
        self._count("whole", self._compare("whole", ours, theirs, lambda: self._exact_logits(images, order)))

    def _count(self, name: str, found: tuple[float, float, float], errors: dict[str, float] | None = None) -> None:
        """Note a difference and a relative error, by default as those of a part."""
        result, (difference, error, _) = self.result, found
        errors = result.parts if errors is None else errors
        errors[name] = max(errors.get(name, 0.0), error)
        result.max_abs_error = max(result.max_abs_error, difference)
        result.max_rel_error = max(result.max_rel_error, error)

    def _compare(
        self,
        what: str,
        ours: np.ndarray,
        theirs: Tensor,
        exact: Callable[[], Tensor] | None = None,
    ) -> tuple[float, float, float]:
        """Return difference, relative error, and cosine; raise :class:`VerificationError` if they miss the tolerance.

        In float32, the error may be larger if PyTorch's own float32 differs that much from ``exact``, the float64
        result.
        """
        result, reference, limit = self.result, theirs.numpy(), self.result.tolerance.relative
        batch, largest = len(reference), float(np.abs(reference).max())
        if not np.isfinite(largest):
            raise VerificationError(f"{what}: PyTorch itself returns NaN or infinity; the run cannot be exported")
        difference = float(np.abs(ours - reference).max())
        relative, angle = difference / max(largest, 1e-30), cosine(ours, reference)
        if limit is not None and not relative <= limit and exact is not None and result.precision == "fp32":
            own = float((theirs.double() - exact()).abs().max()) / max(largest, 1e-30)
            if relative <= min(OWN_ROUNDING * own, LEAST_LIMIT):
                limit = None
                result.notes["rounding"] = max(result.notes.get("rounding", 0.0), own)
        if limit is not None and not relative <= limit:
            raise VerificationError(
                f"{what} differs from PyTorch by {difference:.3g} ({relative:.2g} of the largest value {largest:.3g}) "
                f"at batch {batch}, the tolerance is {limit:g}; "
                + ("report this with the model's name" if result.precision == "fp32" else "export in fp32")
            )
        if result.tolerance.cosine is not None and not angle >= result.tolerance.cosine:
            raise VerificationError(
                f"{what} in {result.precision} has a cosine of {angle:.5f} with PyTorch at batch {batch}, the "
                f"tolerance is {result.tolerance.cosine:g}; export in fp16 or fp32"
            )
        return difference, relative, angle


def cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the minimum cosine over the images, of tokens ``[B, N, D]`` or logits ``[B, C]``; of equal ones, 1.

    Logits are centered, since softmax ignores their mean, and a large mean makes any two vectors similar.
    """
    a, b = (np.asarray(values, np.float64).reshape(len(values), -1) for values in (ours, theirs))
    if ours.ndim == 2:
        a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.min(np.where((a == b).all(axis=1), 1.0, (a * b).sum(axis=1) / np.maximum(norms, 1e-30))))
