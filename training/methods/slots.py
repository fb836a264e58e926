"""Modules that methods add to the blocks: conditioning on the slot, a slot embedding, and a predictor of the slot.

The slot of a block is the number of blocks that ran before it (``ls_edge.core.arrangement``). A :class:`SlotModule`
runs
with the block wherever the model goes and is exported with it; a :class:`PositionPredictor` is only used in training
and evaluation and dropped at export.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ls_edge.core.errors import UsageError

NEGLIGIBLE = 1e-6
"""Singular values below this share of a layer's norm are rounding errors; their direction means nothing."""


class SlotModule(nn.Module):
    """Runs a block together with its slot."""

    lr_factor: float | None = None
    """Learning rate of its parameters over that of the model's, without weight decay; None: trained as the model's."""

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[..., Tensor]) -> Tensor:
        """Tokens ``[B, N, D]`` after block ``index``, run by ``run_block``; ``slot`` is an int or int64 ``[B]``."""
        raise NotImplementedError

    def runner(self, index: int, block: nn.Module) -> Callable[..., Tensor]:  # noqa: ARG002
        """What :meth:`forward` runs block ``index`` with; it is what is compiled."""
        return block

    @property
    def is_uniform(self) -> bool:
        """Whether it is made of the same modules for every block, so that blocks differ in weights only."""
        return True

    def elementwise_flops(self, count: int, dim: int) -> int:  # noqa: ARG002
        """Operations that it adds to a block element by element, for one image of ``count`` tokens of ``dim``."""
        return 0


@dataclass(frozen=True)
class Branch:
    """A residual branch of a block, ``x + layer(norm(x))``, by the names of its modules."""

    norm: str
    layer: str
    channels_first: bool = False
    """Whether ``layer`` gives ``[B, D, N]``, as one that mixes tokens does, instead of ``[B, N, D]``."""


class SlotNorms(SlotModule):
    """Conditioning of each block on its slot: scale and shift of each norm, and a gate on each residual branch.

    ``x + (1 + gate) * layer((1 + scale) * norm(x) + shift)``, a vector of each for every block, slot and branch, as in
    FiLM (arXiv 1709.07871) and the adaptive norms of DiT (arXiv 2212.09748, section 3.2). With a ``rank`` each linear
    layer of a branch has for every slot a low-rank adapter besides, ``W x + b + up (down x)`` (LoRA, arXiv 2106.09685;
    for layers that share their weights arXiv 2410.20672). Vectors and ``up`` start at zero, where a block computes the
    same as without them. They are applied by hooks on the block's own modules, so that timm's forward stays as it is
    and each block compiles and exports by itself.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        branches: Sequence[Branch],
        dim: int,
        lr_factor: float = 1.0,
        only: Collection[int] | None = None,
        rank: int = 0,
    ) -> None:
        """Hook ``blocks``, or those whose indices are in ``only``; there are as many slots as blocks.

        One block in several places has one table. Parameters are on the CPU. Raises :class:`UsageError` for a ``rank``
        above the width of a linear layer.
        """
        super().__init__()
        self.lr_factor = lr_factor
        chosen = range(len(blocks)) if only is None else sorted(only)
        modules = list(dict.fromkeys(blocks[index] for index in chosen))
        self._table_of = {index: modules.index(blocks[index]) for index in chosen}
        self.tables = nn.ParameterList(torch.zeros(len(blocks), len(branches), 3, dim) for _ in modules)
        self.adapters = nn.ModuleList(SlotAdapters(block, branches, len(blocks), rank) for block in modules if rank)
        self._runners = []
        for block in modules:
            running = _Running(block)
            self._runners.append(running)
            for number, branch in enumerate(branches):
                block.get_submodule(branch.norm).register_forward_hook(_ModulateNorm(running, number))
                gate = _GateBranch(running, number, branch.channels_first)
                block.get_submodule(branch.layer).register_forward_hook(gate)
        for running, adapters in zip(self._runners, self.adapters, strict=False):
            assert isinstance(adapters, SlotAdapters)
            for number, name in enumerate(adapters.layers):
                running.block.get_submodule(name).register_forward_hook(_AdaptLinear(running, number))

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[..., Tensor]) -> Tensor:
        """See the class."""
        if index not in self._table_of:
            return run_block(tokens)
        number = self._table_of[index]
        tables = [self.tables[number]]
        if len(self.adapters):
            adapters = self.adapters[number]
            assert isinstance(adapters, SlotAdapters)
            tables += adapters.tables()
        vectors, *matrices = (t.index_select(0, slot) if isinstance(slot, Tensor) else t[slot] for t in tables)
        return run_block(tokens, vectors.unsqueeze(-2), *matrices)

    def runner(self, index: int, block: nn.Module) -> Callable[..., Tensor]:
        """The hooked block, called with the vectors ``[branches, 3, 1, D]`` or ``[B, branches, 3, 1, D]`` too.

        After them come the adapters' matrices, ``[rank, in]`` and ``[out, rank]`` or a batch of them, a pair a layer.
        """
        return self._runners[self._table_of[index]].run if index in self._table_of else block

    @property
    def is_uniform(self) -> bool:
        """Whether every block has a table, none of them another's."""
        return len(self.tables) == int(self.tables[0].shape[0])

    def elementwise_flops(self, count: int, dim: int) -> int:
        """A product and a sum at each norm, a product at each branch's end."""
        return int(self.tables[0].shape[1]) * 3 * count * dim


