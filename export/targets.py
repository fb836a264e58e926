"""The modules of a model that become ONNX files: stem, blocks and head.

Each module takes and returns tensors only, named as in the contract: ``images`` to ``tokens``; ``tokens`` (and
``slot`` where the method needs it) to ``tokens_out``; ``tokens`` to ``logits``. They wrap a copy of the view in
float32, on the CPU, in evaluation mode and with attention written out, since a fused attention call comes out of
the exporter with shape arithmetic around it. The precision of a part is changed in its file (``fp16``, ``int8``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import NOT_FOLDED, Folded
from ls_edge.core.errors import ModelError, UsageError
from ls_edge.training.models.view import BlockView

IMAGES, TOKENS, SLOT, TOKENS_OUT, LOGITS = "images", "tokens", "slot", "tokens_out", "logits"


class Stem(nn.Module):
    """Images ``[B, 3, H, W]`` to tokens ``[B, N, D]``, the first ``folded`` blocks included."""

    def __init__(self, view: BlockView, folded: int = 0) -> None:
        super().__init__()
        self.view = view
        self.folded = folded

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        tokens = self.view.stem(images)
        for index in range(self.folded):
            tokens = self.view.block(index, tokens, index)
        return tokens


class Block(nn.Module):
    """Tokens ``[B, N, D]`` to tokens of the same shape, by block ``index``; no slot."""

    def __init__(self, view: BlockView, index: int) -> None:
        super().__init__()
        self.view = view
        self.index = index

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.view.block(self.index, tokens, 0)


class SlotBlock(Block):
    """The same with a slot, int64 ``[B]``, to which the blocks that the stem runs are added."""

    def __init__(self, view: BlockView, index: int, folded: int = 0) -> None:
        super().__init__(view, index)
        self.folded = folded

    def forward(self, tokens: Tensor, slot: Tensor) -> Tensor:  # type: ignore[override]
        """See the class."""
        return self.view.block(self.index, tokens, slot + self.folded if self.folded else slot)


class Head(nn.Module):
    """Tokens ``[B, N, D]`` to logits ``[B, C]``, the last ``folded`` blocks included."""

    def __init__(self, view: BlockView, folded: int = 0) -> None:
        super().__init__()
        self.view = view
        self.folded = folded

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        for index in range(self.view.num_blocks - self.folded, self.view.num_blocks):
            tokens = self.view.block(index, tokens, index)
        return self.view.head(tokens)


@dataclass(frozen=True)
class ExportTarget:
    """One module to export, with example inputs of batch two to trace it with."""

    name: str
    """As in :meth:`ls_edge.core.bundle.Manifest.part_names`."""
    module: nn.Module
    inputs: dict[str, Tensor]
    output: str


def prepare_for_export(view: BlockView) -> BlockView:
    """Return a copy of ``view`` in float32, on the CPU, in evaluation mode and with attention written out."""
    plain = copy.deepcopy(view).float().cpu().eval().requires_grad_(False)
    for module in plain.modules():
        if getattr(module, "fused_attn", None):
            module.fused_attn = False  # type: ignore[assignment]
    return plain


def stem_target(view: BlockView, size: tuple[int, int], folded: int = 0) -> ExportTarget:
    """The stem, with the first ``folded`` blocks, for images of height and width ``size``."""
    return ExportTarget("stem", Stem(view, folded).eval(), {IMAGES: torch.zeros(2, 3, *size)}, TOKENS)


def block_target(view: BlockView, index: int, tokens: tuple[int, int], folded: int = 0) -> ExportTarget:
    """Block ``index`` for ``tokens = (N, D)``; slots count from the block behind the ``folded`` first ones."""
    inputs = {TOKENS: torch.zeros(2, *tokens)}
    if view.needs_slot:
        inputs[SLOT] = torch.zeros(2, dtype=torch.int64)
    module = SlotBlock(view, index, folded) if view.needs_slot else Block(view, index)
    return ExportTarget(f"block {index}", module.eval(), inputs, TOKENS_OUT)


def head_target(view: BlockView, tokens: tuple[int, int], folded: int = 0) -> ExportTarget:
    """The head, with the last ``folded`` blocks, for ``tokens = (N, D)``."""
    return ExportTarget("head", Head(view, folded).eval(), {TOKENS: torch.zeros(2, *tokens)}, LOGITS)


class PartsView:
    """A view by the parts of a bundle: stem and head with the blocks that are folded into them, and the parts between.

    A part is ``per_part`` neighbouring blocks, and slots count parts: what the files of ``export --blocks-per-part``
    and ``--fold-ends`` compute. With one block a part and nothing folded it is the view itself.
    """

    def __init__(
        self, view: BlockView, per_part: int = 1, bands: Bands | None = None, folded: Folded = NOT_FOLDED
    ) -> None:
        """``bands`` are those of the view's blocks; None is one.

        Raises :class:`ModelError` where the blocks cannot be divided so.
        """
        blocks = view.num_blocks - folded.stem - folded.head
        if per_part < 1 or blocks % per_part:
            whole = [k for k in range(1, blocks + 1) if blocks % k == 0]
            raise ModelError(
                f"{blocks} blocks cannot be grouped by {per_part}; use one of {', '.join(map(str, whole))}"
            )
        self.view = view
        self.per_part = per_part
        self.folded = folded
        self.parts = blocks // per_part
        between = range(folded.stem, folded.stem + blocks)
        of_blocks = Bands(blocks) if bands is None else bands.keep(between)
        if any(cut % per_part for cut in of_blocks.cuts):
            raise ModelError(
                f"parts of {per_part} blocks would stand in two bands ({of_blocks}); use bands whose sizes are "
                f"multiples of {per_part}, or --blocks-per-part 1"
            )
        self.bands = Bands(self.parts, tuple(cut // per_part for cut in of_blocks.cuts))

    def of(self, view: BlockView) -> PartsView:
        """The same parts of another view."""
        other = copy.copy(self)
        other.view = view
        return other

    def stem(self, images: Tensor) -> Tensor:
        """As the view's, with the blocks that are folded into it."""
        return Stem(self.view, self.folded.stem)(images)  # type: ignore[no-any-return]

    def block(self, part: int, tokens: Tensor, slot: int | Tensor = 0) -> Tensor:
        """Run the blocks of a part, one after the other."""
        first = self.folded.stem
        for place in range(self.per_part):
            index, model_slot = first + part * self.per_part + place, first + slot * self.per_part + place
            tokens = self.view.block(index, tokens, model_slot)
        return tokens

    def head(self, tokens: Tensor) -> Tensor:
        """As the view's, with the blocks that are folded into it."""
        return Head(self.view, self.folded.head)(tokens)  # type: ignore[no-any-return]

    def forward(self, images: Tensor, arrangement: Arrangement | Sequence[int]) -> Tensor:
        """Images ``[B, 3, H, W]`` to logits ``[B, C]``, the arrangement naming parts."""
        plain = arrangement if isinstance(arrangement, Arrangement) else Arrangement.plain(arrangement)
        return self.head(apply(plain, self.stem(images), self.block))


def ends_of(bands: Bands) -> Folded:
    """What ``--fold-ends`` folds: a first and a last band that are smaller than the largest one.

    Raises :class:`UsageError` where there is no such band.
    """
    sizes = list(map(len, bands.groups))
    most = max(sizes)
    folded = Folded(sizes[0] if sizes[0] < most else 0, sizes[-1] if sizes[-1] < most else 0)
    if folded == NOT_FOLDED:
        raise UsageError(
            f"--fold-ends folds a first and a last band that are smaller than the largest, and the bands are {bands}; "
            "leave it out, or give others with --bands"
        )
    return folded
