"""Progress of training on standard error: bars on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ls_edge.core.errors import printable
from ls_edge.training.metrics import Epoch


class Bars:
    """A :class:`ls_edge.training.loop.Listener` that draws; use it as a context."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._epochs = 0
        self._title = ""

    def __enter__(self) -> Bars:
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:  # elsewhere older versions of rich print an empty line
            self._progress.stop()

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.print(Text.assemble(("warning: ", "yellow"), printable(text)), soft_wrap=True)

    def decoding(self, images: int) -> None:
        """Begin the bar of images."""
        self._replace("reading images", images)

    def decoded(self, images: int) -> None:
        """Advance it."""
        if self._task is not None:
            self._progress.advance(self._task, images)

    def started(self, epoch: int, epochs: int, steps: int) -> None:
        """Begin the bar of the training, which counts the steps of all epochs."""
        if self._epochs != epochs:
            self._epochs = epochs
            self._replace("", epochs * steps)
        self._title = f"epoch {epoch}/{epochs}"
        if self._task is not None:
            self._progress.update(self._task, description=self._title, completed=(epoch - 1) * steps)

    def stepped(self, steps: int, loss: float | None) -> None:
        """Advance it."""
        if self._task is not None:
            title = self._title if loss is None else f"{self._title}  loss {loss:.3f}"
            self._progress.update(self._task, advance=steps, description=title if loss is not None else None)

    def finished(self, metrics: Epoch) -> None:
        """Print the epoch's line."""
        m = metrics
        text = (
            f"epoch {m.epoch:>3}/{self._epochs}  train {m.train_loss:.3f}  validation {m.val_loss:.3f}  "
            f"top-1 {m.val_top1:.3f}  {m.images_per_second:.0f} images/s{'  best' if m.best else ''}"
        )
        self.console.print(text, highlight=False, soft_wrap=True)

    def _replace(self, title: str, total: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=total)