class SlotAdapters(nn.Module):
    """For every slot a pair of low-rank matrices for each linear layer in a block's residual branches."""

    def __init__(self, block: nn.Module, branches: Sequence[Branch], slots: int, rank: int) -> None:
        """``down`` is random and ``up`` zero; raises :class:`UsageError` for a rank that no layer has room for."""
        super().__init__()
        found = {
            f"{branch.layer}.{name}" if name else branch.layer: module
            for branch in branches
            for name, module in block.get_submodule(branch.layer).named_modules()
            if isinstance(module, nn.Linear)
        }
        self.layers = tuple(found)
        """Names of the linear layers, in the block."""
        widest = max((min(layer.in_features, layer.out_features) for layer in found.values()), default=0)
        if rank > widest:
            raise UsageError(f"adapter_rank is {rank}; the linear layers of a block have room for {widest} at most")
        self.down = nn.ParameterList(
            torch.randn(slots, rank, layer.in_features) / layer.in_features**0.5 for layer in found.values()
        )
        self.up = nn.ParameterList(torch.zeros(slots, layer.out_features, rank) for layer in found.values())

    def tables(self) -> list[Tensor]:
        """``down`` ``[slots, rank, in]`` and ``up`` ``[slots, out, rank]`` of each layer, in turns."""
        return [table for pair in zip(self.down, self.up, strict=True) for table in pair]

    @torch.no_grad()
    def approximate(self, slot: int, block: nn.Module, wanted: nn.Module) -> None:
        """Bring the layers of ``block`` at a slot as close to those of ``wanted`` as the rank allows.

        The truncated singular value decomposition of the difference of the weights (arXiv 2410.20672, section 3).
        """
        for name, down, up in zip(self.layers, self.down, self.up, strict=True):
            weight, target = (module.get_submodule(name).get_parameter("weight") for module in (block, wanted))
            left, values, right = torch.linalg.svd((target - weight).double(), full_matrices=False)
            rank = min(down.shape[1], len(values))
            roots = values[:rank].sqrt()
            up[slot, :, :rank] = left[:, :rank] * roots
            some = values[:rank] > NEGLIGIBLE * weight.norm()  # two zero factors would have no gradient
            down[slot, :rank][some] = (roots[:, None] * right[:rank])[some].to(down.dtype)


class _Running:
    """A block with the vectors and matrices for its hooks; None while it does not run."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.vectors: Tensor | None = None
        self.matrices: tuple[Tensor, ...] = ()

    def run(self, tokens: Tensor, vectors: Tensor, *matrices: Tensor, **inputs: Tensor) -> Tensor:
        """They are arguments, and read from the attributes within one graph when this is compiled."""
        self.vectors, self.matrices = vectors, matrices
        try:
            out: Tensor = self.block(tokens, **inputs)
        finally:
            self.vectors, self.matrices = None, ()
        return out


class _ModulateNorm:
    """Forward hook of a norm."""

    def __init__(self, running: _Running, branch: int) -> None:
        self._running, self._branch = running, branch

    def __call__(self, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        vectors = self._running.vectors
        if vectors is None:
            return out
        scale, shift, _ = vectors[..., self._branch, :, :, :].to(out.dtype).unbind(-3)
        return out * (1 + scale) + shift


class _GateBranch:
    """Forward hook of the layer of a residual branch."""

    def __init__(self, running: _Running, branch: int, channels_first: bool) -> None:
        self._running, self._branch, self._channels_first = running, branch, channels_first

    def __call__(self, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        vectors = self._running.vectors
        if vectors is None:
            return out
        gate = vectors[..., self._branch, 2, :, :].to(out.dtype)
        return out * (1 + (gate.transpose(-1, -2) if self._channels_first else gate))


class _AdaptLinear:
    """Forward hook of a linear layer."""

    def __init__(self, running: _Running, layer: int) -> None:
        self._running, self._layer = running, layer

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        matrices = self._running.matrices
        if not matrices:
            return out
        down, up = matrices[2 * self._layer : 2 * self._layer + 2]
        return out + (inputs[0] @ down.mT) @ up.mT


class SlotEmbedding(SlotModule):
    """LayerShuffle-position (arXiv 2407.04513, section 3.2): a slot embedding joined to each token before a block.

    ``x + Dropout(GELU(Linear(LN([x; e_slot]))))``; the projection is each block's own. The embedding ``e`` is shared by
    all blocks and starts at zero, both as in the paper's reference code, or with ``per_block`` each block's own.
    """

    def __init__(
        self, num_blocks: int, dim: int, width: int = 32, dropout: float = 0.1, *, per_block: bool = False
    ) -> None:
        super().__init__()
        self.project = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim + width), nn.Linear(dim + width, dim), nn.GELU(), nn.Dropout(dropout))
            for _ in range(num_blocks)
        )
        self.embed: nn.Embedding | nn.ModuleList = (
            nn.ModuleList(_zero_embedding(num_blocks, width) for _ in range(num_blocks))
            if per_block
            else _zero_embedding(num_blocks, width)
        )

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[..., Tensor]) -> Tensor:
        """See the class."""
        table = self.embed[index] if isinstance(self.embed, nn.ModuleList) else self.embed
        assert isinstance(table, nn.Embedding)
        if isinstance(slot, Tensor):
            embedding = table(slot)[:, None, :]
        else:
            embedding = table.weight[slot][None, None, :]
        joined = torch.cat((tokens, embedding.to(tokens.dtype).expand(tokens.shape[0], tokens.shape[1], -1)), dim=-1)
        return run_block(tokens + self.project[index](joined))


def _zero_embedding(num_slots: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(num_slots, width)
    nn.init.zeros_(embedding.weight)
    return embedding


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
