"""Modules of a model that become ONNX files: stem, blocks, and head.

The modules take and return only tensors: ``images`` to ``tokens``; ``tokens`` (and ``slot`` if the method needs it) to
``tokens_out``; ``tokens`` to ``logits``. They wrap a view in float32, on the CPU, in evaluation mode, and
with unfused attention, because the exporter surrounds fused attention with shape arithmetic. The precision of a part is
changed later, in its graph (``fp16``, ``int8``).

A view for export shares its weights with the original, and the module of a part has no other blocks, so neither the
exporter nor a comparison needs memory for a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import NOT_FOLDED, Folded
from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.training.models.view import BlockView


class PartsView:
    """A view divided into the parts of a bundle.

    Stem and head include the blocks that are folded into them; the remaining blocks are counted from 0.
    """

    def __init__(self, view: BlockView, bands: Bands | None = None, folded: Folded = NOT_FOLDED) -> None:
        """Divide ``view``, with ``bands`` of its blocks."""
        blocks = view.num_blocks - folded.stem - folded.head
        self.view, self.folded = view, folded
        self.num_blocks = blocks
        """Number of blocks between stem and head."""
        self.bands = (bands or Bands(view.num_blocks)).keep(range(folded.stem, folded.stem + blocks))

    def of(self, view: BlockView) -> PartsView:
        """Return the same parts of another view."""
        other = copy.copy(self)
        other.view = view
        return other

    def alone(self, part: int) -> PartsView:
        """Return the parts of a view for export that only has the blocks of one part (:mod:`ls_edge.core.parts`)."""
        first, end = self.folded.stem, self.view.num_blocks - self.folded.head
        ends = {STEM: range(first), HEAD: range(end, self.view.num_blocks)}
        return self.of(prepare_for_export(self.view, ends.get(part, (first + part,))))

    def stem(self, images: Tensor) -> Tensor:
        """Return tokens ``[B, N, D]`` of images ``[B, 3, H, W]``."""
        tokens = self.view.stem(images)
        for index in range(self.folded.stem):
            tokens = self.view.block(index, tokens, index)
        return tokens

    def block(self, part: int, tokens: Tensor, slot: int | Tensor = 0) -> Tensor:
        """Run a block."""
        return self.view.block(self.folded.stem + part, tokens, self.folded.stem + slot)

    def head(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of tokens ``[B, N, D]``."""
        for index in range(self.view.num_blocks - self.folded.head, self.view.num_blocks):
            tokens = self.view.block(index, tokens, index)
        return self.view.head(tokens)

    def forward(self, images: Tensor, arrangement: Arrangement | Sequence[int]) -> Tensor:
        """Return logits ``[B, C]`` of images ``[B, 3, H, W]`` for an arrangement of parts."""
        plain = arrangement if isinstance(arrangement, Arrangement) else Arrangement.plain(arrangement)
        return self.head(apply(plain, self.stem(images), self.block))


class _OneInput(nn.Module):
    """Module that calls a function of one tensor; ``view`` owns the parameters."""

    def __init__(self, view: BlockView, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.view = view
        self.run = run

    def forward(self, images_or_tokens: Tensor) -> Tensor:
        return self.run(images_or_tokens)


class _TwoInputs(_OneInput):
    def forward(self, tokens: Tensor, slot: Tensor) -> Tensor:  # type: ignore[override]
        return self.run(tokens, slot)


@dataclass(frozen=True)
class ExportTarget:
    """A module to export, with example inputs of batch two for tracing."""

    name: str
    """Name of the part, as in :meth:`ls_edge.core.bundle.Manifest.part_names`."""
    module: nn.Module
    inputs: dict[str, Tensor]
    output: str


def prepare_for_export(view: BlockView, only: Container[int] | None = None) -> BlockView:
    """Return a view in float32, on the CPU, in evaluation mode, and with unfused attention, with the same weights.

    Blocks that are not in ``only`` are empty.
    """
    parts: dict[int, nn.Module | nn.Parameter] = {
        id(weight): nn.Parameter(weight.detach().float().cpu(), requires_grad=False) for weight in view.parameters()
    }
    if only is not None:
        kept = {id(block) for index, block in enumerate(view.blocks) if index in only}
        parts |= {id(block): nn.Identity() for block in view.blocks if id(block) not in kept}
    plain = copy.deepcopy(view, parts).float().cpu().eval()
    for module in plain.modules():
        if getattr(module, "fused_attn", None):
            module.fused_attn = False  # type: ignore[assignment]
    return plain


def stem_target(parts: PartsView) -> ExportTarget:
    """Return the export target of the stem, including blocks that are folded into it."""
    alone = parts.alone(STEM)
    images = torch.zeros(2, 3, *parts.view.image_size)
    return ExportTarget("stem", _OneInput(alone.view, alone.stem).eval(), {"images": images}, "tokens")


def block_target(view: BlockView, index: int, folded: int = 0) -> ExportTarget:
    """Return the export target of block ``index``; its slots do not count the first ``folded`` blocks."""
    view = prepare_for_export(view, (index,))
    inputs = {"tokens": _tokens(view)}
    if not view.needs_slot:
        module = _OneInput(view, lambda tokens: view.block(index, tokens, 0))
    else:
        inputs["slot"] = torch.zeros(2, dtype=torch.int64)
        module = _TwoInputs(view, lambda tokens, slot: view.block(index, tokens, slot + folded if folded else slot))
    return ExportTarget(f"block {index}", module.eval(), inputs, "tokens_out")


def head_target(parts: PartsView) -> ExportTarget:
    """Return the export target of the head, including blocks that are folded into it."""
    alone = parts.alone(HEAD)
    module = _OneInput(alone.view, alone.head)
    return ExportTarget("head", module.eval(), {"tokens": _tokens(parts.view)}, "logits")


def _tokens(view: BlockView) -> Tensor:
    return torch.zeros(2, view.token_spec.count, view.token_spec.dim)


def ends_of(bands: Bands) -> Folded:
    """Return the bands that ``--fold-ends`` folds: the first and the last one, if smaller than the largest band.

    Raise :class:`UsageError` if neither is.
    """
    sizes = list(map(len, bands.groups))
    most = max(sizes)
    folded = Folded(sizes[0] if sizes[0] < most else 0, sizes[-1] if sizes[-1] < most else 0)
    if folded == NOT_FOLDED:
        raise UsageError(
            f"--fold-ends needs a first or last band that is smaller than the largest, and the bands are {bands}; "
            "leave it out, or give other bands with --bands"
        )
    return folded
