"""Training loop: epochs of shuffled batches, validation, the best checkpoint, and resuming.

The run folder can be loaded at any time: it contains the initial model and later the model with the lowest validation
cross-entropy so far. With a fixed seed, machine, and number of threads, a run on the CPU is reproducible bit by bit,
even after a kill and ``resume``; CUDA kernels do not guarantee that. A run resumes at the start of an epoch.

If ``torchrun`` starts it, all processes train together (``ls_edge.training.distributed``), and the first one writes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ls_edge.core.bands import Bands, windows
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, ModelError, RunError, TrainingStopped, UsageError
from ls_edge.core.files import folder_lock, is_hub, local_folder, pin_to_commit
from ls_edge.core.logs import OnWarning
from ls_edge.core.text import counted
from ls_edge.data.datasets import describe, image_warnings, open_data
from ls_edge.device.requirements import compiler_problem
from ls_edge.training.class_order import check_class_order, in_class_order
from ls_edge.training.config import ModelConfig, RunRecord, TrainConfig
from ls_edge.training.data import Batches, choose_augment, normalizer, split
from ls_edge.training.distributed import DistributedContext, from_environment, process_group
from ls_edge.training.logs import SCALARS, curves, first_images, open_log
from ls_edge.training.methods.base import Method
from ls_edge.training.methods.registry import make_method
from ls_edge.training.optim import default_rate
from ls_edge.training.precision import (
    choose_device,
    choose_threads,
    is_out_of_memory,
    plain_attention,
    preserve_rng_state,
    seed_epoch,
)
from ls_edge.training.progress import Epoch, Reporter, TrainingResult
from ls_edge.training.runs.checkpoint import (
    CONFIG,
    RESUME,
    WEIGHTS,
    TrainingProgress,
    append_metrics,
    load_progress,
    read_record,
    save_progress,
    save_run,
    shown_model,
    start_metrics,
)
from ls_edge.training.runs.initial_weights import NEW_CLASSIFIER, InitialWeights, make_initial_weights
from ls_edge.training.task import TrainingTask
from ls_edge.version import __version__

ABOVE_CHANCE = 3.0
"""Standard deviations above chance that a checkpoint needs to count as trained; more would flag short runs."""

EXAMPLES = 512
"""Number of images from which a method computes initial values; about 600 images of 26 tokens are enough for the widest
layers of a ViT-S."""
MUCH_LOST = 0.05
"""Loss of top-1 due to free orders above which ``train`` warns; the recipes in docs/choose.md lose less."""


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
    if not resume and not overwrite:
        _check_new(out)
    device = choose_device(config.device)
    context = from_environment(device)
    lock = _run_folder(out) if context.is_main else contextlib.nullcontext()
    with preserve_rng_state():
        try:
            with process_group(context, device), lock:
                training = _Training(config, out, reporter, context, device, model_named=model_named)
                return training.run(resume, started)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingStopped(
                f"out of memory on {device} with {config.batch_size} images per step in "
                f"{counted(config.accumulate, 'part')}; compute a step in more parts, with the same result "
                f"(--set accumulate={2 * config.accumulate}), recompute activations (--set checkpointing=true), or "
                "take smaller batches, images or models"
            ) from None
        except OSError as error:
            raise TrainingStopped(f"cannot write to {out}: {error.strerror or error}; check path and space") from None


@contextlib.contextmanager
def _run_folder(out: Path) -> Iterator[None]:
    """Create and lock a run folder; remove a new folder if nothing was written to it."""
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(out):
            for part in out.glob(".*.part"):  # of a process that was killed while it wrote
                part.unlink(missing_ok=True)
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


def _check_apart(out: Path, source: str) -> None:
    """Raise :class:`UsageError` for a run folder inside the images, where it would count as a class."""
    data = Path(source)
    if not source or not data.is_dir():
        return
    inside, outside = out.resolve(), data.resolve()
    if inside == outside or outside in inside.parents:
        raise UsageError(f"--out {out} is inside the data {source}, where folders are classes; use a folder outside it")


class _Training:
    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        reporter: Reporter,
        context: DistributedContext,
        device: torch.device,
        *,
        model_named: bool,
    ) -> None:
        self.out, self.reporter, self.context = out, reporter, context
        self.skipped: set[str] = set()
        if config.method is not None:
            make_method(config.method, config.method_args)  # raises for wrong settings before anything is loaded
        for name in ("name", "init"):  # the run records the commit, so that it can be repeated
            if is_hub(given := getattr(config.model, name) or ""):
                config = _with_model(config, **{name: pin_to_commit(given)})
        with context.one_first():  # the first process downloads data and weights
            init = config.model.init
            local = _with_model(config, init=None if init is None else str(local_folder(init)))
            self.images = images = in_class_order(open_data(config.data.source, "train"), local)
            initial = make_initial_weights(
                local.model, images.classes, seed=config.seed, model_named=model_named, warn=reporter.warn
            )
        check_class_order(local, images, initial)
        reporter.note(describe(images.account()))
        for warning in image_warnings(images, ""):
            reporter.warn(warning)
        in_order = config.model.has_weights and initial.bands is None
        name = config.chosen_method(
            could_share=initial.could_share, shares=initial.view.shares_weights, in_order=in_order
        )
        method = make_method(name, config.method_args)
        if config.method is None and config.epochs:
            _explain_default(name, local.model, initial, reporter)
        bands, image = _bands_in_force(config, method, initial), _image_in_force(config, initial)
        if config.bands is None and initial.bands is None and not bands.is_one:
            reporter.note(
                f"bands {bands}: the first and the last block keep their place, which costs the least accuracy; "
                f"--bands 0-{bands.num_blocks - 1} trains any order of all blocks"
            )
        self.config = config = _in_force(msgspec.structs.replace(config, method=name), method, initial, bands, image)
        view = initial.view.to(device)
        torch.set_num_threads(choose_threads(config.threads, view))
        self.start = (initial.source or copy.deepcopy(view)).to(device) if initial.trained and config.epochs else None
        places = method.reshape(view, bands, initial.source, trained=initial.trained)
        method.attach(view)
        if method.teacher is not None:
            method.prepare(view, self._examples(image))
        if initial.method_weights and not view.take_method(initial.method_weights):
            reporter.warn(
                f"{config.model.init} was trained by another method or with other settings, so the parameters of its "
                "method are left out"
            )
        view.checkpointing = config.checkpointing
        self.record = RunRecord(
            version=__version__,
            model=initial.model,
            model_args=initial.args,
            kept=tuple(initial.kept[place] for place in places),
            classes=images.classes,
            image=image,
            trained_on=images.digest() if config.epochs else "",
            method=name,
            remark="" if initial.trained or not config.model.has_weights else NEW_CLASSIFIER,
        )
        self.task = TrainingTask(
            view, method, with_compiler(config, device, reporter.warn), self.record, bands, context
        )
        self.progress = TrainingProgress(data=images.fingerprint())

    def _examples(self, image: ImageSpec) -> torch.Tensor:
        """Return normalized training images ``[N, 3, H, W]``, the same ones in every process."""
        rows, _ = split(self.images, self.config.data.validation, self.config.seed)
        chosen = random.Random(self.config.seed).sample(rows, min(EXAMPLES, len(rows)))
        images = [self.images.images[row] for row in sorted(chosen)]
        batches = Batches(images, image, self.config, augment="none", on_skipped=self._skip)
        normalize = normalizer(image, torch.device("cpu"))
        return torch.cat([normalize(pixels) for pixels, _ in batches.fixed()])

    def run(self, resume: bool, started: float) -> TrainingResult:
        if resume:
            self._resume()
        batches = self._batches() if self.config.epochs else None  # may fail, so it comes before the files of a run
        if not resume and self.context.is_main:
            for old in (self.out / CONFIG, *self.out.glob("events.out.tfevents.*")):
                old.unlink(missing_ok=True)
            start_metrics(self.out, 0)
            if self.config.epochs:
                save_progress(self.out, self.task.state(), self.progress)
            save_run(self.out, self.task.view, self.config, self.record)
        images = validation = 0
        if batches is not None:
            train_batches, held = batches
            images, validation = len(train_batches), len(held)
            with plain_attention(self.task.view, self.task.view.device):
                self._measure_start(held)
                self._epochs(train_batches, held)
                self._warn_of_loss(held)
        if self.record.problem:
            how = "lower --lr or train longer" if self.config.epochs else "train it before you use its answers"
            self.reporter.warn(f"{self.record.problem}; {how}")
        if self.context.is_main:
            (self.out / RESUME).unlink(missing_ok=True)
        view = self.task.view
        return TrainingResult(
            run=str(self.out),
            model=shown_model(self.record, view),
            method=self.record.method,
            blocks=view.num_blocks,
            parameters=sum(p.numel() for p in view.parameters()),
            images=images,
            validation_images=validation,
            skipped=len(self.skipped),
            account=self.images.account(self.skipped),
            epochs=self.config.epochs,
            best_epoch=self.progress.best_epoch,
            val_loss=self.progress.best_loss,
            device=str(view.device),
            precision=str(self.task.dtype).removeprefix("torch."),
            seconds=round(time.perf_counter() - started, 3),
            settings=self.config,
            log=f"tensorboard --logdir {self.out}" if self.config.epochs else "",
        )

    def _resume(self) -> None:
        tensors, progress = load_progress(self.out)
        if progress.data != self.progress.data:
            raise RunError(
                f"{self.config.data.source} has changed since {self.out} was started (files were added, removed, "
                "renamed, exchanged or rewritten); restore it, or start again in another folder with --init"
            )
        self.progress = progress
        try:
            self.task.load_state(tensors)
        except (KeyError, ValueError, RuntimeError, ModelError) as error:
            reason = str(error).splitlines()[0].rstrip(": ")
            raise RunError(f"cannot use {self.out / RESUME} ({reason}); train again with --overwrite") from None
        if self.progress.scaler:
            self.task.scaler.load_state_dict(self.progress.scaler)
        self._update_record(read_record(self.out)[1].remark)
        self.context.barrier()
        if self.context.is_main:
            start_metrics(self.out, self.progress.epochs_done)

    def _batches(self) -> tuple[Batches, Batches]:
        config, images = self.config, self.images.images
        rows, held = split(self.images, config.data.validation, config.seed)
        kind = choose_augment(config.data.augment, config.data.source, self.record.image)
        self.reporter.begin("reading images", len(images))

        def make(chosen: Sequence[int], augment: str) -> Batches:
            return Batches(
                [images[row] for row in chosen],
                self.record.image,
                config,
                augment=augment,
                on_skipped=self._skip,
                on_decoded=self.reporter.advance,
                context=self.context,
                pin=self.task.view.device.type == "cuda",
            )

        train_batches, validation = make(rows, kind), make(held, "none")
        if not train_batches.steps():
            raise DataError(
                f"{config.data.source} leaves {counted(len(train_batches), 'image')} to train on (another "
                f"{len(held)} select the checkpoint), fewer than a batch of {config.batch_size}; lower --batch-size"
            )
        return train_batches, validation

    def _skip(self, why: str) -> None:
        if why not in self.skipped:
            self.skipped.add(why)
            self.reporter.warn(f"left out: {why}")

    def _measure_start(self, held: Batches) -> None:
        """Measure the initial model in trained order, unless a resumed run has done so already."""
        start = self.task.method.teacher or self.start
        if start is not None and not self.progress.epochs_done:
            self.progress = msgspec.structs.replace(self.progress, start_top1=self.task.in_trained_order(start, held))
        self.start = None

    def _warn_of_loss(self, held: Batches) -> None:
        """Warn if validation is far below the accuracy in trained order of this model or of the initial one."""
        found, bands = self.progress, self.task.bands
        reference = max(self.task.in_trained_order(self.task.evaluated, held), found.start_top1 or 0.0)
        if found.best_epoch is None or reference - found.best_top1 <= MUCH_LOST:
            return
        if self.record.method == "shared":
            advice = ["train longer", "raise method_args.adapter_rank"]
        else:
            narrower = [item for item in windows(bands.num_blocks) if bands.contains(item) and item != bands]
            advice = ["train longer", *(f"allow fewer orders (--bands {item})" for item in narrower[1:2])]
            advice.append("let the blocks share their weights (--method shared), which makes all orders equal")
        self.reporter.warn(
            f"the best checkpoint has a top-1 of {found.best_top1:.3f} in the orders of {bands}, against "
            f"{reference:.3f} in trained order{' before training' if reference == found.start_top1 else ''}; "
            f"{', '.join(advice[:-1])}, or {advice[-1]}"
        )

    def _epochs(self, train_batches: Batches, held: Batches) -> None:
        done = self.progress.epochs_done
        with open_log(self.out, done) if self.context.is_main else contextlib.nullcontext() as write:
            looked_at = None
            if write is not None and self.config.log is not None:
                looked_at = first_images(held.fixed(), self.task.normalize)
            for epoch in range(done + 1, self.config.epochs + 1):
                metrics = self._epoch(epoch, train_batches, held)
                values = {name: getattr(metrics, name) for name in SCALARS}
                if looked_at is not None:
                    values.update(curves(self.task.evaluated, self.task.bands, looked_at, self.config.seed))
                if write is not None:
                    write(values, epoch)
                self.reporter.on_epoch(metrics, self.config.epochs)

    def _epoch(self, epoch: int, train_batches: Batches, held: Batches) -> Epoch:
        begin = time.perf_counter()
        before = self.progress
        epochs, steps = self.config.epochs, train_batches.steps()
        self.reporter.begin(f"epoch {epoch}/{epochs}", epochs * steps, (epoch - 1) * steps)
        seed_epoch(self.config.seed + (self.context.rank << 20), epoch)
        kept = f"{self.out} keeps {'the initial model' if before.best_epoch is None else 'the last good checkpoint'}"
        try:
            train_loss, lr, seen = self.task.epoch(epoch, train_batches, self.reporter.advance)
        except TrainingStopped as error:
            raise TrainingStopped(f"{error}; {kept}") from None
        trained = time.perf_counter() - begin
        loss, top1 = self.task.validate(held)
        if not math.isfinite(loss):
            raise TrainingStopped(
                f"the validation loss after epoch {epoch} is {loss}; lower --lr, now {self.config.optim.lr:g}; {kept}"
            )
        best = before.best_loss is None or loss < before.best_loss
        self.progress = TrainingProgress(
            epochs_done=epoch,
            best_epoch=epoch if best else before.best_epoch,
            best_loss=loss if best else before.best_loss,
            scaler=self.task.scaler.state_dict(),
            best_top1=top1 if best else before.best_top1,
            start_top1=before.start_top1,
            data=before.data,
        )
        metrics = Epoch(
            epoch=epoch,
            train_loss=train_loss,
            val_loss=loss,
            val_top1=top1,
            lr=lr,
            seconds=round(time.perf_counter() - begin, 3),
            images_per_second=round(seen / trained, 1),
            best=best,
        )
        if best:
            self._update_record(self._remark(loss, top1, len(held)))
        if self.context.is_main:
            append_metrics(self.out, metrics)
            if best:
                save_run(self.out, self.task.evaluated, self.config, self.record)
            save_progress(self.out, self.task.state(), self.progress)
        return metrics

    def _remark(self, loss: float, top1: float, images: int) -> str:
        """Return a remark if the best checkpoint only guesses, for example because the learning rate was too high."""
        chance = 1 / len(self.record.classes)
        if loss < -math.log(chance) or top1 > chance + ABOVE_CHANCE * math.sqrt(chance * (1 - chance) / images):
            return ""
        return (
            f"the best checkpoint is no better than guessing (validation cross-entropy {loss:.3g}, guessing has "
            f"{-math.log(chance):.3g}; top-1 {top1:.3f}): training diverged or was too short, with --lr "
            f"{self.config.optim.lr:g} and {counted(self.config.epochs, 'epoch')}"
        )

    def _update_record(self, remark: str) -> None:
        self.record = msgspec.structs.replace(
            self.record, best_epoch=self.progress.best_epoch, val_loss=self.progress.best_loss, remark=remark
        )


def with_compiler(config: TrainConfig, device: torch.device, warn: OnWarning) -> TrainConfig:
    """Return the configuration with ``compile: auto`` resolved; warn if blocks cannot be compiled for a GPU."""
    if config.compile != "auto":
        return config
    problem = compiler_problem() if device.type == "cuda" else ""
    if problem:
        warn(f"trains without compiled blocks, which is slower: {problem}; install it, or set compile: off")
    return msgspec.structs.replace(config, compile=device.type == "cuda" and not problem)


def _with_model(config: TrainConfig, **changes: str | None) -> TrainConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))


def _explain_default(method: str, model: ModelConfig, initial: InitialWeights, reporter: Reporter) -> None:
    if method == "shared" and not initial.view.shares_weights:
        reporter.note(
            "method shared: one block for all steps; its teacher is the initial model, which was trained in one order; "
            "--method anyorder keeps different blocks and loses more accuracy"
        )
    elif not initial.trained and model.has_weights and initial.bands is None:
        reporter.warn(
            "the classifier is new, so there is no trained start, and pretrained blocks lose accuracy when they are "
            "shuffled: train with --method sequential first, then train the run that this writes (--init)"
        )


def _bands_in_force(config: TrainConfig, method: Method, initial: InitialWeights) -> Bands:
    """Return the configured bands, the bands of the initial run, or the method's default, in this order."""
    if config.bands is not None:
        return config.block_bands(initial.view.num_blocks)
    return method.default_bands(initial.view) if initial.bands is None else initial.bands


