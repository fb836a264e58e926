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
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import nn

from ls_edge.arrangement import apply
from ls_edge.bundle import ImageSpec
from ls_edge.errors import DataError, RunError, TrainingStopped, UsageError
from ls_edge.training.averaged_weights import Average
from ls_edge.training.checkpoint import CONFIG, METRICS, WEIGHTS, append_metrics, read_record, save_run
from ls_edge.training.config import RunRecord, TrainConfig
from ls_edge.training.data import Batches, Skipped, choose_augment, normaliser, split
from ls_edge.training.distributed import World, joined
from ls_edge.training.epoch_trainer import Stepper
from ls_edge.training.folder_lock import folder_lock
from ls_edge.training.methods.base import Method, make_method
from ls_edge.training.metrics import Epoch, Summary, open_board
from ls_edge.training.models.initial_weights import make_start
from ls_edge.training.optim import default_rate, make_optimiser
from ls_edge.training.precision import (
    autocast,
    choose_device,
    choose_precision,
    choose_threads,
    plain_attention,
    seed_epoch,
    settled,
)
from ls_edge.training.resume import RESUME, Progress, load_progress, save_progress
from ls_edge.training.timm_data import open_images
from ls_edge.version import __version__

LUCK = 3.0
"""Standard deviations of a guess's accuracy above chance that a checkpoint has to reach to count as trained."""


