"""Reports of a training: a line per epoch, TensorBoard events, a summary, and progress bars on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

from ls_edge.core.errors import printable
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
    """Speed of training, without validation."""
    best: bool
    """Whether its weights became ``model.safetensors``."""


class Summary(msgspec.Struct, frozen=True):
    """Result of a training."""

    run: str
    model: str
    method: str
    blocks: int
    parameters: int
    images: int
    """Images to train on, without those for validation and those left out."""
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
    """Cost in forward passes of the whole model for one image."""
    settings: TrainConfig


class Bars:
    """Bars on a terminal, and one line per epoch; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=None)
        self._epochs = 0
        self._title = ""

    def __enter__(self) -> Bars:
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:  # elsewhere older versions of rich print an empty line
            self._progress.stop()

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.print(Text.assemble(("warning: ", "yellow"), printable(text)), soft_wrap=True)

    def decoding(self, images: int) -> None:
        """Start the bar of images."""
        self._progress.reset(self._task, total=images, description="reading images")

    def decoded(self, images: int) -> None:
        """Advance the bar."""
        self._progress.advance(self._task, images)

    def started(self, epoch: int, epochs: int, steps: int) -> None:
        """Start the bar of the training, which counts the steps of all epochs."""
        if self._epochs != epochs:
            self._epochs = epochs
            self._progress.reset(self._task, total=epochs * steps)
        self._title = f"epoch {epoch}/{epochs}"
        self._progress.update(self._task, description=self._title, completed=(epoch - 1) * steps)

    def stepped(self, loss: float | None) -> None:
        """Advance the bar by a step and show the mean loss so far, if there is a new one."""
        title = None if loss is None else f"{self._title}  loss {loss:.3f}"
        self._progress.update(self._task, advance=1, description=title)

    def finished(self, metrics: Epoch) -> None:
        """Print the epoch's line."""
        m = metrics
        text = (
            f"epoch {m.epoch:>3}/{self._epochs}  train {m.train_loss:.3f}  validation {m.val_loss:.3f}  "
            f"top-1 {m.val_top1:.3f}  {m.images_per_second:.0f} images/s{'  best' if m.best else ''}"
        )
        self.console.print(text, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def event_writer(folder: Path, epochs_done: int) -> Iterator[Callable[[Epoch], None]]:
    """Yield a function that writes an epoch as TensorBoard events."""
    make: Any = SummaryWriter  # untyped
    writer: Any = make(str(folder), purge_step=epochs_done + 1 if epochs_done else None)

    def write(metrics: Epoch) -> None:
        for name in ("train_loss", "val_loss", "val_top1", "lr", "images_per_second"):
            writer.add_scalar(name, getattr(metrics, name), metrics.epoch)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()
