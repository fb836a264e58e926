"""Metrics of epochs, and the result and progress of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from ls_edge.core.errors import printable
from ls_edge.core.logs import OnProgress, OnWarning
from ls_edge.core.text import counted
from ls_edge.report.shown import Shown
from ls_edge.training.config import TrainConfig


class Epoch(msgspec.Struct, frozen=True):
    """A line of ``metrics.jsonl``."""

    epoch: int
    train_loss: float
    val_loss: float
    """Mean cross-entropy over the validation images and the method's validation orders."""
    val_top1: float
    lr: float
    seconds: float
    images_per_second: float
    """Training speed, excluding validation."""
    best: bool
    """Whether the weights of this epoch were written to ``model.safetensors``."""

    def line(self, epochs: int) -> str:
        """Return the metrics as a line to print."""
        return (
            f"epoch {self.epoch:>3}/{epochs}  train {self.train_loss:.3f}  validation {self.val_loss:.3f}  "
            f"top-1 {self.val_top1:.3f}  {self.images_per_second:.0f} images/s{'  best' if self.best else ''}"
        )


class TrainingResult(Shown, msgspec.Struct, frozen=True):
    """Result of training."""

    run: str
    model: str
    method: str
    blocks: int
    parameters: int
    images: int
    """Number of training images, excluding validation images and images that were left out."""
    validation_images: int
    skipped: int
    """Number of images that could not be decoded."""
    account: dict[str, Any]
    """Images, classes, and ignored files, by reason."""
    epochs: int
    best_epoch: int | None
    val_loss: float | None
    val_top1: float | None
    balanced_top1: float | None
    """Mean of the accuracies of the classes, on the validation images."""
    top1_by_class: dict[str, float] | None
    start_top1: float | None
    """Accuracy of the initial model in trained order, if it was trained on these classes."""
    teacher_top1: float | None
    device: str
    precision: str
    seconds: float
    settings: TrainConfig
    log: str = ""
    """Command or place that shows the curves; empty without training."""

    def show(self, console: Console) -> None:
        """Print the result in one line."""
        what = (
            "initial weights, not trained"
            if self.best_epoch is None
            else f"epoch {self.best_epoch} of {self.epochs}, validation cross-entropy {self.val_loss:.4f}"
        )
        text = (
            f": {self.model}, {counted(self.blocks, 'block')}, {self.parameters / 1e6:.2f} million parameters, "
            f"{self.method}: {what}; {counted(self.images, 'image')}, {self.device}, {self.precision}, "
            f"{self.seconds:.0f} s"
        )
        console.print(Text.assemble((printable(self.run), "bold"), printable(text)))
        if self.log:
            console.print(f"curves: {printable(self.log)}")


OnEpoch = Callable[[Epoch, int], None]
"""Callback that receives the metrics of each epoch and the number of epochs."""


class Reporter:
    """Counter of training steps that reports to the given functions."""

    def __init__(
        self,
        on_epoch: OnEpoch,
        on_progress: OnProgress,
        on_warning: OnWarning,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.warn, self.note, self.on_epoch = on_warning, on_note, on_epoch
        self._on_progress = on_progress
        self._done = self._total = self._images = 0
        self._title = self._loss = ""
        self._begun = 0, 0.0

    def begin(self, title: str, total: int, done: int = 0, images: int = 0) -> None:
        """Note the start of ``total`` images or steps, of which some are ``done``; a step has ``images``."""
        self._title, self._total, self._done, self._images = title, total, done, images
        self._begun, self._loss = (done, time.monotonic()), ""
        self._on_progress(done, total, title)

    def advance(self, loss: float | None = None) -> None:
        """Count an image or a step; ``loss`` is the mean loss so far if it was computed."""
        self._done += 1
        if loss is not None:
            self._loss = f"  loss {loss:.3f}"
        done, at = self._begun
        rate = (self._done - done) * self._images / max(time.monotonic() - at, 1e-9)
        speed = f"  {rate:.0f} images/s" if self._images else ""
        self._on_progress(self._done, self._total, f"{self._title}{self._loss}{speed}")