class Listener(Protocol):
    """Who watches; every call comes from the training thread."""

    def warn(self, text: str) -> None:
        """Something that the user should know."""
        ...

    def decoding(self, images: int) -> None:
        """So many images are about to be decoded into memory."""
        ...

    def decoded(self, images: int) -> None:
        """So many more of them were."""
        ...

    def started(self, epoch: int, epochs: int, steps: int) -> None:
        """An epoch begins."""
        ...

    def stepped(self, steps: int, loss: float | None) -> None:
        """So many more steps are done; ``loss`` where it was looked at."""
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
    """Train as ``config`` says and leave a run in ``out``; one that is there already only goes with ``overwrite``.

    ``resume`` goes on with the run in ``out``; ``config`` is then its own (see ``ls_edge.training.checkpoint``).
    ``model_named`` says whether the user chose the model, or a run given as ``init`` may.
    Raises :class:`DataError`, :class:`ModelError`, :class:`RunError`, :class:`UsageError`, and
    :class:`TrainingStopped` for a loss that is no number or a disk that is full; the last good checkpoint stays.
    """
    started = time.perf_counter()
    out = Path(out)
    _check_apart(out, config.data.source)
    if not resume and not overwrite:
        _check_new(out)
    with settled():
        try:
            with joined(config.device) as world, folder_lock(out) if world.leads else contextlib.nullcontext():
                if world.leads and not resume and not overwrite:  # again: another may have been there in between
                    _check_new(out)
                return _Training(config, out, listener, world, model_named=model_named).run(resume, started)
        except OSError as error:
            raise TrainingStopped(f"cannot write to {out}: {error.strerror or error}; check path and space") from None


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
    def __init__(self, config: TrainConfig, out: Path, listener: Listener, world: World, *, model_named: bool) -> None:
        self.out, self.listener, self.world = out, listener, world
        self.device = choose_device(config.device)
        self.dtype = choose_precision(config.precision, self.device)
        self.method: Method = make_method(config.method, config.method_args)
        images = open_images(config.data.source, "train")
        start = make_start(config.model, images.classes, seed=config.seed, model_named=model_named, warn=listener.warn)
        image = _image_in_force(start.image, config)
        self.config = config = _in_force(config, self.method, start.model, image)
        self.view = start.view.to(self.device)
        torch.set_num_threads(choose_threads(config.threads, self.view))
        self.method.attach(self.view)
        if start.method_weights and not self.view.take_method(start.method_weights):
            listener.warn(f"{config.model.init} was trained by another method, whose own parameters are left out")
        self.view.checkpointing = config.checkpointing
        if config.epochs:
            self.method.begin(self.view, trained=start.trained)
            if self.method.untaught and (config.model.init is not None or config.model.pretrained):
                listener.warn("no teacher: the start has no trained classifier for these classes; train it first")
        self.skipped = Skipped(listener.warn)
        self.record = RunRecord(
            version=__version__, model=start.model, model_args=start.args, kept=start.kept, classes=images.classes,
            image=image, trained_on=images.digest() if config.epochs else "", method=self.method.name,
        )  # fmt: skip
        self.images = images
        self.orders = self.method.validation(self.view.num_blocks, config.validation_orders, config.seed)
        world.same_weights(self.view)
        self.average = _average(self.view, config) if config.epochs else None
        self.optimiser = make_optimiser(self.view, config.optim)
        self.normalise = normaliser(image, self.device)
        self.stepper = Stepper(
            self.view, self.method, self.optimiser, config, out, device=self.device, dtype=self.dtype,
            normalise=self.normalise, world=world, average=self.average,
        )  # fmt: skip
        self.progress = Progress()

    def run(self, resume: bool, started: float) -> Summary:
        if resume:
            self.progress = load_progress(self.out, self.view, self.optimiser, self.average)
            if self.progress.scaler:
                self.stepper.scaler.load_state_dict(self.progress.scaler)
            self.stepper.cost = self.progress.cost
            if self.progress.best_epoch is not None:
                self.stepper.kept = "the last good checkpoint"
            self.record = msgspec.structs.replace(self._record(), remark=read_record(self.out)[1].remark)
            self.world.wait()
            if self.world.leads:
                _keep_lines(self.out / METRICS, self.progress.epochs_done)
        elif self.world.leads:
            self.out.mkdir(parents=True, exist_ok=True)
            for old in (self.out / CONFIG, *self.out.glob("events.out.tfevents.*")):
                old.unlink(missing_ok=True)
            (self.out / METRICS).write_bytes(b"")
            if self.config.epochs:
                save_progress(self.out, self.view, self.optimiser, self.progress, self.average)
            save_run(self.out, self.view, self.config, self.record)
        images = validation = 0
        if self.config.epochs:
            train_batches, held = self._batches()
            images, validation = len(train_batches), len(held)
            with plain_attention(self.view, self.device):
                self._epochs(train_batches, held)
        if self.record.problem:
            self.listener.warn(f"{self.record.problem}; lower --lr or train longer")
        if self.world.leads:
            (self.out / RESUME).unlink(missing_ok=True)
        return Summary(
            run=str(self.out), model=self.record.model, method=self.method.name, blocks=self.view.num_blocks,
            parameters=sum(p.numel() for p in self.view.parameters()), images=images, validation_images=validation,
            skipped=len(self.skipped.reasons), epochs=self.config.epochs, best_epoch=self.progress.best_epoch,
            val_loss=self.progress.best_loss, device=str(self.device), precision=str(self.dtype).split(".")[-1],
            seconds=round(time.perf_counter() - started, 3), cost=self.stepper.cost, settings=self.config,
        )  # fmt: skip

    def _batches(self) -> tuple[Batches, Batches]:
        config, images = self.config, self.images.images
        rows, held = split(self.images, config.data.validation, config.seed)
        kind = choose_augment(config.data.augment, config.data.source, self.record.image)
        self.listener.decoding(len(images))

        def make(chosen: Sequence[int], augment: str) -> Batches:
            return Batches(
                [images[row] for row in chosen], self.record.image, config.data, batch_size=config.batch_size,
                seed=config.seed, augment=augment, skipped=self.skipped, on_decoded=self.listener.decoded,
                world=self.world, pin=self.device.type == "cuda",
            )  # fmt: skip

        train_batches, validation = make(rows, kind), make(held, "none")
        if not train_batches.steps():
            raise DataError(
                f"{config.data.source} leaves {len(train_batches)} images to train on (another {len(held)} select the "
                f"checkpoint), fewer than a batch of {config.batch_size}; lower --batch-size"
            )
        return train_batches, validation

    def _epochs(self, train_batches: Batches, held: Batches) -> None:
        config = self.config
        if config.compile == "on" or (config.compile == "auto" and self.device.type == "cuda"):
            self.view.compile_blocks()

        def no_board(_: Epoch | None) -> None:
            """Only the first process writes events."""

        leads = self.world.leads
        board = open_board(self.out, self.progress.epochs_done, self.listener.warn) if leads else no_board
        try:
            for epoch in range(self.progress.epochs_done + 1, config.epochs + 1):
                metrics = self._epoch(epoch, train_batches, held)
                board(metrics)
                self.listener.finished(metrics)
        finally:
            board(None)

    def _epoch(self, epoch: int, train_batches: Batches, held: Batches) -> Epoch:
        begin = time.perf_counter()
        self.listener.started(epoch, self.config.epochs, train_batches.steps())
        seed_epoch(self.config.seed + (self.world.rank << 20), epoch)
        train_loss, lr, seen = self.stepper.epoch(
            epoch, train_batches, lambda loss: self.listener.stepped(1, loss)
        )  # fmt: skip
        trained = time.perf_counter() - begin
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            loss, top1 = self._validate(held)
            if not math.isfinite(loss):
                raise TrainingStopped(
                    f"the validation loss after epoch {epoch} is {loss}; lower --lr, now {self.config.optim.lr:g}; "
                    f"{self.out} keeps {self.stepper.kept}"
                )
            best = self.progress.best_loss is None or loss < self.progress.best_loss
            self.progress = Progress(
                epochs_done=epoch, best_epoch=epoch if best else self.progress.best_epoch,
                best_loss=loss if best else self.progress.best_loss, scaler=self.stepper.scaler.state_dict(),
                cost=self.stepper.cost,
            )  # fmt: skip
            metrics = Epoch(
                epoch=epoch, train_loss=train_loss, val_loss=loss, val_top1=top1, lr=lr,
                seconds=round(time.perf_counter() - begin, 3), images_per_second=round(seen / trained, 1), best=best,
            )  # fmt: skip
            if self.world.leads:
                append_metrics(self.out, msgspec.to_builtins(metrics))
            if best:
                self.stepper.kept = "the last good checkpoint"
                self.record = msgspec.structs.replace(self._record(), remark=self._remark(loss, top1, len(held)))
                if self.world.leads:
                    save_run(self.out, self.view, self.config, self.record)
        if self.world.leads:
            save_progress(self.out, self.view, self.optimiser, self.progress, self.average)
        return metrics

    def _validate(self, batches: Batches) -> tuple[float, float]:
        """Mean cross-entropy and top-1 over images and orders."""
        self.view.eval()
        loss, correct, count = 0.0, 0, 0
        for pixels, labels in batches.fixed():
            targets = labels.to(self.device)
            with torch.inference_mode(), autocast(self.device, self.dtype):
                tokens = self.view.stem(self.normalise(pixels))
                for order in self.orders:
                    logits = self.view.head(apply(order, tokens, self.view.block)).float()
                    loss += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
                    correct += int((logits.argmax(1) == targets).sum())
            count += len(labels) * len(self.orders)
        loss, right, seen = self.world.total([loss, float(correct), float(count)], self.device)
        return loss / seen, right / seen

    def _remark(self, loss: float, top1: float, images: int) -> str:
        """Say so where the best checkpoint is no better than guessing, as after a learning rate far too high."""
        chance = 1 / len(self.record.classes)
        if loss < -math.log(chance) or top1 > chance + LUCK * math.sqrt(chance * (1 - chance) / images):
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


