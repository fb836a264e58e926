"""Configuration of a training run, as frozen nested structs.

A user's ``--config`` file and the ``config.yaml`` of a run have the same structure; the latter also has the section
``run`` with the results of training (:class:`RunRecord`). A run can therefore be repeated with its own file. Flags
override the file, the file overrides the defaults, and the effective settings are written to the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ls_edge.core import validation
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import CropShare, ImageSpec
from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import Threads
from ls_edge.evaluation.settings import BatchSize, Orders, Seed

AtLeastOne = Annotated[int, Meta(ge=1)]
GivenPath = Annotated[str, Meta(min_length=1, description="text that is not empty")]
Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
AtLeastZero = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a number from 0")]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a number above 0")]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model and its initial weights."""

    name: str = "vit_digits"
    """Name in timm, or a model of ``ls_edge.training.models.small_models``."""
    depth: AtLeastOne | None = None
    """Number of evenly spaced blocks to keep; None keeps all."""
    init: GivenPath | None = None
    """Run folder, ``.safetensors`` or ``.pth`` file to start from."""
    pretrained: bool = False
    """Start from timm's pretrained weights (needs the network or timm's cache)."""
    args: dict[str, Any] = {}
    """Other arguments for timm's ``create_model``, such as ``img_size`` or ``drop_path_rate``."""

    @property
    def has_weights(self) -> bool:
        """Whether the model starts from given weights instead of random ones."""
        return self.init is not None or self.pretrained


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The images and their augmentation."""

    source: str = ""
    """DATA: class folders, a tar of them, ``digits``, or a name for timm's dataset factory."""
    workers: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """Number of processes that decode images; 0 decodes in the training process. None: up to eight with a GPU,
    depending on the number of cores, otherwise 0."""
    cache_mb: Annotated[int, Meta(ge=0)] = 512
    """Maximum size in MiB of decoded images in memory; larger sets are decoded in every epoch."""
    augment: Literal["auto", "none", "shift", "crop", "timm"] = "auto"
    """``shift``: small random shifts; ``crop``: padded random crop and flip (CIFAR); ``timm``: random resized crop,
    flip, RandAugment; ``none``: scaled and cropped at the center; ``auto``: ``shift`` for digits, ``crop`` up to 64
    pixels, else ``timm``."""
    crop_pct: CropShare | None = None
    """Fraction of the scaled image's shorter side that the center crop keeps, in training and use; None: as in the
    initial model."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None
    """Interpolation for scaling images, in training and use; None: as in the initial model."""
    exif_orientation: bool | None = None
    """Whether to turn photos upright by their EXIF orientation, in training and use; None: as in the run that ``init``
    names, otherwise no, as in timm and torchvision."""
    class_order: GivenPath | None = None
    """Order of the class folders, which determines the class numbers: ``plain`` is Python's (1, 10, 2), ``natural`` is
    timm's (1, 2, 10), anything else is a text file with one class per line. None: the order of the run that ``init``
    names if it has the same classes, otherwise plain; an error if the order matters for foreign weights."""
    validation: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Fraction of the training images that is only used to select the checkpoint; None: as in the run that ``init``
    or the teacher names, otherwise a tenth."""
    split_seed: Annotated[int, Meta(ge=0)] | None = None
    """Seed that draws these images; None: as in that run, otherwise the seed of the training."""


class OptimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW with a warm-up and a decreasing rate."""

    lr: Positive | None = None
    """Highest learning rate; None for ``ls_edge.training.optim.default_rate``."""
    weight_decay: AtLeastZero = 0.05
    """Weight decay of all parameters except biases, norms, and position embeddings."""
    warmup: BelowOne = 0.1
    """Fraction of all steps over which the rate rises from zero."""
    schedule: Literal["cosine", "linear"] = "cosine"
    final: Share = 0.01
    """Last rate relative to the highest one; 1 keeps the rate constant."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    clip: Positive | None = 1.0
    """Maximum norm of the gradient; None for no limit."""
    smoothing: BelowOne = 0.1
    """Label smoothing of the training loss; validation uses plain cross-entropy."""
    average: Literal["auto", "none", "ema"] = "auto"
    """Averaging of the weights (``ls_edge.training.optim``); ``auto`` is the method's choice."""
    average_decay: BelowOne = 0.999


class TeacherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trained model to imitate in addition to the labels (``ls_edge.training.runs.teacher``)."""

    model: GivenPath | None = None
    """Run folder, or name of any timm model, including convolutional ones; None for no teacher."""
    weights: GivenPath | None = None
    """``.safetensors`` or ``.pth`` file for a timm model; None for timm's pretrained weights."""
    kind: Literal["hard", "soft"] = "hard"
    """``hard``: the predicted class (DeiT, CaiT); ``soft``: the probabilities."""
    weight: Share = 0.5
    """Weight of the teacher's loss; the labels have the rest."""
    temperature: Positive = 2.0


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Complete configuration of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: str | None = None
    """Name in ``ls_edge.training.methods.registry.METHODS``, entry point, or ``package.module:Class``; None for
    :meth:`chosen_method`."""
    method_args: dict[str, Any] = {}
    bands: list[list[int]] | str | None = None
    """Groups of blocks that may be reordered among themselves (``ls_edge.core.bands``), ``[[0], [1, 2, 3], [4]]`` or
    ``0/1-3/4``, with block numbers after ``depth`` was applied. None: as in the run that ``init`` names, otherwise the
    method's choice for the model, which is one band unless ``anyorder`` trains a model with plain patches."""
    optim: OptimConfig = OptimConfig()
    teacher: TeacherConfig = TeacherConfig()
    epochs: Annotated[int, Meta(ge=0)] = 20
    """Number of epochs; 0 writes the initial model without training."""
    batch_size: BatchSize = 64
    """Images per step over all processes."""
    accumulate: BatchSize = 1
    """Number of parts of a batch that are computed one after the other, to save memory."""
    checkpointing: bool = False
    """Whether to recompute the activations of each block for its gradients: less memory, a third more time."""
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of matrix products; weights are always float32. ``auto``: bf16 if the device supports it, fp16 on other CUDA
    devices, otherwise fp32."""
    stored: Literal["fp32", "fp16"] = "fp32"
    """Type of the weights in the run folder."""
    compile: bool | Literal["auto"] = "auto"
    """Whether to compile blocks; ``auto`` compiles on CUDA. YAML reads ``on`` and ``off`` as booleans."""
    threads: Threads | None = None
    """CPU threads of torch; None: one for models below a million parameters, otherwise torch's choice. A run is
    reproducible bit by bit only with the same number."""
    log: Literal["tensorboard"] | None = None
    """``tensorboard`` adds curves by order and blocks kept; losses are always written."""
    validation_orders: Orders = 4
    """Number of seeded orders for the validation of a method that shuffles."""

    def chosen_method(self, *, could_share: bool, shares: bool = False, in_order: bool = False) -> str:
        """Return the method, by default ``shared`` if the initial blocks do or could share weights, else ``anyorder``.

        Shuffling would destroy what such a model has learned (docs/choose.md), and other methods lack the parameters
        of a shared block. Bands imply different blocks. Without training, weights that were trained ``in_order`` remain
        weights of ``sequential``.
        """
        if self.method is not None:
            return self.method
        if self.bands is None and (shares or (could_share and self.epochs)):
            return "shared"
        return "sequential" if in_order and not self.epochs else "anyorder"

    def block_bands(self, num_blocks: int | None = None) -> Bands:
        """Return the bands for a model of ``num_blocks`` blocks; raise :class:`UsageError` if they do not fit."""
        return Bands.from_json(self.bands, num_blocks)


class RunRecord(msgspec.Struct, frozen=True):
    """Results of training; together with the configuration, they are enough to build the model."""

    version: str
    model: str
    """Name of the model, which ``--init RUN`` may have determined."""
    model_args: dict[str, Any]
    """Arguments for timm's ``create_model``."""
    kept: tuple[int, ...]
    """Blocks of the named model that were kept."""
    classes: tuple[str, ...]
    image: ImageSpec
    trained_on: str
    """Images that the weights were trained on (:class:`ls_edge.data.content.KnownImages`), or an empty string."""
    method: str
    best_epoch: int | None = None
    """Epoch of the weights in ``model.safetensors``; None for the initial model."""
    val_loss: float | None = None
    remark: str = ""
    """Known problem of the weights, or an empty string."""
    start_remark: str = ""
    """Problem of the weights or the teacher that training started from, or an empty string."""
    unfinished: bool = False
    """Whether training has not finished an epoch."""

    @property
    def problem(self) -> str:
        """Problem of the weights, such as an unfinished training, or an empty string."""
        if self.unfinished:
            return "training did not finish one epoch, so the weights are the initial ones"
        return self.remark


class RunFile(TrainConfig, frozen=True, forbid_unknown_fields=True):
    """``config.yaml`` of a run."""

    run: RunRecord | None = None
    """Written by training; ignored in a ``--config`` file."""


RECIPES = Path(__file__).parent / "recipes"
"""Folder of the packaged recipes, which are the configurations of the paper."""
SECTIONS = ("data", "model", "optim", "teacher")
FLAGS: dict[str, tuple[str, str]] = {
    "data": ("data", "source"),
    "model": ("model", "name"),
    "depth": ("model", "depth"),
    "init": ("model", "init"),
    "pretrained": ("model", "pretrained"),
    "class_order": ("data", "class_order"),
    "workers": ("data", "workers"),
    "lr": ("optim", "lr"),
    "teacher": ("teacher", "model"),
}
"""Section and key of a flag; all other flags are top-level keys of the configuration."""