def _image_in_force(config: TrainConfig, initial: InitialWeights) -> ImageSpec:
    """Return the preprocessing of the initial model, overridden by the configuration."""
    data = config.data
    changes: dict[str, Any] = {"crop_pct": data.crop_pct, "interpolation": data.interpolation}
    if data.exif_orientation is not None:
        changes["exif_orientation"] = data.exif_orientation or msgspec.UNSET
    return msgspec.structs.replace(
        initial.image, **{name: value for name, value in changes.items() if value is not None}
    )


def _in_force(
    config: TrainConfig, method: Method, initial: InitialWeights, bands: Bands, image: ImageSpec
) -> TrainConfig:
    """Return the configuration with the defaults of the model and the method filled in."""
    optim = config.optim
    if optim.lr is None:
        rate = default_rate(initial.model, method, from_weights=config.model.has_weights)
        optim = msgspec.structs.replace(optim, lr=rate)
    if optim.average == "auto":
        optim = msgspec.structs.replace(optim, average=method.average)
    name = config.model.name if is_hub(config.model.name) else initial.model  # of the run that init names
    return msgspec.structs.replace(
        config,
        data=msgspec.structs.replace(config.data, exif_orientation=image.exif_orientation is True),
        model=msgspec.structs.replace(config.model, name=name),
        bands=None if config.bands is None and initial.bands is None and bands.is_one else bands.to_json(),
        optim=optim,
        method_args=msgspec.to_builtins(method.settings),
    )
