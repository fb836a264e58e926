"""Modules that methods add to the blocks: slot conditioning, a slot embedding, and a slot predictor.

The slot of a block is the number of blocks that ran before it (``ls_edge.core.arrangement``). A :class:`SlotModule`
always runs with its block and is exported with it. A :class:`PositionPredictor` is used only in training and
evaluation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ls_edge.core.errors import UsageError

NEGLIGIBLE = 1e-6
"""Size of factors, relative to a layer's norm, below which they are rounding errors without a meaningful direction."""
ROUNDS = 3
"""Number of adapter fits; with a single one, a ViT-S with rank 32 has 0.51 instead of 0.59 before training."""
RIDGE = 1e-6
"""Regularization of the shared weights relative to the mean moment, for directions that no input has."""
OVERSAMPLING = 16
"""Number of additional directions in the randomized decomposition (arXiv 0909.4061, section 4.2)."""


class SlotModule(nn.Module):
    """Base class of modules that run a block depending on its slot."""

    lr_factor: float | None = None
    """Learning rate relative to the model's, without weight decay; None for the settings of the model."""
    is_uniform: bool = True
    """Whether every block has the same modules, so that blocks differ only in their weights."""

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[..., Tensor]) -> Tensor:
        """Return tokens ``[B, N, D]`` after ``run_block`` ran block ``index``; ``slot`` is an int or int64 ``[B]``."""
        raise NotImplementedError

    def runner(self, index: int, block: nn.Module) -> Callable[..., Tensor]:  # noqa: ARG002
        """Return the callable that :meth:`forward` calls to run block ``index``, and that training compiles."""
        return block


@dataclass(frozen=True)
class Branch:
    """A residual branch of a block, ``x + layer(norm(x))``, by the names of its modules."""

    norm: str
    layer: str
    scale: str = ""
    """Parameter that scales the branch (LayerScale, arXiv 2103.17239), which blocks may lack."""
    channels_first: bool = False
    """Whether ``layer`` returns ``[B, D, N]``, as layers that mix tokens do, instead of ``[B, N, D]``."""