def read_config(
    path: str | Path | None, flags: dict[str, Any], changes: Sequence[str] = ()
) -> tuple[TrainConfig, frozenset[str]]:
    """Return the settings of a file, overridden by flags that are not None, and the names of all given settings.

    Names are dotted, such as ``optim.lr``. ``changes`` are ``NAME=VALUE`` for any setting and override both. Raise
    :class:`ConfigError` or :class:`UsageError` for invalid values.
    """
    plain: dict[str, Any] = {}
    if path is not None:
        parsed, source_map = validation.load_yaml(path, RunFile)
        plain = _named(msgspec.to_builtins(parsed), source_map)
        for where, text in _conflicts(parsed):
            raise source_map.error(text, *where)
    override(plain, flags, changes)
    try:
        config = msgspec.convert(plain, TrainConfig)
    except msgspec.ValidationError as error:
        text = validation.explain(str(error), plain, TrainConfig).text
        raise UsageError(f"{text}; see 'ls-edge train --help'") from None
    for _, text in _conflicts(config):
        raise UsageError(text)
    if config.bands is not None:
        config = msgspec.structs.replace(config, bands=config.block_bands().to_json())
    named = {f"{section}.{key}" for section in SECTIONS for key in plain.get(section, {})}
    return config, frozenset(named | plain.keys() - set(SECTIONS))


def override(plain: dict[str, Any], flags: Mapping[str, Any], changes: Sequence[str]) -> None:
    """Override settings of a ``--config`` file by flags of ``train`` that are not None, and by ``NAME=VALUE``."""
    for name, value in flags.items():
        if name in FLAGS and value is not None:
            section, key = FLAGS[name]
            plain.setdefault(section, {})[key] = value
        elif value is not None:
            plain[name] = value
    for change in changes:
        _change(plain, change)


def _change(plain: dict[str, Any], change: str) -> None:
    """Apply ``NAME=VALUE``, with a dotted name and a value in YAML."""
    name, equals, text = change.partition("=")
    if not equals or not all(name.split(".")):
        raise UsageError(f"--set {change}: write KEY=VALUE with a key of the configuration, such as optim.clip=0.5")
    *sections, key = name.split(".")
    for section in sections:
        plain = plain.setdefault(section, {})
        if not isinstance(plain, dict):
            raise UsageError(f"--set {change}: {section} has no keys; write {section}=VALUE")
    plain[key] = validation.parse_yaml_value(text, f"--set {change}")


def _named(value: dict[str, Any], source_map: validation.SourceMap, *where: str) -> dict[str, Any]:
    """Return only the settings that are given in the file, without the section ``run``."""
    return {
        key: _named(item, source_map, key) if not where and key in SECTIONS else item
        for key, item in value.items()
        if (*where, key) in source_map.key_marks and key != "run"
    }


def _conflicts(config: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place and description of each conflict between values."""
    if config.bands is not None:
        try:
            config.block_bands()
        except UsageError as error:
            yield ("bands",), str(error)
    if config.teacher.weights is not None and config.teacher.model is None:
        yield (
            ("teacher", "weights"),
            f"weights is {validation.show_value(config.teacher.weights)} without a teacher; name one with "
            "teacher.model (--teacher), or leave weights out",
        )
    args = config.model.args
    drop = args.get("drop_path_rate") or 0.0
    rules = {
        "num_classes": (False, "leave it out: it is the number of classes in the data"),
        "in_chans": (args.get("in_chans") == 3, "use 3 or leave it out: images are decoded to red, green and blue"),
        "global_pool": (
            args.get("global_pool") not in ("", None),
            "use avg, token or another kind, or leave it out: without pooling there is one answer per token",
        ),
        "drop_path_rate": (isinstance(drop, (int, float)) and 0 <= drop <= 1, "use a number from 0 to 1"),
        "pretrained": (False, "use the key pretrained of the section model, or --pretrained"),
        "name": (False, "use the key name of the section model, or --model"),
        "checkpoint_path": (False, "use the key init of the section model, or --init"),
        "device": (False, "use the key device of the configuration, or --device"),
    }
    for name, (allowed, advice) in rules.items():
        if name in args and not allowed:
            yield ("model", "args", name), f"{name} is {validation.show_value(args[name])}; {advice}"


def find_recipe(path: Path) -> Path:
    """Return ``path``, or the packaged recipe of that name if there is no such file; raise :class:`UsageError`."""
    recipe = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.exists() or len(path.parts) > 1 or path.suffix not in ("", ".yaml"):
        return path
    if not recipe.is_file():
        known = ", ".join(sorted(item.stem for item in RECIPES.glob("*.yaml")))
        raise UsageError(f"no such file and no recipe {str(path)!r}; the recipes are {known}")
    return recipe


def to_yaml(value: msgspec.Struct) -> str:
    """Return a struct as YAML that :func:`ls_edge.core.validation.load_yaml` reads."""
    how = {"default_flow_style": None, "allow_unicode": True, "width": 100}
    return validation.dump_yaml(msgspec.to_builtins(value), **how)
