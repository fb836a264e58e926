"""What some methods add to the blocks: knowledge of the slot, or a guess at it.

Slots count the blocks that ran before (``ls_edge.arrangement``). A :class:`SlotModule` runs with the block wherever
the model goes, and is exported with it; a :class:`Readout` only trains and measures, and is dropped at export.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]


class SlotModule(nn.Module):
    """Tells a block its slot: called with the block instead of it."""

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run: Run) -> Tensor:
        """Tokens ``[B, N, D]`` after block ``index``, which ``run`` runs; ``slot`` is an int or int64 ``[B]``."""
        raise NotImplementedError


class Position(SlotModule):
    """LayerShuffle-position (arXiv 2407.04513, section 3.2): a slot embedding joined to each token ahead of a block.

    ``x + Dropout(GELU(Linear(LN([x; e_slot]))))``, the embedding shared by all blocks, the rest a block's own.
    """

    def __init__(self, blocks: int, dim: int, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.project = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim + width), nn.Linear(dim + width, dim), nn.GELU(), nn.Dropout(dropout))
            for _ in range(blocks)
        )
        self.embed = nn.Embedding(blocks, width)

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run: Run) -> Tensor:
        """See the class."""
        if isinstance(slot, Tensor):
            known = self.embed(slot)[:, None, :]
        else:
            known = self.embed.weight[slot][None, None, :]
        joined = torch.cat((tokens, known.to(tokens.dtype).expand(tokens.shape[0], tokens.shape[1], -1)), dim=-1)
        return run(tokens + self.project[index](joined))


class Readout(nn.Module):
    """LayerShuffle-predict (arXiv 2407.04513, section 3.3): each block guesses its slot from its mean output token."""

    def __init__(self, blocks: int, dim: int) -> None:
        super().__init__()
        self.guess = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, blocks)) for _ in range(blocks))

    def forward(self, index: int, tokens: Tensor) -> Tensor:
        """Tokens ``[B, N, D]`` after block ``index`` to logits ``[B, L]`` over slots."""
        logits: Tensor = self.guess[index](tokens.mean(dim=1))
        return logits