def _image_in_force(image: ImageSpec, config: TrainConfig) -> ImageSpec:
    """How images are preprocessed: as the start says, and turned upright where the configuration says so."""
    if config.data.exif_orientation is None:
        return image
    return msgspec.structs.replace(image, exif_orientation=config.data.exif_orientation or msgspec.UNSET)


def _in_force(config: TrainConfig, method: Method, model: str, image: ImageSpec) -> TrainConfig:
    """The configuration with what it leaves to the model and the method filled in."""
    data = msgspec.structs.replace(config.data, exif_orientation=image.exif_orientation is True)
    optim = config.optim
    if optim.lr is None:
        rate = default_rate(model, started=config.model.init is not None or config.model.pretrained)
        optim = msgspec.structs.replace(optim, lr=rate)
    if optim.average == "auto":
        optim = msgspec.structs.replace(optim, average=method.average)
    return msgspec.structs.replace(config, data=data, optim=optim, method_args=msgspec.to_builtins(method.settings))


def _average(view: nn.Module, config: TrainConfig) -> Average | None:
    o = config.optim
    if o.average == "ema" or o.average == "swa":
        return Average(view, o.average, o.average_decay, o.average_from)
    return None


def _keep_lines(path: Path, epochs: int) -> None:
    """Drop the metrics of an epoch that a kill cut off before its state was written."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    path.write_bytes(b"".join(lines[:epochs]))
