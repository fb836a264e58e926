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

from ls_edge.arrangement import Arrangement, apply
from ls_edge.errors import ModelError
from ls_edge.training.models.view import BlockView

IMAGES, TOKENS, SLOT, TOKENS_OUT, LOGITS = "images", "tokens", "slot", "tokens_out", "logits"


class Stem(nn.Module):
    """Images ``[B, 3, H, W]`` to tokens ``[B, N, D]``."""

    def __init__(self, view: BlockView) -> None:
        super().__init__()
        self.view = view

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return self.view.stem(images)


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
    """The same with a slot, int64 ``[B]``."""

    def forward(self, tokens: Tensor, slot: Tensor) -> Tensor:  # type: ignore[override]
        """See the class."""
        return self.view.block(self.index, tokens, slot)


class Head(nn.Module):
    """Tokens ``[B, N, D]`` to logits ``[B, C]``."""

    def __init__(self, view: BlockView) -> None:
        super().__init__()
        self.view = view

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.view.head(tokens)


@dataclass(frozen=True)
class ExportTarget:
    """One module to export, with example inputs of batch two to trace it with."""

    name: str
    """As in :meth:`ls_edge.bundle.Manifest.part_names`."""
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


def stem_target(view: BlockView, size: tuple[int, int]) -> ExportTarget:
    """The stem for images of height and width ``size``."""
    return ExportTarget("stem", Stem(view).eval(), {IMAGES: torch.zeros(2, 3, *size)}, TOKENS)


def block_target(view: BlockView, index: int, tokens: tuple[int, int]) -> ExportTarget:
    """Block ``index`` for ``tokens = (N, D)``."""
    inputs = {TOKENS: torch.zeros(2, *tokens)}
    if view.needs_slot:
        inputs[SLOT] = torch.zeros(2, dtype=torch.int64)
    module = SlotBlock(view, index) if view.needs_slot else Block(view, index)
    return ExportTarget(f"block {index}", module.eval(), inputs, TOKENS_OUT)


def head_target(view: BlockView, tokens: tuple[int, int]) -> ExportTarget:
    """The head for ``tokens = (N, D)``."""
    return ExportTarget("head", Head(view).eval(), {TOKENS: torch.zeros(2, *tokens)}, LOGITS)


class PartsView:
    """A view by its parts: each is ``per_part`` neighbouring blocks, and slots count parts.

    What the files of ``export --blocks-per-part`` compute; with one block a part it is the view itself.
    """

    def __init__(self, view: BlockView, per_part: int = 1) -> None:
        """Raises :class:`ModelError` where the blocks cannot be divided so."""
        if per_part < 1 or view.num_blocks % per_part:
            whole = [k for k in range(1, view.num_blocks + 1) if view.num_blocks % k == 0]
            raise ModelError(
                f"{view.num_blocks} blocks cannot be grouped by {per_part}; use one of {', '.join(map(str, whole))}"
            )
        self.view = view
        self.per_part = per_part
        self.parts = view.num_blocks // per_part

    def stem(self, images: Tensor) -> Tensor:
        """As the view's."""
        return self.view.stem(images)

    def block(self, part: int, tokens: Tensor, slot: int | Tensor = 0) -> Tensor:
        """Run the blocks of a part, one after the other."""
        for place in range(self.per_part):
            tokens = self.view.block(part * self.per_part + place, tokens, slot * self.per_part + place)
        return tokens

    def head(self, tokens: Tensor) -> Tensor:
        """As the view's."""
        return self.view.head(tokens)

    def forward(self, images: Tensor, arrangement: Arrangement | Sequence[int]) -> Tensor:
        """Images ``[B, 3, H, W]`` to logits ``[B, C]``, the arrangement naming parts."""
        plain = arrangement if isinstance(arrangement, Arrangement) else Arrangement.plain(arrangement)
        return self.head(apply(plain, self.stem(images), self.block))