class SlotNorms(SlotModule):
    """Slot conditioning of each block: scale and shift of each norm, and a gate on each residual branch.

    ``x + (1 + gate) * layer((1 + scale) * norm(x) + shift)``, with one vector of each per block, slot, and branch, as
    in FiLM (arXiv 1709.07871) and the adaptive norms of DiT (arXiv 2212.09748, section 3.2). With a ``rank``, each
    linear layer of a branch also has one low-rank adapter per slot, ``W x + b + up (down x) + bias`` (LoRA, arXiv
    2106.09685; for layers that share their weights, arXiv 2410.20672). Vectors, ``up``, and ``bias`` are initially
    zero, so a block computes the same as without them. Hooks on the block's modules apply them, so timm's forward is
    unchanged, and each block still compiles and exports separately.
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
        """Attach to ``blocks``, or to those whose indices are in ``only``; there are as many slots as blocks.

        A block in several places has a single table. Raise :class:`UsageError` for a ``rank`` above the width of all
        linear layers.
        """
        super().__init__()
        self.lr_factor = lr_factor
        chosen = range(len(blocks)) if only is None else sorted(only)
        modules = list(dict.fromkeys(blocks[index] for index in chosen))
        self.is_uniform = len(modules) == len(blocks)
        self._table_of = {index: modules.index(blocks[index]) for index in chosen}
        self._branches = tuple(branches)
        self.tables = nn.ParameterList(torch.zeros(len(blocks), len(branches), 3, dim) for _ in modules)
        self.adapters = nn.ModuleList(SlotAdapters(block, branches, len(blocks), rank) for block in modules if rank)
        self._running = [_Running(block) for block in modules]
        for running in self._running:
            for number, branch in enumerate(branches):
                norm, layer = (running.block.get_submodule(name) for name in (branch.norm, branch.layer))
                norm.register_forward_hook(functools.partial(_modulate, running, number))
                layer.register_forward_hook(functools.partial(_gate, running, number, branch.channels_first))
        for running, adapters in zip(self._running, self.adapters, strict=False):
            names: Any = adapters.layers
            for number, name in enumerate(names):
                running.block.get_submodule(name).register_forward_hook(functools.partial(_adapt, running, number))

    @torch.no_grad()
    def imitate(self, index: int, blocks: Mapping[int, nn.Module], images: Callable[[], None]) -> None:
        """Make block ``index`` approximate, at each slot in ``blocks``, the given block.

        Norms, scales of branches, and biases become equal; linear layers become as close as the rank allows
        (:meth:`SlotAdapters.imitate`). ``images`` runs ``blocks`` on examples.
        """
        number = self._table_of[index]
        block, table = self._running[number].block, self.tables[number]
        own = dict(block.named_parameters())
        for branch, names in enumerate(map(_conditioned, self._branches)):
            for row, (choices, neutral) in enumerate(zip(names, (1.0, 0.0, 1.0), strict=True)):
                for name in filter(own.__contains__, choices):
                    own[name].fill_(neutral)
                    for slot, wanted in blocks.items():
                        table[slot, branch, row] = wanted.get_parameter(name).flatten() - neutral
        if len(self.adapters):
            cast(SlotAdapters, self.adapters[number]).imitate(block, blocks, images)

    def forward(self, index: int, tokens: Tensor, slot: int | Tensor, run_block: Callable[..., Tensor]) -> Tensor:
        """Run block ``index`` with the vectors and matrices of its slot."""
        if index not in self._table_of:
            return run_block(tokens)
        number = self._table_of[index]
        adapters: Any = self.adapters[number] if len(self.adapters) else None
        tables = [self.tables[number], *([] if adapters is None else adapters.tables())]
        vectors, *matrices = (t.index_select(0, slot) if isinstance(slot, Tensor) else t[slot] for t in tables)
        return run_block(tokens, vectors.unsqueeze(-2), *matrices)

    def runner(self, index: int, block: nn.Module) -> Callable[..., Tensor]:
        """Return the hooked block, which also takes vectors ``[branches, 3, 1, D]`` or ``[B, branches, 3, 1, D]``.

        The vectors are followed by the adapters' matrices ``[rank, in]``, ``[out, rank]``, and ``[1, out]`` of each
        layer, or a batch of these.
        """
        return self._running[self._table_of[index]].run if index in self._table_of else block


def _conditioned(branch: Branch) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the parameters that scale, shift, and gate replace; timm's ``Affine`` has different names."""
    norm = branch.norm
    return (f"{norm}.weight", f"{norm}.alpha"), (f"{norm}.bias", f"{norm}.beta"), (branch.scale,)


