"""One view over a timm model: ``stem``, ``block(i)``, ``head``, and ``forward`` in any arrangement.

A view of a plain model has no parameters of its own: in trained order it computes exactly what timm's forward computes,
with the same operations. Parameters keep timm's names (:meth:`BlockView.weights`), so a checkpoint
can be read by timm. A training method may add modules: :attr:`BlockView.slots`, which runs with each block, and
:attr:`BlockView.predictor`, which reads tokens; their parameters are named ``method....``.

Orders are Python ints on purpose: an order in a CUDA tensor costs a synchronisation a block. :meth:`compile_blocks`
compiles each block by itself, one graph for every order; compiling the whole would make a graph an order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bundle import TokenSpec
from ls_edge.core.errors import ModelError
from ls_edge.training.methods.slots import Branch, PositionPredictor, SlotModule
from ls_edge.training.methods.step_plan import WorkProfile
from ls_edge.training.models.families import Family, evenly_spaced, family_of, shape_of_tokens
from ls_edge.training.models.flops import count_flops, evaluation_mode

METHOD = "method."
"""What the names of a method's own parameters begin with, in :meth:`BlockView.weights`."""


class BlockView(nn.Module):
    """A timm model as stem, blocks and head; make one with :meth:`of`."""

    def __init__(self, model: nn.Module, family: Family, tokens: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._tokens = tokens
        self._blocks: list[nn.Module] = []
        self._owners: tuple[int, ...] = ()
        self._find_blocks()
        self.slots: SlotModule | None = None
        self.predictor: PositionPredictor | None = None
        self.checkpointing = False
        """Whether training computes a block again for its gradients instead of keeping what is inside."""
        self._compiled: list[Callable[..., Tensor]] | None = None
        self._work: tuple[tuple[Any, ...], WorkProfile] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> BlockView:
        """Wrap ``model``; raises :class:`ModelError` if it is not made of a stem, equal blocks and a head."""
        family = family_of(model)
        return cls(model, family, shape_of_tokens(family, model))

    def _find_blocks(self) -> None:
        self._blocks = list(self._family.blocks(self.model))
        first: dict[nn.Module, int] = {}
        self._owners = tuple(first.setdefault(block, index) for index, block in enumerate(self._blocks))

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return len(self._blocks)

    @property
    def owners(self) -> tuple[int, ...]:
        """For each block the first one with the same weights: itself, where no two blocks share theirs."""
        return self._owners

    @property
    def shares_weights(self) -> bool:
        """Whether some blocks have one set of weights."""
        return len(set(self._owners)) < self.num_blocks

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks in trained order."""
        return nn.ModuleList(self._blocks)

    @property
    def needs_slot(self) -> bool:
        """Whether a block takes the number of blocks that ran before it as an input."""
        return self.slots is not None

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The residual branches of a block; raises :class:`ModelError` for a block that is made otherwise."""
        return self._family.branches(self.model)

    @property
    def token_spec(self) -> TokenSpec:
        """Shape of the tokens between blocks."""
        return TokenSpec(count=self._tokens[0], dim=self._tokens[1])

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images, in pixels."""
        return self._family.image_size(self.model)

    @property
    def num_classes(self) -> int:
        """Length of the logits."""
        return int(getattr(self.model, "num_classes", 0))

    @property
    def classifier(self) -> frozenset[str]:
        """Names of the parameters whose shape follows the number of classes."""
        return self._family.classifier(self.model)

    @property
    def work(self) -> WorkProfile:
        """Operations of stem, block, head and the method's modules; counted once for each set of modules."""
        modules = (self.num_blocks, type(self.slots), type(self.predictor))
        if self._work is None or self._work[0] != modules:
            self._work = modules, self._count_work()
        return self._work[1]

    def _count_work(self) -> WorkProfile:
        with evaluation_mode(self), torch.autocast(self.device.type, enabled=False):
            images = torch.zeros(1, 3, *self.image_size, device=self.device)
            stem, tokens = count_flops(lambda: self.stem(images))
            head, _ = count_flops(lambda: self.head(tokens))
            block, _ = count_flops(lambda: self._blocks[0](tokens, **self._family.block_inputs(self.model, 0)))
            added = 0
            if self.slots is not None:
                index = max(self._owners, key=self._owners.count)  # a method may add to blocks in several places only
                added += count_flops(lambda: self._run(index, tokens, index))[0] - block
                added += self.slots.elementwise_flops(*tokens.shape[1:])
            if self.predictor is not None:
                predictor = self.predictor
                added += count_flops(lambda: predictor(0, tokens))[0]
        return WorkProfile(num_blocks=self.num_blocks, stem=stem, block=block, head=head, added=added)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def stem(self, images: Tensor) -> Tensor:
        """Images ``[B, 3, H, W]``, normalised, to tokens ``[B, N, D]``."""
        return self._family.stem(self.model, images)

    def block(self, index: int, tokens: Tensor, slot: int | Tensor = 0) -> Tensor:
        """Run block ``index`` on tokens ``[B, N, D]``; ``slot``, int or int64 ``[B]``, if :attr:`needs_slot`."""
        if self.checkpointing and self.training and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._run, index, tokens, slot, use_reentrant=False)
            return out
        return self._run(index, tokens, slot)

    def _run(self, index: int, tokens: Tensor, slot: int | Tensor) -> Tensor:
        run = self._compiled[index] if self._compiled is not None and self.training else self._runner(index)
        inputs = self._family.block_inputs(self.model, self._owners[index])
        if self.slots is None:
            return run(tokens, **inputs)
        after: Tensor = self.slots(index, tokens, slot, lambda *before: run(*before, **inputs))
        return after

    def _runner(self, index: int) -> Callable[..., Tensor]:
        return self._blocks[index] if self.slots is None else self.slots.runner(index, self._blocks[index])

    def head(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, N, D]`` to logits ``[B, C]``."""
        return self._family.head(self.model, tokens)

    def forward(self, images: Tensor, arrangement: Arrangement | Sequence[int] | None = None) -> Tensor:
        """Images ``[B, 3, H, W]`` to logits ``[B, C]``; trained order where no arrangement is given."""
        return self.head(apply(self.arrangement(arrangement), self.stem(images), self.block))

    def arrangement(self, value: Arrangement | Sequence[int] | None) -> Arrangement:
        """Read ``forward``'s argument; raises :class:`ModelError` for a block that the model lacks."""
        if value is None:
            return Arrangement.plain(range(self.num_blocks))
        found = value if isinstance(value, Arrangement) else Arrangement.plain(value)
        if found.order and max(found.order) >= self.num_blocks:
            raise ModelError(
                f"block {max(found.order)} is not there: the model has blocks 0 to {self.num_blocks - 1}; "
                "name only those"
            )
        return found

    def keep(self, depth: int) -> list[int]:
        """Keep ``depth`` of the blocks, evenly spaced (arXiv 2407.04513, refined models), and return which."""
        kept = evenly_spaced(self.num_blocks, depth)
        self.keep_blocks(kept)
        return kept

    def keep_blocks(self, indices: Sequence[int]) -> None:
        """Keep exactly these blocks, in this order; one that is named several times is one block in several places."""
        self._family.keep(self.model, indices)
        self._find_blocks()
        self._compiled = None

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile each block by itself, for training; the graphs are shared by all orders.

        Raises torch's limit of graphs for one function: blocks whose settings differ (drop path) have one each.
        """
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, self.num_blocks + 8)
        dynamo.optimize_ddp = False  # would split a block's graph at DDP's buckets, which are larger than a block
        self._compiled = [
            torch.compile(self._runner(index), dynamic=False, backend=backend) for index in range(self.num_blocks)
        ]

    def weights(self) -> dict[str, Tensor]:
        """All parameters and buffers under timm's names, the method's under ``method.``.

        Weights that blocks share stand there once, under the name of the first block that has them.
        """
        state = self.model.state_dict()
        if self.shares_weights:
            names: dict[int, str] = {}
            for name, value in self.model.state_dict(keep_vars=True).items():
                names.setdefault(id(value), name)
            state = {name: state[name] for name in names.values()}
        return {**state, **self._method_weights()}

    def _method_weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        modules: dict[str, nn.Module | None] = {"slots": self.slots, "readout": self.predictor}  # names in checkpoints
        for name, module in modules.items():
            if module is not None:
                found |= {f"{METHOD}{name}.{key}": value for key, value in module.state_dict().items()}
        return found

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load exactly these weights; raises :class:`ModelError` naming the first that does not fit."""
        own = self.weights()
        for name, value in own.items():
            if name not in weights:
                raise ModelError(f"the checkpoint has no {name!r}, which this model needs; it is of another model")
            if weights[name].shape != value.shape:
                raise ModelError(
                    f"the checkpoint's {name!r} is {list(weights[name].shape)}, this model needs {list(value.shape)}; "
                    "it is of another model or image size"
                )
        extra = next((name for name in weights if name not in own), None)
        if extra is not None:
            raise ModelError(f"the checkpoint has {extra!r}, which this model lacks; it is of another model")
        state = {name: value for name, value in weights.items() if not name.startswith(METHOD)}
        self.model.load_state_dict(state, strict=not self.shares_weights)  # the names were compared above
        self.take_method(weights)

    def take_method(self, weights: dict[str, Tensor]) -> bool:
        """Take a method's weights if all of them are there and fit; return whether they were taken."""
        own = self._method_weights()
        if not own or any(name not in weights or weights[name].shape != value.shape for name, value in own.items()):
            return False
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(weights[name])
        return True

    def fit_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A foreign checkpoint's tensors under timm's names, position embedding resampled to this model's grid."""
        return self._family.fit_state(self.model, state)
