"""A torch model as what ``ls_edge.evaluation.evaluate`` evaluates: no gradients, tokens stay on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ls_edge.training.models.view import BlockView
from ls_edge.training.precision import autocast


class TorchBlocks:
    """A view in evaluation mode; images come and logits go as numpy arrays."""

    def __init__(self, view: BlockView, dtype: torch.dtype = torch.float32) -> None:
        """``dtype`` is that of the matrix products."""
        self.view = view.eval()
        self._dtype = dtype

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return self.view.num_blocks

    @property
    def owners(self) -> tuple[int, ...]:
        """For each block the first one with the same weights."""
        return self.view.owners

    @torch.inference_mode()
    def stem(self, images: np.ndarray) -> Tensor:
        """Images float32 ``[B, 3, H, W]`` to tokens on the model's device."""
        with autocast(self.view.device, self._dtype):
            return self.view.stem(torch.from_numpy(images).to(self.view.device))

    @torch.inference_mode()
    def block(self, index: int, tokens: Tensor, slot: int) -> Tensor:
        """Run one block."""
        with autocast(self.view.device, self._dtype):
            return self.view.block(index, tokens, slot)

    @torch.inference_mode()
    def head(self, tokens: Tensor) -> np.ndarray:
        """Logits float32 ``[B, C]``."""
        with autocast(self.view.device, self._dtype):
            logits: np.ndarray = self.view.head(tokens).float().cpu().numpy()
        return logits

    @torch.inference_mode()
    def array_of(self, tokens: Tensor) -> np.ndarray:
        """Tokens as an array float32 ``[B, N, D]``."""
        array: np.ndarray = tokens.float().cpu().numpy()
        return array

    @torch.inference_mode()
    def slots_of(self, index: int, tokens: Tensor) -> np.ndarray | None:
        """The slot that block ``index`` predicts for itself, int64 ``[B]``; None if the model has no predictor."""
        if self.view.predictor is None:
            return None
        slots: np.ndarray = self.view.predictor(index, tokens).argmax(dim=1).cpu().numpy()
        return slots
