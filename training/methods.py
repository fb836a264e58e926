"""How training treats the order of the blocks.

A method draws an arrangement for each batch, says what the loss is, and in which arrangements a checkpoint is
judged. Draws depend only on the seed and the number of the step, so a resumed run draws the same; they are Python
ints, since an order in a CUDA tensor costs a synchronisation a block.

Here now: ``sequential`` (the baseline) and ``shuffle`` (arXiv 2407.04513, section 3: the order of all blocks
permuted in every batch). A method with parameters of its own adds them in :meth:`Method.attach`.
This module imports without torch, so that the command line can name the methods.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ls_edge.arrangement import Arrangement, random_orders
from ls_edge.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.view import BlockView


class Method:
    """Base of all methods: trained order, the criterion on the logits."""

    name = "sequential"
    """What ``--method`` calls it."""

    def attach(self, view: BlockView) -> None:
        """Give the view the parameters that this method trains besides the model's own."""

    def draw(self, blocks: int, seed: int, step: int) -> Arrangement:  # noqa: ARG002
        """The arrangement of one batch."""
        return Arrangement.plain(range(blocks))

    def loss(
        self,
        view: BlockView,
        images: Tensor,
        targets: Tensor,
        arrangement: Arrangement,
        criterion: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The loss of a batch: images ``[B, 3, H, W]``, targets int64 ``[B]``."""
        return criterion(view(images, arrangement).float(), targets)

    def validation(self, blocks: int, count: int, seed: int) -> list[Arrangement]:  # noqa: ARG002
        """The arrangements whose mean cross-entropy selects the checkpoint; the same in every epoch."""
        return [Arrangement.plain(range(blocks))]


class Shuffle(Method):
    """LayerShuffle: a uniform permutation a batch; judged over ``count`` seeded orders, the trained one left out."""

    name = "shuffle"

    def draw(self, blocks: int, seed: int, step: int) -> Arrangement:
        """A permutation of all blocks."""
        order = list(range(blocks))
        _rng(seed, step).shuffle(order)
        return Arrangement.plain(order)

    def validation(self, blocks: int, count: int, seed: int) -> list[Arrangement]:
        """Seeded orders, apart from those that ``eval`` draws from the same seed."""
        return [Arrangement.plain(order) for order in random_orders(blocks, count, seed ^ 0x5EED)]


METHODS: dict[str, type[Method]] = {method.name: method for method in (Method, Shuffle)}
"""Every method by name; the one list of them."""


def make_method(name: str, args: dict[str, Any]) -> Method:
    """The method of that name; raises :class:`UsageError` for an unknown one or a setting that it lacks."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; this version has {', '.join(METHODS)}")
    try:
        return METHODS[name](**args)
    except TypeError as error:
        raise UsageError(f"method {name} with settings {args}: {error}; leave out what it does not know") from None


def _rng(seed: int, step: int) -> random.Random:
    """A generator of its own for each step; ``random.Random`` of an int is the same everywhere."""
    return random.Random((seed << 40) ^ (step << 1) ^ 1)
