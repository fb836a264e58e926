"""Everything that a training needs before its first step: images, start, method, model, and the settings in force."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, LsEdgeError
from ls_edge.core.files import is_hub, local_folder, pin_to_commit
from ls_edge.core.logs import OnWarning
from ls_edge.core.text import counted
from ls_edge.data.content import KnownImages, digests_of
from ls_edge.data.datasets import ImageSet, describe, image_warnings, open_data
from ls_edge.device.requirements import compiler_problem
from ls_edge.training.class_order import check_class_order, in_class_order
from ls_edge.training.config import RunFile, RunRecord, TrainConfig
from ls_edge.training.data import Batches, choose_augment, normalizer
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.methods.base import Method
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.small_models import build
from ls_edge.training.optim import default_rate
from ls_edge.training.precision import choose_precision, choose_threads, plain_attention
from ls_edge.training.progress import Reporter
from ls_edge.training.runs.checkpoint import CONFIG, WEIGHTS, TrainingProgress, read_record
from ls_edge.training.runs.initial_weights import NEW_CLASSIFIER, InitialWeights, make_initial_weights
from ls_edge.training.runs.teacher import Teacher, open_teacher
from ls_edge.training.split import DataSplit, split_images
from ls_edge.training.task import TrainingTask
from ls_edge.training.validation import answers_of, judge
from ls_edge.version import __version__

EXAMPLES = 512
"""Number of images from which a method computes initial values; about 600 images of 26 tokens are enough for the widest
layers of a ViT-S."""
VALIDATION = 0.1


class TrainingImages:
    """The images of a training: those to train on and those that select the checkpoint."""

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        known: Sequence[KnownImages],
        reporter: Reporter,
        context: DistributedContext,
    ) -> None:
        """Read the images to find copies, and split them; ``known`` are those of the start."""
        assert config.data.validation is not None
        assert config.data.split_seed is not None
        self.images, self.config, self.reporter, self.context = images, config, reporter, context
        self.skipped: set[str] = set()
        reporter.begin("reading images", len(images))
        digests = digests_of(images.images, reporter.advance)
        self.split: DataSplit = split_images(images, digests, config.data.validation, config.data.split_seed, known)
        self.trained_on = KnownImages.of(digests[self.split.train], *known).write()
        names = "\n".join(
            f"{image.label}\0{image.name}\0{digest}" for image, digest in zip(images.images, digests, strict=True)
        )
        self.fingerprint = hashlib.sha256(f"{names}\n{self.split.held}".encode("utf-8", "surrogateescape")).hexdigest()
        held, source = len(self.split.held), images.source
        if self.split.copies:
            reporter.note(f"{source}: {counted(self.split.copies, 'image')} are copies of others; copies are not split")
        if absent := {*range(len(images.classes))}.difference(images.images[row].label for row in self.split.held):
            reporter.note(
                f"{source}: too few different images for validation images of "
                f"{', '.join(images.classes[label] for label in sorted(absent)[:5])}{', …' * (len(absent) > 5)}"
            )
        if self.split.known:
            reporter.warn(
                f"{self.split.known:,} of the {counted(held, 'validation image')} of {source} were training images of "
                "the start, so validation is too good; use other images"
            )
        if len(self.split.train) < config.batch_size:
            raise DataError(
                f"{source} leaves {counted(len(self.split.train), 'image')} to train on (another {held} select the "
                f"checkpoint), fewer than a batch of {config.batch_size}; lower --batch-size"
            )

    def decode(self, image: ImageSpec, *, pin: bool) -> tuple[Batches, Batches]:
        """Return the batches of both parts."""
        kind = choose_augment(self.config.data.augment, self.config.data.source, image)
        self.reporter.begin("decoding images", len(self.images))
        sides = (self.split.train, kind), (self.split.held, "none")
        return tuple(self._batches(rows, image, augment, pin=pin) for rows, augment in sides)  # type: ignore[return-value]

    def examples(self, image: ImageSpec) -> torch.Tensor:
        """Return normalized training images ``[N, 3, H, W]``, the same ones in every process."""
        rows = self.split.train
        chosen = random.Random(self.config.seed).sample(rows, min(EXAMPLES, len(rows)))
        batches = self._batches(sorted(chosen), image, "none", pin=False, alone=True)
        normalize = normalizer(image, torch.device("cpu"))
        return torch.cat([normalize(batch.pixels) for batch in batches.fixed()])

    def _batches(
        self, rows: Sequence[int], image: ImageSpec, augment: str, *, pin: bool, alone: bool = False
    ) -> Batches:
        return Batches(
            [self.images.images[row] for row in rows],
            image,
            self.config,
            augment=augment,
            on_skipped=self._skip,
            on_decoded=(lambda: None) if alone else self.reporter.advance,
            context=DistributedContext() if alone else self.context,
            pin=pin,
        )

    def _skip(self, why: str) -> None:
        if why not in self.skipped:
            self.skipped.add(why)
            self.reporter.warn(f"left out: {why}")


class Setup:
    """A training before its first step."""

    def __init__(
        self,
        config: TrainConfig,
        reporter: Reporter,
        context: DistributedContext,
        device: torch.device,
        *,
        model_named: bool,
        resumed: TrainingProgress | None = None,
    ) -> None:
        """Prepare a training; ``resumed`` is the progress of a run that continues with its own settings."""
        if config.method is not None:
            make_method(config.method, config.method_args)  # raises for wrong settings before anything is loaded
        self.reporter, self.context, self.device = reporter, context, device
        config, self.images, initial = self._load(config, model_named=model_named)
        self.image = _image_in_force(config, initial)
        torch.set_num_threads(choose_threads(config.threads, initial.view))
        initial.view.to(device)
        start = config.model.init if initial.run is None else str(initial.run.folder)
        parents = [each for path in (start, config.teacher.weights or config.teacher.model) for each in _run_of(path)]
        self.config = _with_split(config, [file for file, _ in parents])
        known = [each for _, record in parents if (each := KnownImages.read(record.trained_on)) is not None]
        self.data = TrainingImages(self.images, self.config, known, reporter, context) if config.epochs else None
        self.batches = None if self.data is None else self.data.decode(self.image, pin=device.type == "cuda")
        self.start = None if resumed is None else resumed.start
        """Accuracy of the initial model in trained order; None if it was not trained on these classes."""
        self.teacher = None if resumed is None else resumed.teacher
        trained_on = KnownImages.of(np.array([], np.uint64), *known).write() if known else ""
        self.record, self.task = self._build(
            initial,
            open_teacher(
                self.config.teacher,
                self.images.classes,
                self.device,
                choose_precision(self.config.precision, self.device),
            )
            if self.config.epochs
            else None,
            trained_on if self.data is None else self.data.trained_on,
            judges=resumed is None,
        )

    def _load(self, config: TrainConfig, *, model_named: bool) -> tuple[TrainConfig, ImageSet, InitialWeights]:
        """Return the settings with pinned names, the images in the order of the classes, and the initial model."""
        for name in ("name", "init"):  # the run records the commit, so that it can be repeated
            if is_hub(given := getattr(config.model, name) or ""):
                config = _with_model(config, **{name: pin_to_commit(given)})
        with self.context.one_first():  # the first process downloads data and weights
            init = config.model.init
            local = _with_model(config, init=None if init is None else str(local_folder(init)))
            images = in_class_order(open_data(config.data.source, "train"), local)
            initial = make_initial_weights(
                local.model, images.classes, seed=config.seed, model_named=model_named, warn=self.reporter.warn
            )
        check_class_order(local, images, initial)
        self.reporter.note(describe(images.account()))
        for warning in image_warnings(images):
            self.reporter.warn(warning)
        return config, images, initial

    def _judge(self, initial: InitialWeights, teacher: Teacher | None) -> None:
        """Measure the start and the teacher on the validation images, and warn of those that only guess."""
        assert self.batches is not None
        config, images = self.config, self.images
        held, classes = self.batches[1], len(images.classes)
        is_changed = config.model.depth is not None or (initial.run is not None and initial.source is None)
        if initial.trained and not is_changed:  # at another size, or without some of its blocks, it may well guess
            view = (initial.source or initial.view).to(self.device)
            dtype = choose_precision(config.precision, self.device)
            order = Arrangement.plain(range(view.num_blocks))
            answer = answers_of(view, [order], normalizer(self.image, self.device), dtype)
            name = config.model.init or f"the pretrained {initial.model}"
            self.start = judge(name, answer, classes, images.source, held, self.context)
        if teacher is not None:
            name = f"the teacher {config.teacher.model}"
            self.teacher = judge(
                name, lambda pixels: [teacher.logits(pixels)], classes, images.source, held, self.context
            )
            self.reporter.note(f"{name}: top-1 {self.teacher.top1:.3f} on the validation images")
        for found in (self.start, self.teacher):
            if found is not None and found.problem:
                self.reporter.warn(
                    f"{found.problem}; its answers are not used: name the order (--class-order FILE), or "
                    "train a new classifier first (--method sequential)"
                )

    def _build(
        self, initial: InitialWeights, teacher: Teacher | None, trained_on: str, *, judges: bool
    ) -> tuple[RunRecord, TrainingTask]:
        """Choose the method, shape the model, and return the record and the task of the run."""
        config, view, reporter = self.config, initial.view, self.reporter
        with plain_attention(view, self.device):
            if self.batches is not None and judges:
                self._judge(initial, teacher)
        if self.start is not None and self.start.problem:
            torch.manual_seed(config.seed)
            fresh, weights = build(initial.model, initial.args).weights(), view.weights()
            view.load_weights({**weights, **{name: fresh[name] for name in view.classifier}})
        name = _method_name(config, initial, reporter)
        method = make_method(name, config.method_args)
        bands = initial.bands or method.default_bands(view)
        if config.bands is not None:
            bands = config.block_bands(view.num_blocks)
        elif initial.bands is None and not bands.is_one:
            reporter.note(
                f"bands {bands}: the first and the last block keep their place, which costs the least accuracy; "
                f"--bands 0-{bands.num_blocks - 1} trains any order of all blocks"
            )
        config = self.config = _in_force(
            msgspec.structs.replace(config, method=name), method, initial, bands, self.image
        )
        if self.start is not None and self.start.problem:
            method.ignore_answers()
        places = method.reshape(view, bands, initial.source, trained=initial.trained)
        method.attach(view)
        if method.teacher is not None and self.data is not None:
            method.prepare(view, self.data.examples(self.image))
        if initial.method_weights and not view.take_method(initial.method_weights):
            reporter.warn(
                f"{config.model.init} was trained by another method or with other settings, so the parameters of its "
                "method are left out"
            )
        view.checkpointing = config.checkpointing
        judged = [found.problem for found in (self.start, self.teacher) if found is not None]
        record = RunRecord(
            version=__version__,
            model=initial.model,
            model_args=initial.args,
            kept=tuple(initial.kept[place] for place in places),
            classes=self.images.classes,
            image=self.image,
            trained_on=trained_on,
            method=name,
            remark="" if initial.trained or not config.model.has_weights else NEW_CLASSIFIER,
            start_remark="; ".join(filter(None, judged)),
            unfinished=config.epochs > 0,
        )
        compiled = with_compiler(config, self.device, reporter.warn)
        taught = teacher if self.teacher is None or not self.teacher.problem else None
        return record, TrainingTask(view, method, compiled, record, bands, self.context, taught)


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


def _run_of(path: str | None) -> list[tuple[RunFile, RunRecord]]:
    """Return the configuration of a run, or of the run that a file of weights belongs to, if it is one."""
    folder = Path(path or "")
    if folder.name == WEIGHTS and folder.is_file():
        with contextlib.suppress(LsEdgeError):  # another program's configuration
            return [read_record(folder.parent)]
    return [read_record(folder)] if path and (folder / CONFIG).is_file() else []


def _with_split(config: TrainConfig, parents: Sequence[RunFile]) -> TrainConfig:
    """Return the configuration with the validation images of the first run in ``parents``, unless it sets others."""
    data = config.data
    parts = [data.validation, *(file.data.validation for file in parents), VALIDATION]
    seeds = [data.split_seed, *(file.data.split_seed for file in parents), config.seed]
    part, seed = (next(value for value in values if value is not None) for values in (parts, seeds))
    return msgspec.structs.replace(config, data=msgspec.structs.replace(data, validation=part, split_seed=seed))


def _method_name(config: TrainConfig, initial: InitialWeights, reporter: Reporter) -> str:
    """Return the method in force; explain a default."""
    model, view = config.model, initial.view
    in_order = model.has_weights and initial.bands is None
    could_share = initial.could_share and model.depth is None
    name = config.chosen_method(could_share=could_share, shares=view.shares_weights, in_order=in_order)
    if config.method is not None or not config.epochs:
        return name
    if name == "shared" and not view.shares_weights:
        reporter.note(
            "method shared: one block for all steps; its teacher is the initial model, which was trained in one order; "
            "--method anyorder keeps different blocks and loses more accuracy"
        )
    elif not initial.trained and in_order:
        reporter.warn(
            "the classifier is new, so there is no trained start, and pretrained blocks lose accuracy when they are "
            "shuffled: train with --method sequential first, then train the run that this writes (--init)"
        )
    return name


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
