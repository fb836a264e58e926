"""Adapter of torch models to the interface of ``ls_edge.evaluation``; tokens stay on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ls_edge.training.precision import autocast


class TorchBlocks:
    """A view in evaluation mode, with images and logits as numpy arrays."""

    def __init__(self, view: Any, dtype: torch.dtype = torch.float32) -> None:
        """Wrap a ``BlockView`` or its parts; ``dtype`` is the type of matrix products."""
        self.view = view.eval()
        self.num_blocks, self.owners = view.num_blocks, view.owners
        self._dtype = dtype

    @torch.inference_mode()
    def stem(self, images: np.ndarray) -> Tensor:
        """Return tokens of images float32 ``[B, 3, H, W]``."""
        with autocast(self.view.device, self._dtype):
            return self.view.stem(torch.from_numpy(images).to(self.view.device))

    @torch.inference_mode()
    def block(self, index: int, tokens: Tensor, slot: int) -> Tensor:
        """Run one block."""
        with autocast(self.view.device, self._dtype):
            return self.view.block(index, tokens, slot)

    @torch.inference_mode()
    def head(self, tokens: Tensor) -> np.ndarray:
        """Return logits float32 ``[B, C]``."""
        with autocast(self.view.device, self._dtype):
            return self.array_of(self.view.head(tokens))

    @torch.inference_mode()
    def array_of(self, tokens: Tensor) -> np.ndarray:
        """Return tokens as a float32 array."""
        return tokens.float().cpu().numpy()

    @torch.inference_mode()
    def slots_of(self, index: int, tokens: Tensor) -> np.ndarray | None:
        """Return the slot that block ``index`` predicts for itself, int64 ``[B]``; None without a predictor."""
        if self.view.predictor is None:
            return None
        return self.view.predictor(index, tokens).argmax(dim=1).cpu().numpy()
