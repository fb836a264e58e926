"""What training measures: a line an epoch, TensorBoard events, and the summary of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.training.config import TrainConfig


class Epoch(msgspec.Struct, frozen=True):
    """A line of ``metrics.jsonl``."""

    epoch: int
    """From 1."""
    train_loss: float
    val_loss: float
    """Mean cross-entropy over the validation images and the method's validation orders."""
    val_top1: float
    lr: float
    """At the last step."""
    seconds: float
    images_per_second: float
    """In training, without validation."""
    best: bool
    """Whether its weights became ``model.safetensors``."""


class Summary(msgspec.Struct, frozen=True):
    """What ``train`` did."""

    run: str
    model: str
    method: str
    blocks: int
    parameters: int
    images: int
    """Trained on, those for validation and those that were left out not counted."""
    validation_images: int
    skipped: int
    """Images that could not be decoded."""
    epochs: int
    best_epoch: int | None
    val_loss: float | None
    device: str
    precision: str
    seconds: float
    cost: float
    """Of the training, in forward passes of the whole model for one image."""
    settings: TrainConfig


def open_board(folder: Path, epochs_done: int, warn: Callable[[str], None]) -> Callable[[Epoch | None], None]:
    """A writer of TensorBoard events; called with None it closes."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("tensorboard is not installed, so no events are written; pip install tensorboard")
        return lambda _: None
    make: Any = SummaryWriter  # untyped
    writer: Any = make(str(folder), purge_step=epochs_done + 1 if epochs_done else None)

    def write(metrics: Epoch | None) -> None:
        if metrics is None:
            writer.close()
            return
        for name in ("train_loss", "val_loss", "val_top1", "lr", "images_per_second"):
            writer.add_scalar(name, getattr(metrics, name), metrics.epoch)
        writer.flush()

    return write
