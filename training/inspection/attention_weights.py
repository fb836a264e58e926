"""Attention weights, captured while blocks run.

Fused attention never stores the weights in a tensor, so it is disabled during the capture. A hook reads the weights as
the input of the attention's dropout, which has no effect in evaluation mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ls_edge.evaluation.measure import NotMeasurable
from ls_edge.training.inspection.inspected import class_of, grid_of
from ls_edge.training.models.torch_blocks import TorchBlocks

PLAIN = ("Attention", "AttentionRope", "EvaAttention")
"""timm's attention classes whose dropout takes weights ``[B, heads, N, N]`` with rows that sum to 1."""


def plain_attention(model: TorchBlocks) -> tuple[list[Any], tuple[int, int], int]:
    """Return the attention module of each block, the grid of patches, and the number of tokens before the patches.

    Raise :class:`NotMeasurable` if the attention of a block is not plain.
    """
    view, grid = model.view, grid_of(model)
    modules = [getattr(block, "attn", None) for block in view.blocks]
    odd = [type(one).__name__ for one in modules if type(one).__name__ not in PLAIN]
    if odd:
        has = "no attention" if odd[0] == "NoneType" else f"{odd[0]}, which is not plain attention"
        raise NotMeasurable(f"a block of {class_of(model)} has {has}")
    if grid is None:
        raise NotMeasurable(f"the tokens of {class_of(model)} do not form a grid of patches")
    height, width = grid
    return modules, grid, view.token_spec.count - height * width


def distances(height: int, width: int) -> Tensor:
    """Return the distances between patch centers, in patches, float64 ``[N, N]``."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack((rows.flatten(), columns.flatten()), dim=1).double()
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


@contextlib.contextmanager
def visible_weights(modules: list[Any], captured: list[Tensor]) -> Iterator[None]:
    """Append the weights of each attention module that runs to ``captured``, with fused attention disabled."""

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured.append(inputs[0])

    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.callback(module.attn_drop.register_forward_pre_hook(read).remove)
            stack.callback(setattr, module, "fused_attn", module.fused_attn)
            module.fused_attn = False
        yield
