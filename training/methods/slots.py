"""Modules that methods add to the blocks: a slot embedding, and a predictor of the slot.

The slot of a block is the number of blocks that ran before it (``ls_edge.arrangement``). A :class:`SlotModule` runs
with the block wherever the model goes and is exported with it; a :class:`PositionPredictor` is only used in training
and evaluation and dropped at export.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class SlotModule(nn.Module):
    """Runs a block together with its slot."""

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens ``[B, N, D]`` after block ``index``, run by ``run_block``; ``slot`` is an int or int64 ``[B]``."""
        raise NotImplementedError

    def elementwise_flops(self, count: int, dim: int) -> int:  # noqa: ARG002
        """Operations that it adds to a block element by element, for one image of ``count`` tokens of ``dim``."""
        return 0


class SlotEmbedding(SlotModule):
    """LayerShuffle-position (arXiv 2407.04513, section 3.2): a slot embedding joined to each token before a block.

    ``x + Dropout(GELU(Linear(LN([x; e_slot]))))``; the embedding is shared by all blocks, the rest is per block.
    """

    def __init__(self, num_blocks: int, dim: int, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.project = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim + width), nn.Linear(dim + width, dim), nn.GELU(), nn.Dropout(dropout))
            for _ in range(num_blocks)
        )
        self.embed = nn.Embedding(num_blocks, width)

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[[Tensor], Tensor]) -> Tensor:
        """See the class."""
        if isinstance(slot, Tensor):
            embedding = self.embed(slot)[:, None, :]
        else:
            embedding = self.embed.weight[slot][None, None, :]
        joined = torch.cat((tokens, embedding.to(tokens.dtype).expand(tokens.shape[0], tokens.shape[1], -1)), dim=-1)
        return run_block(tokens + self.project[index](joined))


class PositionPredictor(nn.Module):
    """LayerShuffle-predict (arXiv 2407.04513, section 3.3): each block's slot from its mean output token."""

    def __init__(self, num_blocks: int, dim: int) -> None:
        super().__init__()
        self.guess = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_blocks)) for _ in range(num_blocks)
        )

    def forward(self, index: int, tokens: Tensor) -> Tensor:
        """Tokens ``[B, N, D]`` after block ``index`` to logits ``[B, L]`` over slots."""
        logits: Tensor = self.guess[index](tokens.mean(dim=1))
        return logits
