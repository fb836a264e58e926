"""Contribution of the parts of a block: norms, residual branches, and the path around the block."""

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
from ls_edge.training.analysis.inspected import Inspected, LabeledImages, LackingError

NAMES = {
    "attn": "attention",
    "mlp_tokens": "token mixing",
    "linear_tokens": "token mixing",
    "mlp": "MLP",
    "mlp_channels": "MLP",
}
"""Layers of branches, by timm's names."""


@torch.inference_mode()
def parts(inspected: Inspected, batches: Sequence[LabeledImages]) -> Parts:
    """Return accuracy and loss in trained order without each part, in one block and in all."""
    model, trained = inspected.model, inspected.trained
    changes = _changes(inspected)
    sums: dict[tuple[str, int | None], tuple[Mean, Mean]] = {}

    def score(name: str, block: int | None, tokens: Tensor, labels: np.ndarray) -> None:
        logits = model.head(tokens)
        right, loss = sums.setdefault((name, block), (Mean(), Mean()))
        right.add(float((logits.argmax(axis=1) == labels).sum()), len(labels))
        loss.add(-float(log_softmax(logits)[np.arange(len(labels)), labels].sum()), len(labels))

    for images, labels in batches:
        before = [model.stem(images)]
        for index in trained:
            before.append(model.block(index, before[-1], index))
        score("", None, before[-1], labels)
        for name, run_without in changes.items():
            everywhere = before[0]
            for index in trained:
                everywhere = run_without(index, everywhere)
                tokens = run_without(index, before[index])
                for later in trained[index + 1 :]:
                    tokens = model.block(later, tokens, later)
                score(name, index, tokens, labels)
            score(name, None, everywhere, labels)
    scores = {key: Score(right.mean or 0.0, loss.mean) for key, (right, loss) in sums.items()}
    found = [Part(name, [scores[name, index] for index in trained], scores[name, None]) for name in changes]
    return Parts(scores["", None], found, sum(len(labels) for _, labels in batches))


def _changes(inspected: Inspected) -> dict[str, Callable[[int, Tensor], Tensor]]:
    """Return, by part, a function that runs a block without it, given its index and tokens."""
    model = inspected.model
    try:
        branches = model.view.branches
    except ModelError:
        raise LackingError(f"the blocks of {inspected.name} do not have a norm before each residual branch") from None

    def without(names: Sequence[str], replace: Callable[..., Tensor]) -> Callable[[int, Tensor], Tensor]:
        def run(index: int, tokens: Tensor) -> Tensor:
            block = model.view.blocks[index]
            with _replaced([block.get_submodule(name) for name in names], replace):
                return model.block(index, tokens, index)

        return run

    return {
        "norm": without([branch.norm for branch in branches], lambda _, inputs, __: inputs[0]),
        **{
            NAMES[branch.layer]: without([branch.layer], lambda _, __, output: torch.zeros_like(output))
            for branch in branches
        },
        "residual": lambda index, tokens: model.block(index, tokens, index) - tokens,
    }


@contextlib.contextmanager
def _replaced(modules: Sequence[nn.Module], replace: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the outputs of modules by those of ``replace``, which takes the arguments of a forward hook."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(replace).remove)
        yield
