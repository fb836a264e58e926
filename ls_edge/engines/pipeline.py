"""All parts of a bundle in one process: the performance of one device, and the reference for distributed answers.

``Pipeline.open(bundle)`` has the methods of a torch model view, on numpy arrays: ``stem``, ``block``, ``head``, and
``forward`` in any arrangement. :func:`replay` checks the trace of a run against it (guarantee R2).

One thread at a time uses a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.records import RequestRecord
from ls_edge.engines.engine import Engine
from ls_edge.engines.executor import HEAD, STEM, Executor
from ls_edge.engines.opening import EngineChoice, OnStep, open_parts


class Pipeline:
    """Stem, blocks and head of a bundle as engines; created by :meth:`open`."""

    def __init__(
        self, bundle: Bundle, stem: Engine, blocks: Sequence[Engine], head: Engine, choice: EngineChoice
    ) -> None:
        self.bundle = bundle
        self.choice = choice
        self.stem_engine = stem
        self.block_engines = tuple(blocks)
        self.head_engine = head
        self._executor = Executor({STEM: stem, **dict(enumerate(blocks)), HEAD: head})

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        *,
        threads: int | None = None,
        provider: str | None = None,
        kind: EngineKind = "auto",
        max_batch: int | None = None,
        on_step: OnStep = lambda _done, _total, _text: None,
    ) -> Pipeline:
        """Open every part except ``whole``; arguments and errors are those of :func:`open_parts`."""
        names = ["stem", *(f"block {index}" for index in range(bundle.num_blocks)), "head"]
        choices: list[EngineChoice] = []
        engines = open_parts(
            bundle,
            names,
            kind=kind,
            provider=provider,
            threads=threads,
            max_batch=max_batch,
            on_step=on_step,
            on_choice=choices.append,
        )
        stem, *blocks, head = (engines[name] for name in names)
        return cls(bundle, stem, blocks, head, choices[-1])

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_engines)

    @property
    def owners(self) -> tuple[int, ...]:
        """First block with the same engine, for each block."""
        return self.bundle.owners

    @property
    def provider(self) -> str:
        """Provider that runs the engines."""
        return self.stem_engine.provider

    def stem(self, images: np.ndarray) -> np.ndarray:
        """Convert normalized images float32 ``[B, 3, H, W]`` to tokens ``[B, N, D]``."""
        return self.stem_engine.run({"images": images})

    def block(self, index: int, tokens: np.ndarray, slot: int | np.ndarray = 0) -> np.ndarray:
        """Run a block on tokens ``[B, N, D]``; ``slot`` (int or int64 ``[B]``) counts if the bundle needs it."""
        inputs = {"tokens": tokens}
        if self.bundle.manifest.needs_slot:
            inputs["slot"] = np.broadcast_to(np.asarray(slot, dtype=np.int64), tokens.shape[:1])
        return self.block_engines[self._checked(index)].run(inputs)

    def head(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens ``[B, N, D]`` to logits float32 ``[B, C]``."""
        return self.head_engine.run({"tokens": tokens})

    def array_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens as an array float32 ``[B, N, D]``."""
        return tokens.astype(np.float32, copy=False)

    def forward(self, images: np.ndarray, arrangement: Arrangement | Sequence[int] | None = None) -> np.ndarray:
        """Convert images ``[B, 3, H, W]`` to logits ``[B, C]``, by default in trained order."""
        if arrangement is None:
            arrangement = range(self.num_blocks)
        if not isinstance(arrangement, Arrangement):
            arrangement = Arrangement.plain(arrangement)
        for index in arrangement.order:
            self._checked(index)
        if not arrangement.is_plain:
            return self.head(apply(arrangement, self.stem(images), self.block))
        return self._executor.run((STEM, *arrangement.order, HEAD), images)

    def profile(self, images: np.ndarray) -> tuple[np.ndarray, list[float]]:
        """Run :meth:`forward` in trained order; return the logits, and the seconds of stem, each block and head."""
        seconds: list[float] = []
        return self._executor.run((STEM, *range(self.num_blocks), HEAD), images, seconds=seconds), seconds

    def visit(self, blocks: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Run blocks one after the other, as a peer does."""
        return self._executor.run(blocks, tokens)

    def close(self) -> None:
        """Free the engines."""
        self._executor.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.num_blocks:
            raise UsageError(f"the bundle has no block {index}; it has blocks 0 to {self.num_blocks - 1}")
        return index


@dataclass(frozen=True)
class Replayed:
    """One answer of a trace, recomputed in one process."""

    id: int
    error: float
    """Largest difference of a logit, relative to the largest logit; infinite if one is not a number."""


def replay(
    pipeline: Pipeline, records: Iterable[RequestRecord], image_of: Callable[[RequestRecord], np.ndarray]
) -> Iterator[Replayed]:
    """Run the arrangement of each answer again (guarantee R2: float32 within 1e-4), skipping records without logits.

    ``image_of`` returns the preprocessed image of a record, float32 ``[3, H, W]``. Raises :class:`EngineError` if a
    record and the bundle disagree on the number of logits.
    """
    for record in records:
        if record.logits is None:
            continue
        ours = pipeline.forward(image_of(record)[None], record.arrangement)[0]
        theirs = np.asarray(record.logits, dtype=np.float32)
        if ours.shape != theirs.shape:
            raise EngineError(
                f"request {record.id} has {len(theirs)} logits, but {pipeline.bundle.folder} returns {len(ours)}; "
                "give the bundle of the trace"
            )
        yield Replayed(record.id, relative_error(theirs, ours))


def relative_error(values: np.ndarray, reference: np.ndarray) -> float:
    """Return ``max |values - reference| / max |reference|``, or infinity if a value is not finite."""
    error = float(np.abs(reference - values).max() / max(float(np.abs(reference).max()), 1e-30))
    return error if np.isfinite(error) else float("inf")
