"""The training loop: epochs of shuffled batches, validation, the best checkpoint, resuming.

``train`` leaves a run folder that loads at every moment: first the model as it starts, then after each epoch the
one with the lowest validation cross-entropy so far. With a fixed seed, machine and number of threads a run on the
CPU is repeated bit by bit, also across a kill and ``resume``; CUDA kernels do not promise that.

Started by ``torchrun`` it trains with all of its processes (``ls_edge.training.distributed``); the first one writes.
Left out: resuming inside an epoch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import nn

from ls_edge.core.arrangement import apply
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, RunError, TrainingStopped, UsageError
from ls_edge.core.files import folder_lock
from ls_edge.data.datasets import open_data
from ls_edge.training.checkpoint import CONFIG, METRICS, WEIGHTS, append_metrics, read_record, save_run
from ls_edge.training.config import RunRecord, TrainConfig
from ls_edge.training.data import Batches, Skipped, choose_augment, normaliser, split
from ls_edge.training.distributed import DistributedContext, process_group, select_device
from ls_edge.training.epoch_trainer import EpochTrainer
from ls_edge.training.methods.base import Method, make_method
from ls_edge.training.metrics import Epoch, Summary, open_board
from ls_edge.training.models.initial_weights import InitialWeights, make_initial_weights
from ls_edge.training.models.view import BlockView
from ls_edge.training.optim import default_rate
from ls_edge.training.precision import (
    autocast,
    choose_device,
    choose_precision,
    choose_threads,
    plain_attention,
    preserve_rng_state,
    seed_epoch,
)
from ls_edge.training.resume import RESUME, TrainingProgress, load_progress, save_progress
from ls_edge.training.teacher import open_teacher
from ls_edge.version import __version__

ABOVE_CHANCE = 3.0
"""Standard deviations above chance from which a checkpoint counts as trained; more would mark short trainings."""


class Listener(Protocol):
    """Receives the progress of training; every call comes from the training thread."""

    def warn(self, text: str) -> None:
        """A warning for the user."""
        ...

    def decoding(self, images: int) -> None:
        """Called before ``images`` are decoded into memory."""
        ...

    def decoded(self, images: int) -> None:
        """Called when ``images`` more were decoded."""
        ...

    def started(self, epoch: int, epochs: int, steps: int) -> None:
        """An epoch begins."""
        ...

    def stepped(self, steps: int, loss: float | None) -> None:
        """Called after ``steps`` more steps; ``loss`` is the mean so far if it was checked."""
        ...

    def finished(self, metrics: Epoch) -> None:
        """An epoch ended."""
        ...


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    listener: Listener,
    resume: bool = False,
    overwrite: bool = False,
    model_named: bool = True,
) -> Summary:
    """Train by ``config`` and write the run folder ``out``; an existing run is replaced only with ``overwrite``.

    ``resume`` continues the run in ``out``; ``config`` is then its own (see ``ls_edge.training.checkpoint``).
    ``model_named``: the user chose the model; otherwise a run given as ``init`` determines it.
    Raises :class:`DataError`, :class:`ModelError`, :class:`RunError`, :class:`UsageError`, and
    :class:`TrainingStopped` for a loss that is not finite or a full disk; the last good checkpoint stays.
    """
    started = time.perf_counter()
    out = Path(out)
    _check_apart(out, config.data.source)
    if not resume and not overwrite:
        _check_new(out)
    select_device(config.device)  # ahead of the random states, which are also those of a GPU
    with preserve_rng_state():
        try:
            with (
                process_group(config.device) as context,
                _run_folder(out) if context.is_main else contextlib.nullcontext(),
            ):
                if context.is_main and not resume and not overwrite:  # again: another may have been there in between
                    _check_new(out)
                return _Training(config, out, listener, context, model_named=model_named).run(resume, started)
        except OSError as error:
            raise TrainingStopped(f"cannot write to {out}: {error.strerror or error}; check path and space") from None


@contextlib.contextmanager
def _run_folder(out: Path) -> Iterator[None]:
    """Lock a run folder; make it first, and remove it again if nothing was written to it."""
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(out):
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                out.rmdir()


def _check_new(out: Path) -> None:
    if (out / CONFIG).exists() or (out / WEIGHTS).exists():
        raise RunError(f"{out} holds a run already; go on with --resume, replace it with --overwrite, or name another")


def _check_apart(out: Path, source: str) -> None:
    """Refuse a run folder inside a folder of images, where it would count as a class or a part of the data."""
    data = Path(source)
    if not source or not data.is_dir():
        return
    inside, outside = out.resolve(), data.resolve()
    if inside == outside or outside in inside.parents:
        raise UsageError(
            f"--out {out} is inside the data {source}, where folders are classes; give --out a folder outside of it"
        )


class _Training:
    def __init__(
        self, config: TrainConfig, out: Path, listener: Listener, context: DistributedContext, *, model_named: bool
    ) -> None:
        self.out, self.listener, self.context = out, listener, context
        self.device = choose_device(config.device)
        self.dtype = choose_precision(config.precision, self.device)
        self.method: Method = make_method(config.method, config.method_args)
        with context.one_first():  # which downloads data and weights where they are not here yet
            images = open_data(config.data.source, "train")
            initial = make_initial_weights(
                config.model, images.classes, seed=config.seed, model_named=model_named, warn=listener.warn
            )
        image = _image_in_force(initial.image, config)
        self.bands, config = _bands_in_force(config, initial)
        self.config = config = _in_force(config, self.method, initial.model, image)
        self.view = initial.view.to(self.device)
        torch.set_num_threads(choose_threads(config.threads, self.view))
        places = self.method.reshape(self.view, self.bands, initial.source, trained=initial.trained)
        self.method.attach(self.view)
        if initial.method_weights and not self.view.take_method(initial.method_weights):
            listener.warn(
                f"{config.model.init} was trained by another method or with other settings of it, whose own parameters "
                "are left out"
            )
        self.view.checkpointing = config.checkpointing
        if config.epochs:
            self.method.begin(self.view, trained=initial.trained)
            if self.method.lacks_teacher and (config.model.init is not None or config.model.pretrained):
                listener.warn("no teacher: the start has no trained classifier for these classes; train it first")
        self.skipped = Skipped(listener.warn)
        self.record = RunRecord(
            version=__version__, model=initial.model, model_args=initial.args,
            kept=tuple(initial.kept[place] for place in places), classes=images.classes, image=image,
            trained_on=images.digest() if config.epochs else "", method=self.method.name,
        )  # fmt: skip
        self.images = images
        self.arrangements = self.method.validation(self.bands, config.validation_orders, config.seed)
        self.normalise = normaliser(image, self.device)
        self.trainer = EpochTrainer(
            self.view, self.method, config, device=self.device, dtype=self.dtype, normalise=self.normalise,
            context=context, bands=self.bands,
            teacher=open_teacher(config.teacher, images.classes, self.device, self.dtype) if config.epochs else None,
        )  # fmt: skip
        self.progress = TrainingProgress()

    def run(self, resume: bool, started: float) -> Summary:
        if resume:
            self.progress = load_progress(self.out, self.view, self.trainer.optimiser, self.trainer.averaged)
            if self.progress.scaler:
                self.trainer.scaler.load_state_dict(self.progress.scaler)
            self.trainer.cost = self.progress.cost
            self.record = msgspec.structs.replace(self._record(), remark=read_record(self.out)[1].remark)
            self.context.barrier()
            if self.context.is_main:
                _keep_lines(self.out / METRICS, self.progress.epochs_done)
        elif self.context.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            for old in (self.out / CONFIG, *self.out.glob("events.out.tfevents.*")):
                old.unlink(missing_ok=True)
            (self.out / METRICS).write_bytes(b"")
            if self.config.epochs:
                self._save_progress()
            save_run(self.out, self.view, self.config, self.record)
        images = validation = 0
        if self.config.epochs:
            train_batches, held = self._batches()
            images, validation = len(train_batches), len(held)
            with plain_attention(self.view, self.device):
                self._epochs(train_batches, held)
        if self.record.problem:
            self.listener.warn(f"{self.record.problem}; lower --lr or train longer")
        if self.context.is_main:
            (self.out / RESUME).unlink(missing_ok=True)
        return Summary(
            run=str(self.out), model=self.record.model, method=self.method.name, blocks=self.view.num_blocks,
            parameters=sum(p.numel() for p in self.view.parameters()), images=images, validation_images=validation,
            skipped=len(self.skipped.reasons), epochs=self.config.epochs, best_epoch=self.progress.best_epoch,
            val_loss=self.progress.best_loss, device=str(self.device), precision=str(self.dtype).split(".")[-1],
            seconds=round(time.perf_counter() - started, 3), cost=self.trainer.cost, settings=self.config,
        )  # fmt: skip

    def _save_progress(self) -> None:
        save_progress(self.out, self.view, self.trainer.optimiser, self.progress, self.trainer.averaged)

    def _batches(self) -> tuple[Batches, Batches]:
        config, images = self.config, self.images.images
        rows, held = split(self.images, config.data.validation, config.seed)
        kind = choose_augment(config.data.augment, config.data.source, self.record.image)
        self.listener.decoding(len(images))

        def make(chosen: Sequence[int], augment: str) -> Batches:
            return Batches(
                [images[row] for row in chosen], self.record.image, config.data, batch_size=config.batch_size,
                seed=config.seed, augment=augment, skipped=self.skipped, on_decoded=self.listener.decoded,
                context=self.context, pin=self.device.type == "cuda",
            )  # fmt: skip

        train_batches, validation = make(rows, kind), make(held, "none")
        if not train_batches.steps():
            raise DataError(
                f"{config.data.source} leaves {len(train_batches)} images to train on (another {len(held)} select the "
                f"checkpoint), fewer than a batch of {config.batch_size}; lower --batch-size"
            )
        return train_batches, validation

    def _epochs(self, train_batches: Batches, held: Batches) -> None:
        def no_board(_: Epoch | None) -> None:
            """Only the main process writes events."""

        done, main = self.progress.epochs_done, self.context.is_main
        board = open_board(self.out, done, self.listener.warn) if main else no_board
        try:
            for epoch in range(done + 1, self.config.epochs + 1):
                metrics = self._epoch(epoch, train_batches, held)
                board(metrics)
                self.listener.finished(metrics)
        finally:
            board(None)

    def _epoch(self, epoch: int, train_batches: Batches, held: Batches) -> Epoch:
        begin = time.perf_counter()
        self.listener.started(epoch, self.config.epochs, train_batches.steps())
        seed_epoch(self.config.seed + (self.context.rank << 20), epoch)
        kept = "the model as it started" if self.progress.best_epoch is None else "the last good checkpoint"
        try:
            train_loss, lr, seen = self.trainer.epoch(
                epoch, train_batches, lambda loss: self.listener.stepped(1, loss)
            )  # fmt: skip
        except TrainingStopped as error:
            raise TrainingStopped(f"{error}; {self.out} keeps {kept}") from None
        trained = time.perf_counter() - begin
        view = self.trainer.evaluated
        loss, top1 = self._validate(view, held)
        if not math.isfinite(loss):
            raise TrainingStopped(
                f"the validation loss after epoch {epoch} is {loss}; lower --lr, now {self.config.optim.lr:g}; "
                f"{self.out} keeps {kept}"
            )
        best = self.progress.best_loss is None or loss < self.progress.best_loss
        self.progress = TrainingProgress(
            epochs_done=epoch, best_epoch=epoch if best else self.progress.best_epoch,
            best_loss=loss if best else self.progress.best_loss, scaler=self.trainer.scaler.state_dict(),
            cost=self.trainer.cost,
        )  # fmt: skip
        metrics = Epoch(
            epoch=epoch, train_loss=train_loss, val_loss=loss, val_top1=top1, lr=lr,
            seconds=round(time.perf_counter() - begin, 3), images_per_second=round(seen / trained, 1), best=best,
        )  # fmt: skip
        if self.context.is_main:
            append_metrics(self.out, msgspec.to_builtins(metrics))
        if best:
            self.record = msgspec.structs.replace(self._record(), remark=self._remark(loss, top1, len(held)))
            if self.context.is_main:
                save_run(self.out, view, self.config, self.record)
        if self.context.is_main:
            self._save_progress()
        return metrics

    def _validate(self, view: BlockView, batches: Batches) -> tuple[float, float]:
        """Mean cross-entropy and top-1 over images and arrangements."""
        view.eval()
        loss, correct, count = 0.0, 0, 0
        for pixels, labels in batches.fixed():
            targets = labels.to(self.device)
            with torch.inference_mode(), autocast(self.device, self.dtype):
                tokens = view.stem(self.normalise(pixels))
                for arrangement in self.arrangements:
                    logits = view.head(apply(arrangement, tokens, view.block)).float()
                    loss += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
                    correct += int((logits.argmax(1) == targets).sum())
            count += len(labels) * len(self.arrangements)
        sums = torch.tensor([loss, correct, count], dtype=torch.float64, device=self.device)
        loss, right, seen = self.context.sum(sums).tolist()
        if not seen:
            raise batches.all_unreadable()
        return loss / seen, right / seen

    def _remark(self, loss: float, top1: float, images: int) -> str:
        """A remark if the best checkpoint is no better than guessing, as after a learning rate far too high."""
        chance = 1 / len(self.record.classes)
        if loss < -math.log(chance) or top1 > chance + ABOVE_CHANCE * math.sqrt(chance * (1 - chance) / images):
            return ""
        return (
            f"the best checkpoint is no better than guessing (validation cross-entropy {loss:.3g}, guessing has "
            f"{-math.log(chance):.3g}; top-1 {top1:.3f}): training diverged or was too short, with --lr "
            f"{self.config.optim.lr:g} and {self.config.epochs} epochs"
        )

    def _record(self) -> RunRecord:
        return msgspec.structs.replace(
            self.record, best_epoch=self.progress.best_epoch, val_loss=self.progress.best_loss
        )


def _bands_in_force(config: TrainConfig, initial: InitialWeights) -> tuple[Bands, TrainConfig]:
    """The bands that are asked for, else those of the run that training starts from, else one band."""
    found = initial.bands
    if config.bands is not None or found is None:
        found = Bands.from_json(config.bands, initial.view.num_blocks)
    written = None if config.bands is None and initial.bands is None else found.to_json()
    return found, msgspec.structs.replace(config, bands=written)


def _image_in_force(image: ImageSpec, config: TrainConfig) -> ImageSpec:
    """The preprocessing of the initial model, with what the configuration names over it."""
    data = config.data
    if data.exif_orientation is not None:
        image = msgspec.structs.replace(image, exif_orientation=data.exif_orientation or msgspec.UNSET)
    if data.crop_pct is not None:
        image = msgspec.structs.replace(image, crop_pct=data.crop_pct)
    if data.interpolation is not None:
        image = msgspec.structs.replace(image, interpolation=data.interpolation)
    return image


def _in_force(config: TrainConfig, method: Method, model: str, image: ImageSpec) -> TrainConfig:
    """The configuration with what it leaves to the model and the method filled in."""
    data = msgspec.structs.replace(config.data, exif_orientation=image.exif_orientation is True)
    optim = config.optim
    if optim.lr is None:
        rate = default_rate(model, from_weights=config.model.init is not None or config.model.pretrained)
        optim = msgspec.structs.replace(optim, lr=rate)
    if optim.average == "auto":
        optim = msgspec.structs.replace(optim, average=method.average)
    return msgspec.structs.replace(config, data=data, optim=optim, method_args=msgspec.to_builtins(method.settings))


def _keep_lines(path: Path, epochs: int) -> None:
    """Drop the metrics of an epoch that a kill cut off before its state was written."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    path.write_bytes(b"".join(lines[:epochs]))
