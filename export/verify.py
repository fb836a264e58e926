"""Do the exported parts compute what PyTorch computes? Each part alone, then the chain of them.

The reference is the view itself in float32 on the CPU, the subject the files as ONNX Runtime runs them there. An
error is the largest difference relative to the largest value of the reference; the bar for float32 is 1e-5.
Batches of 1, 2 and 5 show that the batch axis is free, trained and shuffled orders that blocks follow each other
in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ls_edge.arrangement import random_orders
from ls_edge.bundle import Bundle, ImageSpec, model_id_of
from ls_edge.errors import DataError, VerificationError
from ls_edge.runtime.chain import Chain
from ls_edge.runtime.sessions import onnxruntime_module
from ls_edge.training.checkpoint import LoadedRun
from ls_edge.training.view import BlockView

BARS = {"fp32": 1e-5}
"""Largest relative error allowed, by precision."""
BATCHES = (1, 2, 5)
SHUFFLED = 3
"""How many shuffled orders the chain is checked in."""


@dataclass
class Verified:
    """What was measured."""

    bar: float
    source: str
    """Where the images came from."""
    engine: str
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Relative error of each part alone, over all batches."""
    chain: dict[str, float] = field(default_factory=dict)
    """Relative error of the logits, in trained and in shuffled orders."""

    def to_json(self) -> dict[str, Any]:
        """For ``verified`` in the manifest."""
        return {
            "max_abs_error": self.max_abs_error,
            "max_rel_error": self.max_rel_error,
            "bar": self.bar,
            "reference": f"pytorch {torch.__version__} float32 cpu",
            "engine": self.engine,
            "images": self.source,
            "batches": list(BATCHES),
            "parts": self.parts,
            "chain": self.chain,
        }


def _bar(precision: str) -> float:
    if precision not in BARS:
        raise VerificationError(f"precision {precision!r} cannot be verified by this version, which knows {list(BARS)}")
    return BARS[precision]


def generated_images(image: ImageSpec, count: int = sum(BATCHES)) -> np.ndarray:
    """Seeded images float32 ``[count, 3, H, W]`` as a normalisation leaves them: slow waves under noise."""
    rng = np.random.default_rng(0)
    height, width = image.size
    y, x = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None, :]
    phase = rng.uniform(0, 2 * np.pi, (count, 3, 1, 1))
    speed = rng.uniform(1, 9, (2, count, 3, 1, 1))
    waves = np.sin(2 * np.pi * (speed[0] * y + speed[1] * x) + phase)
    images: np.ndarray = (waves + 0.3 * rng.standard_normal(waves.shape)).astype(np.float32)
    return images


def images_of(data: str, image: ImageSpec, count: int = sum(BATCHES)) -> np.ndarray:
    """The first images of a data set (DATA of the command line), preprocessed; repeated where they are too few."""
    from ls_edge.datasets import open_data
    from ls_edge.runtime.preprocess import Preprocessor

    preprocess = Preprocessor(image)
    found: list[np.ndarray] = []
    for ref in open_data(data, "eval").images:
        try:
            found.append(preprocess(ref.read(), ref.name))
        except DataError:
            continue
        if len(found) == count:
            break
    if not found:
        raise DataError(f"{data}: none of its images can be read; check the files")
    return np.stack([found[i % len(found)] for i in range(count)])


def verify_numbers(view: BlockView, chain: Chain, images: np.ndarray, *, source: str, precision: str) -> Verified:
    """Compare ``chain`` with ``view`` (float32, CPU, evaluation mode) on images ``[at least 8, 3, H, W]``.

    Raises :class:`VerificationError` naming the first part, or the order, that is off by more than the bar.
    """
    ort = onnxruntime_module()
    result = Verified(_bar(precision), source, f"onnxruntime {ort.__version__} {chain.provider}")
    start = 0
    with torch.no_grad():
        for batch in BATCHES:
            taken = images[start : start + batch]
            start += batch
            _parts(view, chain, taken, result)
            orders = [tuple(range(chain.blocks)), *random_orders(chain.blocks, SHUFFLED, seed=0)]
            for place, order in enumerate(orders):
                ours = chain.forward(taken, order)
                theirs = view(torch.from_numpy(taken), order)
                _compare(result, f"the chain in order {list(order)}", ours, theirs, result.chain, bool(place))
    return result


def verify_run(bundle: Bundle, run: LoadedRun) -> Verified:
    """Compare a bundle with the run it was exported from, on generated images.

    Raises :class:`VerificationError` where it is another run's, or where the numbers differ.
    """
    m = bundle.manifest
    expected = model_id_of(run.weights_sha256, bundle.interface)
    if expected != m.model_id:
        raise VerificationError(
            f"{bundle.folder} is of model {m.model_id[:16]}…, {run.folder} is {expected[:16]}…; name the run that it "
            "was exported from, or export again"
        )
    with Chain.open(bundle, threads=1, provider="cpu") as chain:
        return verify_numbers(run.view, chain, generated_images(m.image), source="generated", precision=m.precision)


def _parts(view: BlockView, chain: Chain, images: np.ndarray, result: Verified) -> None:
    tokens = view.stem(torch.from_numpy(images))
    _compare(result, "stem", chain.stem(images), tokens, result.parts)
    for index in range(chain.blocks):
        slot = torch.full((len(images),), index, dtype=torch.int64)
        after = view.block(index, tokens, slot)
        _compare(result, f"block {index}", chain.block(index, tokens.numpy(), index), after, result.parts)
        tokens = after
    _compare(result, "head", chain.head(tokens.numpy()), view.head(tokens), result.parts)


def _compare(
    result: Verified,
    what: str,
    ours: np.ndarray,
    theirs: torch.Tensor,
    into: dict[str, float],
    shuffled: bool | None = None,
) -> None:
    reference = theirs.numpy()
    batch, largest = len(reference), float(np.abs(reference).max())
    if not np.isfinite(largest):
        raise VerificationError(f"{what}: PyTorch itself gives values that are no numbers; the run cannot be exported")
    error = float(np.abs(ours - reference).max())
    relative = error / max(largest, 1e-30)
    if not relative <= result.bar:
        raise VerificationError(
            f"{what} differs from PyTorch by {error:.3g} ({relative:.2g} of the largest value {largest:.3g}) at batch "
            f"{batch}, the bar is {result.bar:g}; it cannot be served, report this with the model's name"
        )
    key = what if shuffled is None else "shuffled" if shuffled else "trained"
    into[key] = max(into.get(key, 0.0), relative)
    result.max_abs_error = max(result.max_abs_error, error)
    result.max_rel_error = max(result.max_rel_error, relative)
