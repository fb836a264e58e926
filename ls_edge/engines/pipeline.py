"""All parts of a bundle in one process: what one device can do, and the reference for what several did.

``Pipeline.open(bundle)`` offers what a torch model view does, on numpy arrays: ``stem``, ``block``, ``head`` and
``forward`` in any arrangement. :func:`replay` checks a run's trace against it (guarantee R2).

One thread at a time uses a pipeline: a plain order runs between two buffers that belong to it.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.records import RequestRecord
from ls_edge.engines.engine import Engine, check_inputs
from ls_edge.engines.onnxruntime import Buffer, OnnxEngine
from ls_edge.engines.opening import EngineMemory, choose, open_engine, usable_threads
from ls_edge.engines.tensorrt_engine import TensorRTEngine

BOUND_BATCH_SIZES = 2
"""Batch sizes whose buffers a pipeline keeps: the usual one, and that of a last, smaller batch."""


class Pipeline:
    """Stem, blocks and head of a bundle as engines; make one with :meth:`open`."""

    def __init__(self, bundle: Bundle, stem: Engine, blocks: Sequence[Engine], head: Engine) -> None:
        self.bundle = bundle
        self.stem_engine = stem
        self.block_engines = tuple(blocks)
        self.head_engine = head
        self._bound: OrderedDict[int, BoundPipeline] = OrderedDict()

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        *,
        threads: int | None = None,
        provider: str | None = None,
        kind: EngineKind = "auto",
        max_batch: int | None = None,
        on_status: Callable[[str], None] = lambda _: None,
    ) -> Pipeline:
        """Open every part but ``whole``.

        ``kind``, ``provider``, ``max_batch``, ``on_status`` and errors as :func:`ls_edge.engines.opening.open_engine`.
        """
        threads = usable_threads(threads)
        choice = choose(bundle, kind, provider)
        memory = EngineMemory(bundle, max_batch)
        owners = sorted(set(bundle.owners))
        names = ["stem", *(f"block {owner}" for owner in owners), "head"]
        opened: list[Engine] = []
        try:
            for name in names:
                opened.append(
                    open_engine(
                        bundle, name, kind=choice.kind, provider=choice.named_provider, threads=threads, memory=memory,
                        on_status=on_status,
                    )
                )  # fmt: skip
        except BaseException:
            for engine in opened:
                engine.close()
            raise
        blocks = dict(zip(owners, opened[1:-1], strict=True))
        return cls(bundle, opened[0], [blocks[owner] for owner in bundle.owners], opened[-1])

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return len(self.block_engines)

    @property
    def owners(self) -> tuple[int, ...]:
        """For each block the first one with the same engine."""
        return self.bundle.owners

    @property
    def provider(self) -> str:
        """What really runs the engines."""
        return self.stem_engine.provider

    def stem(self, images: np.ndarray) -> np.ndarray:
        """Images float32 ``[B, 3, H, W]``, normalised, to tokens ``[B, N, D]``."""
        return self.stem_engine.run({"images": images})

    def block(self, index: int, tokens: np.ndarray, slot: int | np.ndarray = 0) -> np.ndarray:
        """Run a block on tokens ``[B, N, D]``; ``slot`` (int or int64 ``[B]``) counts where the bundle needs it."""
        inputs = {"tokens": tokens}
        if self.bundle.manifest.needs_slot:
            inputs["slot"] = np.broadcast_to(np.asarray(slot, dtype=np.int64), tokens.shape[:1])
        return self.block_engines[self._checked(index)].run(inputs)

    def head(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens ``[B, N, D]`` to logits float32 ``[B, C]``."""
        return self.head_engine.run({"tokens": tokens})

    def array_of(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens as an array float32 ``[B, N, D]``."""
        return tokens.astype(np.float32, copy=False)

    def forward(self, images: np.ndarray, arrangement: Arrangement | Sequence[int] | None = None) -> np.ndarray:
        """Images ``[B, 3, H, W]`` to logits ``[B, C]``; trained order where no arrangement is given."""
        if arrangement is None:
            arrangement = range(self.num_blocks)
        if not isinstance(arrangement, Arrangement):
            arrangement = Arrangement.plain(arrangement)
        for index in arrangement.order:
            self._checked(index)
        if arrangement.is_plain and self._on_device() is not None:
            return self._visit(images, arrangement.order)
        bound = self._bind(len(images)) if arrangement.is_plain else None
        if bound is None:
            return self.head(apply(arrangement, self.stem(images), self.block))
        return bound.run(images, arrangement.order)

    def profile(self, images: np.ndarray) -> tuple[np.ndarray, list[float]]:
        """As :meth:`forward` in trained order, with the seconds of stem, each block and head."""
        seconds: list[float] = []
        bound = self._bind(len(images))
        if bound is not None:
            return bound.run(images, range(self.num_blocks), seconds), seconds
        marks = [time.perf_counter()]
        tokens = self.stem(images)
        marks.append(time.perf_counter())
        for index in range(self.num_blocks):
            tokens = self.block(index, tokens, index)
            marks.append(time.perf_counter())
        logits = self.head(tokens)
        marks.append(time.perf_counter())
        return logits, [after - before for before, after in itertools.pairwise(marks)]

    def close(self) -> None:
        """Free the engines."""
        self._bound.clear()
        for engine in (self.stem_engine, *self.block_engines, self.head_engine):
            engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.num_blocks:
            raise UsageError(f"block {index} is not there: the bundle has blocks 0 to {self.num_blocks - 1}")
        return index

    def _on_device(self) -> list[OnnxEngine | TensorRTEngine] | None:
        """All engines where they share memory on a GPU, else None."""
        parts = (self.stem_engine, *self.block_engines, self.head_engine)
        found = [
            part for part in parts if isinstance(part, (OnnxEngine, TensorRTEngine)) and part.workspace is not None
        ]
        return found if len(found) == len(parts) and len({id(part.workspace) for part in found}) == 1 else None

    def _visit(self, images: np.ndarray, order: Sequence[int]) -> np.ndarray:
        """Stem, blocks and head in one visit to the GPU."""
        check_inputs("stem", self.stem_engine.signature, {"images": images})
        engines = self._on_device()
        assert engines is not None
        workspace = engines[0].workspace
        assert workspace is not None
        # the first block comes second, and its slot is 0
        slots = np.full(len(images), -1, np.int64) if self.bundle.manifest.needs_slot else None
        return workspace.visit([engines[0], *(engines[1 + block] for block in order), engines[-1]], images, slots)

    def _bind(self, batch: int) -> BoundPipeline | None:
        """Buffers for ONNX Runtime; None where another library runs a part, or tokens stay on the GPU anyway."""
        if self._on_device() is not None:
            return None
        stem, head = self.stem_engine, self.head_engine
        blocks = [engine for engine in self.block_engines if isinstance(engine, OnnxEngine)]
        if not isinstance(stem, OnnxEngine) or not isinstance(head, OnnxEngine) or len(blocks) < self.num_blocks:
            return None
        bound = self._bound.pop(batch, None) or BoundPipeline(
            stem, blocks, head, needs_slot=self.bundle.manifest.needs_slot, batch=batch
        )
        self._bound[batch] = bound
        while len(self._bound) > BOUND_BATCH_SIZES:
            self._bound.popitem(last=False)
        return bound


class BoundPipeline:
    """A pipeline at one batch size: two token buffers used in turn, each part bound to them once."""

    def __init__(
        self, stem: OnnxEngine, blocks: Sequence[OnnxEngine], head: OnnxEngine, *, needs_slot: bool, batch: int
    ) -> None:
        self.first, self.engines, self.needs_slot = stem, blocks, needs_slot
        signature, device = stem.signature, stem.device
        images, tokens, logits = signature.inputs[0], signature.output, head.signature.output
        self.images = Buffer(images.dtype, images.shape(batch), device)
        self.tokens = [Buffer(tokens.dtype, tokens.shape(batch), device) for _ in range(2)]
        self.slot = Buffer("int64", (batch,), device)
        self.logits = Buffer(logits.dtype, logits.shape(batch), device)
        self.stem = stem.bind({"images": self.images}, self.tokens[0])
        self.heads = [head.bind({"tokens": tokens}, self.logits) for tokens in self.tokens]
        self.blocks: dict[tuple[int, int], Callable[[], None]] = {}

    def run(self, images: np.ndarray, order: Sequence[int], seconds: list[float] | None = None) -> np.ndarray:
        """Stem, the blocks of ``order``, head; the time of each is added to ``seconds``."""
        check_inputs("stem", self.first.signature, {"images": images})
        current = 0
        marks = [time.perf_counter()]
        self.images.write(images)
        self.stem()
        marks.append(time.perf_counter())
        for place, block in enumerate(order):
            if self.needs_slot:
                self.slot.write(place)
            step = self.blocks.get((block, current))
            if step is None:
                step = self.blocks[block, current] = self._bind(block, current)
            step()
            current = 1 - current
            marks.append(time.perf_counter())
        self.heads[current]()
        logits = self.logits.read()
        marks.append(time.perf_counter())
        if seconds is not None:
            seconds.extend(after - before for before, after in itertools.pairwise(marks))
        return logits

    def _bind(self, block: int, current: int) -> Callable[[], None]:
        inputs = {"tokens": self.tokens[current]}
        if self.needs_slot:
            inputs["slot"] = self.slot
        return self.engines[block].bind(inputs, self.tokens[1 - current])


@dataclass(frozen=True)
class Replayed:
    """One answer of a trace, computed again in one process."""

    id: int
    error: float
    """Largest difference of a logit, relative to the largest logit; infinite where one is not a number."""


def replay(
    pipeline: Pipeline, records: Iterable[RequestRecord], image_of: Callable[[RequestRecord], np.ndarray]
) -> Iterator[Replayed]:
    """Run each answered record's arrangement again (guarantee R2: float32 within 1e-4).

    ``image_of`` gives a record's preprocessed image, float32 ``[3, H, W]``. Records without logits are left out.
    Raises :class:`EngineError` where a record has another number of logits than the bundle.
    """
    for record in records:
        if record.logits is None:
            continue
        ours = pipeline.forward(image_of(record)[None], record.arrangement)[0]
        theirs = np.asarray(record.logits, dtype=np.float32)
        if ours.shape != theirs.shape:
            raise EngineError(
                f"request {record.id} has {len(theirs)} logits, {pipeline.bundle.folder} gives {len(ours)}; "
                "the trace is of another bundle"
            )
        yield Replayed(record.id, relative_error(theirs, ours))


def relative_error(values: np.ndarray, reference: np.ndarray) -> float:
    """``max |values - reference| / max |reference|``; infinite where a value is not finite."""
    error = float(np.abs(reference - values).max() / max(float(np.abs(reference).max()), 1e-30))
    return error if np.isfinite(error) else float("inf")
