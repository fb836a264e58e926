"""Worth of the parts of a block: norms, residual branches, and the path around the block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.core.errors import ModelError
from ls_edge.evaluation.analysis.inside import Part, Parts
from ls_edge.evaluation.analysis.measures import Score
from ls_edge.evaluation.measure import Mean, log_softmax
from ls_edge.training.analysis.inspected import Inspected, Look

MOST_IMAGES = 256
NAMES = {
    "attn": "attention",
    "mlp_tokens": "token mixing",
    "linear_tokens": "token mixing",
    "mlp": "MLP",
    "mlp_channels": "MLP",
}
"""Layers of branches, by timm's names."""
Change = Callable[[int, Tensor], Tensor]
"""Runs a block, given its index and tokens, without a part."""


class PartsMeasure(Look):
    """Accuracy and loss in trained order without a part, in one block and in all, over the first images."""

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        self._images = 0
        self._sums: dict[tuple[str, int | None], tuple[Mean, Mean]] = {}
        try:
            branches = self.model.view.branches
        except ModelError:
            self.reason = f"the blocks of {inspected.name} do not have a norm before each residual branch"
            return
        self._changes: dict[str, Change] = {"norm": self._without([branch.norm for branch in branches], _same)}
        for branch in branches:
            self._changes[NAMES[branch.layer]] = self._without([branch.layer], _nothing)
        self._changes["residual"] = self._without_residual

    @torch.inference_mode()
    def add(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Run the first images without each part."""
        images, labels = images[: MOST_IMAGES - self._images], labels[: MOST_IMAGES - self._images]
        if self.reason or not len(images):
            return
        self._images += len(images)
        before = [self.model.stem(images)]
        for index in self.inspected.trained:
            before.append(self.model.block(index, before[-1], index))
        self._score("", None, before[-1], labels)
        for name, run in self._changes.items():
            everywhere = before[0]
            for index in self.inspected.trained:
                everywhere = run(index, everywhere)
                tokens = run(index, before[index])
                for later in self.inspected.trained[index + 1 :]:
                    tokens = self.model.block(later, tokens, later)
                self._score(name, index, tokens, labels)
            self._score(name, None, everywhere, labels)

    def result(self) -> Parts | None:
        """Return the scores without each part; None if there is a :attr:`reason`."""
        if self.reason or not self._images:
            return None
        scores = {key: Score(right.mean or 0.0, loss.mean) for key, (right, loss) in self._sums.items()}
        parts = [
            Part(name, [scores[name, index] for index in self.inspected.trained], scores[name, None])
            for name in self._changes
        ]
        return Parts(scores["", None], parts, self._images)

    def _score(self, name: str, block: int | None, tokens: Tensor, labels: np.ndarray) -> None:
        logits = self.model.head(tokens)
        right, loss = self._sums.setdefault((name, block), (Mean(), Mean()))
        right.add(float((logits.argmax(axis=1) == labels).sum()), len(labels))
        loss.add(-float(log_softmax(logits)[np.arange(len(labels)), labels].sum()), len(labels))

    def _without(self, names: Sequence[str], replace: Callable[..., Tensor]) -> Change:
        def run(index: int, tokens: Tensor) -> Tensor:
            block = self.model.view.blocks[index]
            with _replaced([block.get_submodule(name) for name in names], replace):
                return self.model.block(index, tokens, index)

        return run

    def _without_residual(self, index: int, tokens: Tensor) -> Tensor:
        return self.model.block(index, tokens, index) - tokens


@contextlib.contextmanager
def _replaced(modules: Sequence[nn.Module], replace: Callable[..., Tensor]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(replace).remove)
        yield


def _same(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    return inputs[0]


def _nothing(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    return torch.zeros_like(output)