class SlotAdapters(nn.Module):
    """A pair of low-rank matrices and a bias per slot for each linear layer in a block's residual branches."""

    def __init__(self, block: nn.Module, branches: Sequence[Branch], slots: int, rank: int) -> None:
        """Draw ``down`` and zero the others; raise :class:`UsageError` for a rank above the width of all layers."""
        super().__init__()
        _call_layers(block)
        found = {
            f"{branch.layer}.{name}" if name else branch.layer: module
            for branch in branches
            for name, module in block.get_submodule(branch.layer).named_modules()
            if isinstance(module, nn.Linear)
        }
        self.layers = tuple(found)
        """Names of the linear layers in the block."""
        widest = max((min(layer.in_features, layer.out_features) for layer in found.values()), default=0)
        if rank > widest:
            raise UsageError(f"adapter_rank is {rank}; the linear layers of a block allow at most {widest}")
        self.down = nn.ParameterList(
            torch.randn(slots, rank, layer.in_features) / layer.in_features**0.5 for layer in found.values()
        )
        self.up = nn.ParameterList(torch.zeros(slots, layer.out_features, rank) for layer in found.values())
        self.bias = nn.ParameterList(torch.zeros(slots, 1, layer.out_features) for layer in found.values())

    def tables(self) -> list[Tensor]:
        """Return ``down [slots, rank, in]``, ``up [slots, out, rank]``, and ``bias [slots, 1, out]`` of each layer."""
        return [table for group in zip(self.down, self.up, self.bias, strict=True) for table in group]

    def imitate(self, block: nn.Module, wanted: Mapping[int, nn.Module], images: Callable[[], None]) -> None:
        """Fit the weights of ``block`` and the adapters to the outputs of the layers of ``wanted`` at each slot.

        For a difference ``D`` of weights and inputs with second moments ``C``, the best adapter of a rank projects
        ``D`` onto the leading eigenvectors of ``D C D'``; the best shared weights given the adapters are a
        least-squares solution. Both steps alternate. A decomposition of ``D`` alone (arXiv 2410.20672, section 3) would
        ignore that the tokens of a trained model have few directions.
        """
        for other in wanted.values():
            _call_layers(other)
        for number, name in enumerate(self.layers):
            others = {slot: item.get_submodule(name) for slot, item in wanted.items()}
            self._fit(number, block.get_submodule(name), others, _second_moments(others, images))
            own_bias = _bias(block, name)
            if own_bias is not None:
                for slot, item in wanted.items():
                    self.bias[number][slot, 0] = cast(Tensor, _bias(item, name)) - own_bias

    def _fit(
        self, number: int, layer: nn.Module, wanted: Mapping[int, nn.Module], moments: Mapping[int, Tensor]
    ) -> None:
        down, up, weight = self.down[number], self.up[number], layer.get_parameter("weight")
        targets = {slot: item.get_parameter("weight") for slot, item in wanted.items()}
        for rounds_left in reversed(range(ROUNDS)):
            for slot, target in targets.items():
                _project(target - weight, moments[slot], down[slot], up[slot])
            if rounds_left:
                rest = sum((targets[slot] - up[slot] @ down[slot]) @ moments[slot] for slot in targets)
                total = cast(Tensor, sum(moments.values()))
                ridge = RIDGE * total.trace() / len(total) * torch.eye(len(total), device=total.device)
                weight.copy_(torch.linalg.solve(total + ridge, rest + weight @ ridge, left=False))


def _call_layers(block: nn.Module) -> None:
    """Make the attention of BEiT and EVA call its layer ``qkv``; otherwise it uses the weights, and no hook runs."""
    attention: Any
    for attention in block.modules():
        if hasattr(attention, "qkv_bias_separate"):
            attention.qkv_bias_separate = True


def _bias(block: nn.Module, name: str) -> Tensor | None:
    """Return the bias of a linear layer, which the attention of BEiT and EVA holds in three parts next to ``qkv``."""
    attention: Any = block.get_submodule(name.rpartition(".")[0])
    if name.endswith(".qkv") and getattr(attention, "q_bias", None) is not None:
        return torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
    return getattr(block.get_submodule(name), "bias", None)


def _second_moments(layers: Mapping[int, nn.Module], images: Callable[[], None]) -> dict[int, Tensor]:
    """Return the second moments ``[in, in]`` of the layers' inputs, with trace 1 to give all slots the same weight."""
    sums: dict[int, Tensor] = {}

    def add(slot: int, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).float()
        sums[slot] = sums.get(slot, torch.zeros((), device=rows.device)) + rows.mT @ rows

    hooks = [layer.register_forward_pre_hook(functools.partial(add, slot)) for slot, layer in layers.items()]
    try:
        images()
    finally:
        for hook in hooks:
            hook.remove()
    return {slot: value / value.trace() for slot, value in sums.items()}


