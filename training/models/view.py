"""View of a timm model as ``stem``, ``block(i)``, ``head``, and ``forward`` in any arrangement.

A view of a plain model has no additional parameters: in trained order, it runs the same operations as timm's forward.
Parameters keep timm's names (:meth:`BlockView.weights`), so timm can read a checkpoint. A training method may add
modules: :attr:`BlockView.slots`, which runs with each block, and :attr:`BlockView.predictor`, which reads tokens; the
names of their parameters begin with ``method.``.

Orders are Python integers because an order in a CUDA tensor would cost one synchronization per block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bundle import TokenSpec
from ls_edge.core.errors import ModelError
from ls_edge.training.models.families import Family, family_of, shape_of_tokens
from ls_edge.training.models.flops import count_flops, evaluation_mode
from ls_edge.training.models.slots import Branch, PositionPredictor, SlotModule

METHOD = "method."
"""Prefix of the parameters of a method in :meth:`BlockView.weights`."""


class BlockView(nn.Module):
    """A timm model as stem, blocks, and head; raises :class:`ModelError` if it does not have them."""

    owners: tuple[int, ...]
    """First block with the same weights, for each block; the block itself unless blocks share weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._family: Family = family_of(model)
        self.token_spec = TokenSpec(*shape_of_tokens(self._family, model))
        self.model = model
        self.slots: SlotModule | None = None
        self.predictor: PositionPredictor | None = None
        self.checkpointing = False
        """Whether training recomputes the activations of a block for its gradients instead of keeping them."""
        self._compiled: list[Callable[..., Tensor]] | None = None
        self._find_blocks()

    def _find_blocks(self) -> None:
        self._blocks: list[nn.Module] = list(self._family.blocks(self.model))
        first: dict[nn.Module, int] = {}
        self.owners = tuple(first.setdefault(block, index) for index, block in enumerate(self._blocks))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def shares_weights(self) -> bool:
        """Whether some blocks share their weights."""
        return len(set(self.owners)) < self.num_blocks

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks in trained order."""
        return nn.ModuleList(self._blocks)

    @property
    def needs_slot(self) -> bool:
        """Whether blocks take their slot, the number of blocks that ran before, as an input."""
        return self.slots is not None

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Residual branches of a block; raises :class:`ModelError` for unsupported blocks."""
        return self._family.branches(self.model)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images, in pixels."""
        return self._family.image_size(self.model)

    @property
    def patch_embedding(self) -> nn.Module:
        """Module that converts patches to tokens, without positions."""
        return getattr(self.model, self._family.patch_embedding)

    @property
    def has_plain_patches(self) -> bool:
        """Whether a single linear layer embeds the patches, instead of several convolutions."""
        convolutions = [layer for layer in self.patch_embedding.modules() if isinstance(layer, nn.Conv2d)]
        return len(convolutions) == 1 and convolutions[0].kernel_size == convolutions[0].stride

    @property
    def num_classes(self) -> int:
        """Length of the logits."""
        return int(getattr(self.model, "num_classes", 0))

    @property
    def classifier(self) -> frozenset[str]:
        """Names of the parameters whose shape depends on the number of classes."""
        return self._family.classifier(self.model)

    @property
    def device(self) -> torch.device:
        """Device of the parameters; of an empty model, the one that its weights will be on."""
        return next((weight.device for weight in self.model.parameters() if not weight.is_meta), torch.device("cpu"))

    def count_flops(self) -> tuple[int, int]:
        """Return the floating-point operations for an image: of the whole model, and of a block."""
        with evaluation_mode(self), torch.autocast(self.device.type, enabled=False):
            images = torch.zeros(1, 3, *self.image_size, device=self.device)
            stem, tokens = count_flops(lambda: self.stem(images))
            head, _ = count_flops(lambda: self.head(tokens))
            block, _ = count_flops(lambda: self._run(0, tokens, 0))
        return stem + self.num_blocks * block + head, block

    def stem(self, images: Tensor) -> Tensor:
        """Return tokens ``[B, N, D]`` of normalized images ``[B, 3, H, W]``."""
        return self._family.stem(self.model, images)

    def block(self, index: int, tokens: Tensor, slot: int | Tensor = 0) -> Tensor:
        """Run block ``index`` on tokens ``[B, N, D]``; ``slot``, int or int64 ``[B]``, counts if :attr:`needs_slot`."""
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self._run, index, tokens, slot, use_reentrant=False)
        return self._run(index, tokens, slot)

    def _run(self, index: int, tokens: Tensor, slot: int | Tensor) -> Tensor:
        run = self._compiled[index] if self._compiled is not None and self.training else self._runner(index)
        inputs = self._family.block_inputs(self.model, self.owners[index])
        if self.slots is None:
            return run(tokens, **inputs)
        return self.slots(self.owners[index], tokens, slot, lambda *before: run(*before, **inputs))

    def _runner(self, index: int) -> Callable[..., Tensor]:
        return self._blocks[index] if self.slots is None else self.slots.runner(index, self._blocks[index])

    def head(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of tokens ``[B, N, D]``."""
        return self._family.head(self.model, tokens)

    def forward(self, images: Tensor, arrangement: Arrangement | Sequence[int] | None = None) -> Tensor:
        """Return logits ``[B, C]`` of images ``[B, 3, H, W]``, by default in trained order.

        Raise :class:`ModelError` for a block that the model lacks.
        """
        if not isinstance(arrangement, Arrangement):
            arrangement = Arrangement.plain(range(self.num_blocks) if arrangement is None else arrangement)
        if arrangement.order and max(arrangement.order) >= self.num_blocks:
            raise ModelError(
                f"there is no block {max(arrangement.order)}; the model has blocks 0 to {self.num_blocks - 1}"
            )
        return self.head(apply(arrangement, self.stem(images), self.block))

    def keep_blocks(self, indices: Sequence[int]) -> None:
        """Keep these blocks, in this order; a repeated index puts the same block in several places."""
        self._family.keep(self.model, indices)
        self._find_blocks()
        self._compiled = None

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile each block separately for training, so that all orders share the graphs.

        Increase torch's limit of graphs per function, since blocks with different settings (drop path) have one each.
        """
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, self.num_blocks + 8)
        dynamo.optimize_ddp = False  # would split a block's graph at DDP's buckets, which are larger than a block
        self._compiled = [
            torch.compile(self._runner(index), dynamic=False, backend=backend) for index in range(self.num_blocks)
        ]

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by timm's names, and those of the method with the prefix ``method.``.

        Weights that blocks share are returned once, under the name of the first block.
        """
        state = self.model.state_dict()
        if self.shares_weights:
            names: dict[int, str] = {}
            for name, value in self.model.state_dict(keep_vars=True).items():
                names.setdefault(id(value), name)
            state = {name: state[name] for name in names.values()}
        return {**state, **self._method_weights()}

    def _method_weights(self) -> dict[str, Tensor]:
        modules = {"slots": self.slots, "readout": self.predictor}  # names in checkpoints
        return {
            f"{METHOD}{name}.{key}": value
            for name, module in modules.items()
            if module is not None
            for key, value in module.state_dict().items()
        }

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load exactly these weights; raise :class:`ModelError` with the first name that does not fit.

        A model that was built empty takes the tensors themselves instead of copies.
        """
        own = self.weights()
        if weights and own.keys().isdisjoint(weights.keys() - self.classifier):
            raise ModelError(
                f"none of the checkpoint's names, such as {next(iter(weights))!r}, is in this model; it belongs to "
                "another model, or to another library, such as transformers, and needs timm's names"
            )
        for name, value in own.items():
            if name not in weights:
                raise ModelError(
                    f"the checkpoint lacks {name!r}, which this model needs; it is incomplete, or belongs to another "
                    "model"
                )
            if weights[name].shape != value.shape:
                raise ModelError(
                    f"{name!r} is {list(weights[name].shape)} in the checkpoint, this model needs {list(value.shape)}; "
                    "it belongs to another model or image size"
                )
        check_values(weights, own)
        extra = next((name for name in weights if name not in own), None)
        if extra is not None:
            raise ModelError(f"the checkpoint has {extra!r}, which this model lacks; it belongs to another model")
        state = {name: value.to(own[name].dtype) for name, value in weights.items() if not name.startswith(METHOD)}
        empty = any(value.is_meta for value in own.values())
        self.model.load_state_dict(state, strict=not self.shares_weights, assign=empty)  # the names were compared above
        self.take_method(weights)

    def take_method(self, weights: dict[str, Tensor]) -> bool:
        """Load the weights of the method if all of them are present and fit; return whether they were loaded."""
        own = self._method_weights()
        if not own or any(name not in weights or weights[name].shape != value.shape for name, value in own.items()):
            return False
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(weights[name])
        return True

    def fit_state(self, state: dict[str, Tensor], image_size: tuple[int, int] | None) -> dict[str, Tensor]:
        """Return a foreign checkpoint with timm's names and its position embedding resampled to this model's grid.

        ``image_size`` is the image size of the checkpoint. If it is None, the checkpoint's grid must be this model's or
        square. Raise :class:`ModelError` if the checkpoint does not fit.
        """
        if image_size is not None:
            self.model.pretrained_model_args = {"img_size": image_size}  # type: ignore[assignment]
        own = self.model.state_dict()
        for name in ("cls_token", "dist_token", "reg_token"):  # timm would take their positions for those of patches
            renamed = name == "reg_token" and name not in state  # or "register_tokens", which timm renames
            if "pos_embed" in state and (name in state) != (name in own) and not renamed:
                how = "has {!r}, which this model lacks" if name in state else "lacks {!r}, which this model needs"
                raise ModelError(f"the checkpoint {how.format(name)}; it belongs to another model")
        try:
            if image_size is None and not self._could_be_square(state):
                raise ValueError("its position embedding is of a grid that is neither square nor this model's")
            return self._family.fit_state(self.model, state)
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"the checkpoint does not fit ({error}); if it is of this model at another image size, first make a "
                "run at that size, with --set model.args.img_size=[HEIGHT,WIDTH] --epochs 0, and give it to --init"
            ) from None

    def _could_be_square(self, state: dict[str, Tensor]) -> bool:
        found, own = (getattr(of.get("pos_embed"), "shape", (0, 0)) for of in (state, self.model.state_dict()))
        if len(found) != 3 or found[1] in (0, own[1]):
            return True
        before = own[1] - getattr(self.model.patch_embed, "num_patches", own[1])  # positions of other tokens
        names = () if before else ("cls_token", "dist_token", "reg_token")  # which have one only in the checkpoint
        tokens = [int(state[name].shape[-2]) for name in names if name in state]
        counts = itertools.accumulate((-count for count in tokens), initial=int(found[1]) - before)
        return any(count > 0 and math.isqrt(count) ** 2 == count for count in counts)


def check_values(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise :class:`ModelError` for weights that a model with the weights ``own`` cannot use, but torch would load."""
    for name, value in ((name, weights[name]) for name in own if name in weights):
        if own[name].is_floating_point() and (not value.is_floating_point() or value.element_size() == 1):  # float8
            kind = str(value.dtype).removeprefix("torch.")
            raise ModelError(f"{name!r} is {kind} in the checkpoint; save weights that are not quantized")
        if not (0 * value.float()).sum().isfinite():  # torch.isfinite takes 2.5 times as long
            raise ModelError(f"{name!r} has NaN or infinity in the checkpoint; use one from before training diverged")
