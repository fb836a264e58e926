"""Training loop: epochs of shuffled batches, validation, the best checkpoint, and resuming.

The run folder can be loaded at any time: it contains the initial model and later the model with the lowest validation
cross-entropy so far. With a fixed seed, machine, and number of threads, a run on the CPU is reproducible bit by bit,
even after a kill and ``resume``; CUDA kernels do not guarantee that. A run resumes at the start of an epoch.

If ``torchrun`` starts it, all processes train together (``ls_edge.training.distributed``), and the first one writes.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from ls_edge.core.bands import windows
from ls_edge.core.errors import ModelError, RunError, TrainingStopped, UsageError
from ls_edge.core.files import folder_lock, remove_left_parts
from ls_edge.core.text import counted
from ls_edge.training.config import TrainConfig
from ls_edge.training.data import Batches
from ls_edge.training.distributed import from_environment, process_group
from ls_edge.training.logs import SCALARS, curves, first_images, open_log
from ls_edge.training.precision import (
    TYPES,
    choose_device,
    choose_precision,
    is_out_of_memory,
    own_torch_state,
    plain_attention,
    seed_epoch,
)
from ls_edge.training.progress import Epoch, Reporter, TrainingResult
from ls_edge.training.runs.checkpoint import (
    CONFIG,
    METRICS,
    RESUME,
    WEIGHTS,
    TrainingProgress,
    append_metrics,
    load_progress,
    read_tensors,
    save_progress,
    save_run,
    shown_model,
    start_metrics,
)
from ls_edge.training.setup import Setup
from ls_edge.training.task import whole_batch_only

GOOD = 0.5
"""Top-1 from which a class without a correct answer is unexpected."""
MUCH_LOST = 0.05
"""Loss of top-1 of which ``train`` warns; the recipes in docs/choose.md lose less."""


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    reporter: Reporter,
    resume: bool = False,
    overwrite: bool = False,
    model_named: bool = True,
) -> TrainingResult:
    """Train according to ``config`` and write the run folder ``out``; replace a run only with ``overwrite``.

    ``resume`` continues the run in ``out``, whose configuration must be ``config``. ``model_named`` means that the user
    chose the model; otherwise, a run given as ``init`` determines it. Raise :class:`DataError`, :class:`ModelError`,
    :class:`RunError`, :class:`UsageError`, and :class:`TrainingStopped` for a loss that is not finite or a full disk;
    the last good checkpoint is kept.
    """
    started = time.perf_counter()
    out = Path(out)
    _check_apart(out, config.data.source)
    if not resume:
        _check_kept(out, (config.model.init, config.teacher.model, config.teacher.weights))
        if not overwrite:
            _check_new(out)
    device = choose_device(config.device)
    context = from_environment(device)
    dtype = choose_precision(config.precision, device)
    precision = next(name for name, type_ in TYPES.items() if type_ == dtype)
    config = msgspec.structs.replace(config, precision=precision)  # kept when it resumes on other hardware
    lock = _run_folder(out) if context.is_main else contextlib.nullcontext()
    setup = None
    with own_torch_state():
        try:
            with process_group(context, device), lock:
                progress = load_progress(out) if resume else None
                setup = Setup(config, reporter, context, device, model_named=model_named, resumed=progress)
                training = _Training(setup, out, progress)
                if resume:
                    training.resume()
                elif context.is_main:
                    training.begin()
                return training.run(started)
        except RuntimeError as error:
            if "DataLoader worker" in str(error):  # torch raises it in a signal handler, wherever training is
                raise TrainingStopped(
                    f"a decoding process has ended ({str(error).splitlines()[0][:200]}), perhaps for lack of memory; "
                    "continue with --resume, with fewer of them (--workers N) or none (0)"
                ) from None
            if not is_out_of_memory(error):
                raise
            raise TrainingStopped(_memory_advice(config, device, setup)) from None
        except (ConnectionError, BlockingIOError, TimeoutError):  # not of a disk
            raise
        except OSError as error:
            raise TrainingStopped(
                f"cannot write to {out}, or to /dev/shm for --workers: {error.strerror or error}; check path and space"
            ) from None


def _memory_advice(config: TrainConfig, device: torch.device, setup: Setup | None) -> str:
    """Return the error for too little memory, with the remedies that keep the result first."""
    parts = 2 * config.accumulate
    more = (
        "recompute activations (--set checkpointing=true), or take smaller batches, images or models"
        if setup is not None
        else "keep fewer decoded images, with the same result (--set data.cache_mb=N), or take smaller images or models"
    )
    fits = setup is not None and parts <= setup.context.local_batch_size(config.batch_size)
    if setup is not None and fits and not whole_batch_only(setup.task.view):
        more = f"compute a step in more parts, with the same result (--accumulate {parts}), {more}"
    return (
        f"out of memory on {device} with {config.batch_size} images per step in {counted(config.accumulate, 'part')}; "
        f"{more}"
    )


@contextlib.contextmanager
def _run_folder(out: Path) -> Iterator[None]:
    """Create and lock a run folder; remove a new folder if nothing was written to it."""
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with folder_lock(out):  # a folder that another process has locked is its own, even if it is empty
        try:
            remove_left_parts(out)
            yield
        finally:
            if is_new:
                with contextlib.suppress(OSError):
                    out.rmdir()


def _check_new(out: Path) -> None:
    """Raise :class:`RunError` for a folder with a run or with foreign weights; a killed start may be repeated."""
    if (out / CONFIG).exists() or ((out / WEIGHTS).exists() and not (out / RESUME).exists()):
        raise RunError(
            f"{out} already holds a run; continue it with --resume, replace it with --overwrite, or name another"
        )


def _check_kept(out: Path, starts: Iterable[str | None]) -> None:
    """Raise :class:`UsageError` if a new run would replace a run or file that it starts from."""
    for path in (Path(start).resolve() for start in starts if start):
        if path.exists() and out.resolve() in (path, path.name == WEIGHTS and path.parent):
            raise UsageError(f"--out {out} would replace what training starts from; name another folder")


def _check_apart(out: Path, source: str) -> None:
    """Raise :class:`UsageError` for a run folder inside the images, where it would count as a class."""
    data = Path(source)
    if source in ("", "digits") or not data.is_dir():
        return
    inside, outside = out.resolve(), data.resolve()
    if inside == outside or outside in inside.parents:
        raise UsageError(f"--out {out} is inside the data {source}, where folders are classes; use a folder outside it")


class _Training:
    """A training in its run folder."""

    def __init__(self, setup: Setup, out: Path, progress: TrainingProgress | None) -> None:
        self.setup, self.out = setup, out
        data = "" if setup.data is None else setup.data.fingerprint
        self.imitated = setup.task.imitated()
        self.progress = progress or TrainingProgress(
            data=data, imitated=self.imitated, start=setup.start, teacher=setup.teacher
        )
        self.task, self.config, self.record = setup.task, setup.config, setup.record
        self.reporter, self.context = setup.reporter, setup.context

    def resume(self) -> None:
        """Continue with the state of an unfinished run."""
        if self.setup.data is not None and self.progress.data != self.setup.data.fingerprint:
            raise RunError(
                f"{self.config.data.source} or its split has changed since {self.out} was started (files were added, "
                "removed, renamed, exchanged or rewritten, its classes are in another order, or the start was trained "
                "again); restore it, or start again in "
                "another folder with --init"
            )
        if self.progress.imitated != self.imitated:
            raise RunError(
                f"the weights of the start or the teacher have changed since {self.out} was started; restore them, or "
                "start again in another folder"
            )
        try:
            self.task.load_state(read_tensors(self.out / RESUME)[0])
        except (KeyError, ValueError, RuntimeError, ModelError) as error:
            reason = str(error).splitlines()[0].rstrip(": ")
            raise RunError(f"cannot use {self.out / RESUME} ({reason}); train again with --overwrite") from None
        if self.progress.scaler:
            self.task.scaler.load_state_dict(self.progress.scaler)
        self._update_record()
        self.context.barrier()
        if self.context.is_main:
            start_metrics(self.out, self.progress.epochs_done)

    def begin(self) -> None:
        """Write the files of a new run; leave none of them if that fails, or the old run if there is no room."""
        if self.config.epochs:  # the largest file
            save_progress(self.out, self.task.state(), self.progress)
        for old in (self.out / CONFIG, *self.out.glob("events.out.tfevents.*")):
            old.unlink(missing_ok=True)
        try:
            start_metrics(self.out, 0)
            save_run(self.out, self.task.view, self.config, self.record)
        except BaseException:
            for name in (RESUME, WEIGHTS, METRICS):
                (self.out / name).unlink(missing_ok=True)
            raise

    def run(self, started: float) -> TrainingResult:
        """Train the remaining epochs, and return the result."""
        view = self.task.view
        images = validation = 0
        skipped: set[str] = set()
        if self.setup.batches is not None:
            train_batches, held = self.setup.batches
            with plain_attention(view, view.device):
                self._epochs(train_batches, held)
            not_trained, not_held = train_batches.left_out(), held.left_out()
            images, validation = len(train_batches) - len(not_trained), len(held) - len(not_held)
            skipped = not_trained | not_held
            self._warn_of_results()
        if self.record.problem:
            how = "lower --lr or train longer" if self.config.epochs else "train it before you use its answers"
            self.reporter.warn(f"{self.record.problem}; {how}")
        if self.context.is_main:
            (self.out / RESUME).unlink(missing_ok=True)
        best = self.progress.best
        return TrainingResult(
            run=str(self.out),
            model=shown_model(self.record, view),
            method=self.record.method,
            blocks=view.num_blocks,
            parameters=sum(p.numel() for p in view.parameters()),
            images=images,
            validation_images=validation,
            skipped=len(skipped),
            account=self.setup.images.account(skipped),
            epochs=self.config.epochs,
            best_epoch=self.progress.best_epoch,
            val_loss=None if best is None else best.loss,
            val_top1=None if best is None else best.top1,
            balanced_top1=None if best is None else best.counts.balanced,
            top1_by_class=None if best is None else best.counts.by_class(self.record.classes),
            start_top1=None if self.progress.start is None else self.progress.start.top1,
            teacher_top1=None if self.progress.teacher is None else self.progress.teacher.top1,
            device=str(view.device),
            precision=str(self.task.dtype).removeprefix("torch."),
            seconds=round(time.perf_counter() - started, 3),
            settings=self.config,
            log=f"tensorboard --logdir {shlex.quote(str(self.out))}" if self.config.epochs else "",
        )

    def _warn_of_results(self) -> None:
        """Warn of classes without a correct answer, of lost accuracy, and of a checkpoint that is not the best one."""
        best, bands, start = self.progress.best, self.task.bands, self.progress.start
        if best is None:
            return
        if missed := best.counts.missed(self.record.classes):
            # If it is bad, the accuracy itself is a warning.
            (self.reporter.warn if best.top1 > GOOD else self.reporter.note)(f"{missed} for validation")
        shuffles = best.in_order != best.top1
        before = 0.0 if start is None or start.problem else start.top1
        reference = max(best.in_order, before)
        if reference - best.top1 > MUCH_LOST:
            if self.record.method == "shared":
                advice = ["train longer", "raise method_args.adapter_rank"]
            elif shuffles:
                narrower = [item for item in windows(bands.num_blocks) if bands.contains(item) and item != bands]
                advice = ["train longer", *(f"allow fewer orders (--bands {item})" for item in narrower[1:2])]
                advice.append("let the blocks share their weights (--method shared), which makes all orders equal")
            else:
                advice = ["train longer", "lower --lr"]
            orders = f" in the orders of {bands}" if shuffles else ""
            self.reporter.warn(
                f"the best checkpoint has a top-1 of {best.top1:.3f}{orders}, against {reference:.3f} in trained order"
                f"{' before training' if reference == before else ''}; {', '.join(advice[:-1])}, or {advice[-1]}"
            )
        if self.progress.last_top1 - best.top1 > MUCH_LOST:
            self.reporter.warn(
                f"the checkpoint chosen by cross-entropy (epoch {self.progress.best_epoch}) has "
                f"{100 * (self.progress.last_top1 - best.top1):.0f} points less top-1 than the last one: "
                f"{best.top1:.3f} instead of {self.progress.last_top1:.3f}; lower --lr, or raise optim.smoothing"
            )

    def _epochs(self, train_batches: Batches, held: Batches) -> None:
        done = self.progress.epochs_done
        with open_log(self.out, done) if self.context.is_main else contextlib.nullcontext() as write:
            looked_at = None
            if write is not None and self.config.log is not None:
                looked_at = first_images(held.fixed(), self.task.normalize)
            for epoch in range(done + 1, self.config.epochs + 1):
                metrics = self._epoch(epoch, train_batches, held)
                if write is not None:  # before the progress, so that a kill in between leaves no gap
                    values = {name: getattr(metrics, name) for name in SCALARS}
                    if looked_at is not None:
                        values.update(curves(self.task.evaluated, self.task.bands, looked_at, self.config.seed))
                    write(values, epoch)
                    self._save(metrics)
                self.reporter.on_epoch(metrics, self.config.epochs)

    def _epoch(self, epoch: int, train_batches: Batches, held: Batches) -> Epoch:
        """Train and validate an epoch, and update the progress."""
        begin = time.perf_counter()
        before = self.progress
        epochs, steps = self.config.epochs, train_batches.steps()
        self.reporter.begin(f"epoch {epoch}/{epochs}", epochs * steps, (epoch - 1) * steps, self.config.batch_size)
        seed_epoch(self.config.seed + (self.context.rank << 20), epoch)
        kept = f"{self.out} keeps {'the initial model' if before.best_epoch is None else 'the last good checkpoint'}"
        try:
            train_loss, lr, seen = self.task.epoch(epoch, train_batches, self.reporter.advance)
        except TrainingStopped as error:
            raise TrainingStopped(f"{error}; {kept}") from None
        trained = time.perf_counter() - begin
        found = self.task.validate(held)
        if not math.isfinite(found.loss):
            raise TrainingStopped(
                f"the validation loss after epoch {epoch} is {found.loss}; lower --lr, now {self.config.optim.lr:g}; "
                f"{kept}"
            )
        is_best = before.best is None or found.loss < before.best.loss
        self.progress = msgspec.structs.replace(
            before,
            epochs_done=epoch,
            best_epoch=epoch if is_best else before.best_epoch,
            best=found if is_best else before.best,
            last_top1=found.top1,
            scaler=self.task.scaler.state_dict(),
        )
        self._update_record()
        return Epoch(
            epoch=epoch,
            train_loss=train_loss,
            val_loss=found.loss,
            val_top1=found.top1,
            lr=lr,
            seconds=round(time.perf_counter() - begin, 3),
            images_per_second=round(seen / trained, 1),
            best=is_best,
        )

    def _save(self, metrics: Epoch) -> None:
        append_metrics(self.out, metrics)
        if metrics.best:
            save_run(self.out, self.task.evaluated, self.config, self.record)
        save_progress(self.out, self.task.state(), self.progress)

    def _update_record(self) -> None:
        best = self.progress.best
        if best is None:
            return
        remark = (
            f"the best checkpoint is no better than guessing (validation cross-entropy {best.loss:.3g}, guessing has "
            f"{best.counts.chance_loss:.3g}; top-1 {best.top1:.3f}, the largest class has {best.counts.chance:.3f}): "
            f"training diverged or was too short, with --lr {self.config.optim.lr:g} and "
            f"{counted(self.config.epochs, 'epoch')}"
        )
        self.record = msgspec.structs.replace(
            self.record,
            best_epoch=self.progress.best_epoch,
            val_loss=best.loss,
            remark=remark if best.is_guess else "",
            unfinished=False,
        )