def _project(difference: Tensor, moments: Tensor, down: Tensor, up: Tensor) -> None:
    """Set ``up @ down`` to the best approximation of ``difference`` for inputs with these moments."""
    rank = min(down.shape[0], *difference.shape)
    extra = min(rank + OVERSAMPLING, *difference.shape)
    leading = torch.svd_lowrank(difference @ moments @ difference.mT, q=extra, niter=4)[0][:, :rank]
    rows = leading.mT @ difference
    sizes = rows.norm(dim=1)
    some = sizes > NEGLIGIBLE * difference.norm()  # if both factors were zero, they would get no gradient
    roots = sizes[some].sqrt()
    up.zero_()
    up[:, :rank][:, some] = leading[:, some] * roots
    down[:rank][some] = rows[some] / roots[:, None]


class _Running:
    """A block with the vectors and matrices for its hooks, which are set only while the block runs."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.vectors: Tensor | None = None
        self.matrices: tuple[Tensor, ...] = ()

    def run(self, tokens: Tensor, vectors: Tensor, *matrices: Tensor, **inputs: Tensor) -> Tensor:
        # When this is compiled, the graph contains both the arguments and the attributes that the hooks read.
        self.vectors, self.matrices = vectors, matrices
        try:
            out: Tensor = self.block(tokens, **inputs)
        finally:
            self.vectors, self.matrices = None, ()
        return out


# The hooks are partials of functions, so that copying a model copies their _Running along with the block.
def _modulate(running: _Running, branch: int, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
    if running.vectors is None:
        return out
    scale, shift, _ = running.vectors[..., branch, :, :, :].to(out.dtype).unbind(-3)
    return out * (1 + scale) + shift


def _gate(
    running: _Running, branch: int, channels_first: bool, _module: nn.Module, _inputs: Any, out: Tensor
) -> Tensor:
    if running.vectors is None:
        return out
    gate = running.vectors[..., branch, 2, :, :].to(out.dtype)
    return out * (1 + (gate.transpose(-1, -2) if channels_first else gate))


def _adapt(running: _Running, layer: int, _module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    if not running.matrices:
        return out
    matrices = running.matrices[3 * layer : 3 * layer + 3]
    for _ in range(inputs[0].ndim - 3):  # layers over pairs of tokens (CaiT) take [B, N, N, in]
        matrices = tuple(matrix.unsqueeze(-3) for matrix in matrices)
    down, up, bias = matrices
    return out + (inputs[0] @ down.mT) @ up.mT + bias.to(out.dtype)


class SlotEmbedding(SlotModule):
    """LayerShuffle-position (arXiv 2407.04513, section 3.2): a slot embedding appended to each token before a block.

    ``x + Dropout(GELU(Linear(LN([x; e_slot]))))`` with one projection per block. All blocks share the embedding ``e``
    unless ``per_block`` is set. It is initially zero, as in the paper's reference code.
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
        """Add the projected embedding of the slot, then run the block."""
        table: Any = self.embed[index] if isinstance(self.embed, nn.ModuleList) else self.embed
        embedding = table(slot)[:, None, :] if isinstance(slot, Tensor) else table.weight[slot][None, None, :]
        joined = torch.cat((tokens, embedding.to(tokens.dtype).expand(tokens.shape[0], tokens.shape[1], -1)), dim=-1)
        return run_block(tokens + self.project[index](joined))


def _zero_embedding(num_slots: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(num_slots, width)
    nn.init.zeros_(embedding.weight)
    return embedding


class PositionPredictor(nn.Module):
    """LayerShuffle-predict (arXiv 2407.04513, section 3.3): prediction of a block's slot from its mean output token."""

    def __init__(self, num_blocks: int, dim: int) -> None:
        super().__init__()
        self.guess = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_blocks)) for _ in range(num_blocks)
        )

    def forward(self, index: int, tokens: Tensor) -> Tensor:
        """Return logits ``[B, L]`` over slots from the tokens ``[B, N, D]`` after block ``index``."""
        return self.guess[index](tokens.mean(dim=1))
