"""The configuration of a training run: frozen, nested structs.

The same structure is the user's ``--config`` file and the ``config.yaml`` of a run, where the section ``run``
is added with the results of training (:class:`RunRecord`), so a run's own file repeats it. Flags win over
the file, the file over these defaults; the defaults in force are written out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from ls_edge.core import validation, yaml_source
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import UsageError


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and what it starts from."""

    name: str = "vit_digits"
    """timm's name of it, or one of ``ls_edge.training.models.small_models``."""
    depth: int | None = None
    """Keep this many of the blocks, evenly spaced; None keeps all."""
    img_size: int | None = None
    """Side of the images in pixels where timm can build the model for another one; None is the model's own."""
    init: str | None = None
    """Start from this run folder, ``.safetensors`` or ``.pth`` file."""
    pretrained: bool = False
    """Start from timm's pretrained weights (needs the network or timm's cache)."""
    args: dict[str, Any] = {}
    """Further arguments for timm's ``create_model``, such as ``drop_path_rate``."""


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The images, and what is done to them."""

    source: str = ""
    """DATA: class folders, a tar of them, ``digits``, or a name of timm's dataset factory."""
    workers: int | None = None
    """Processes that decode images; 0 is this one. None: up to eight beside a GPU, by its cores, else 0. Small sets are
    decoded once and kept in memory."""
    cache_mb: int = 512
    """Decoded images are kept in memory up to this many MiB; larger sets are decoded every epoch."""
    augment: Literal["auto", "none", "shift", "crop", "timm"] = "auto"
    """``shift``: small random shifts; ``crop``: padded random crop and flip (CIFAR); ``timm``: random resized crop,
    flip, RandAugment; ``none``: scaled and cropped at the centre; ``auto``: ``shift`` for digits, ``crop`` up to 64
    pixels, else ``timm``."""
    crop_pct: float | None = None
    """The part of the scaled image's shorter side that the centre crop keeps, in training and wherever the model is
    used; None: the initial model's own."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None
    """How images are scaled, in training and wherever the model is used; None: the initial model's own."""
    exif_orientation: bool | None = None
    """Turn photos upright by their EXIF orientation, in training and wherever the model is used; None: as the run
    that ``init`` names, else no, as timm and torchvision do."""
    validation: float = 0.1
    """Part of the training images, drawn by the seed, that selects the checkpoint and is not trained on."""


class OptimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW with a warm-up and a falling rate."""

    lr: float | None = None
    """Highest learning rate; None is that of ``ls_edge.training.optim.default_rate``, written out in a run's file."""
    weight_decay: float = 0.05
    """Not applied to biases, norms and position embeddings."""
    warmup: float = 0.1
    """Part of all steps over which the rate rises from zero."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the rate falls after the warm-up."""
    final: float = 0.01
    """The last rate over the highest; 1 keeps one rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float | None = 1.0
    """Largest norm of the gradient; None leaves it."""
    smoothing: float = 0.1
    """Label smoothing of the training loss; validation is plain cross-entropy."""
    average: Literal["auto", "none", "ema", "swa"] = "auto"
    """Keep averaged weights (``ls_edge.training.optim``); ``auto`` is the method's own choice."""
    average_decay: float = 0.999
    """Of ``ema``, a step."""
    average_from: float = 0.75
    """Part of training after which ``swa`` begins."""


class TeacherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trained model whose answers are imitated beside the labels (``ls_edge.training.teacher``)."""

    model: str | None = None
    """A run folder, or timm's name of a model of any kind, convolutional ones too; None is no teacher."""
    weights: str | None = None
    """A ``.safetensors`` or ``.pth`` file for a model of timm; None: timm's pretrained weights."""
    kind: Literal["hard", "soft"] = "hard"
    """``hard``: the class that it names (DeiT, CaiT); ``soft``: its probabilities."""
    weight: float = 0.5
    """Of the teacher, 0 to 1; the labels have the rest."""
    temperature: float = 2.0
    """Of ``soft``."""


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: str = "anyorder"
    """One of ``ls_edge.training.methods.base.METHODS``."""
    method_args: dict[str, Any] = {}
    """Settings of the method, where it has any."""
    bands: list[list[int]] | str | None = None
    """Groups of blocks within which the order may change (``ls_edge.core.bands``), ``[[0], [1, 2, 3], [4]]`` or
    ``0/1-3/4``; blocks count after ``depth``. None: as the run that ``init`` names, else one band of all blocks."""
    optim: OptimConfig = OptimConfig()
    teacher: TeacherConfig = TeacherConfig()
    epochs: int = 20
    """0 writes the model as it starts."""
    batch_size: int = 64
    """Images a step, over all processes."""
    accumulate: int = 1
    """Parts in which a batch is computed, one after the other, to need less memory."""
    checkpointing: bool = False
    """Compute each block again for its gradients instead of keeping what is inside: less memory, a third more time."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the matrix products; the weights are float32 always. ``auto``: bf16 where the device has it, fp16 on other
    CUDA devices, else fp32."""
    stored: Literal["fp32", "fp16"] = "fp32"
    """Type in which the run's weights are written; half of it for models to hand on."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each block; ``auto`` is on for CUDA."""
    threads: int | None = None
    """Torch's threads on the CPU; None is one for models below a million parameters, whose batches are too small to
    share, else torch's own choice. Part of what makes a run repeat bit by bit."""
    validation_orders: int = 4
    """Seeded orders over which a method that shuffles is validated."""


class RunRecord(msgspec.Struct, frozen=True):
    """Results of training that, with the configuration, are enough to build the model."""

    version: str
    """Of ls-edge."""
    model: str
    """Name of the model that was built (``--init RUN`` may have brought its own)."""
    model_args: dict[str, Any]
    """What timm's ``create_model`` was given."""
    kept: tuple[int, ...]
    """Blocks of the named model that this one has."""
    classes: tuple[str, ...]
    image: ImageSpec
    trained_on: str
    """Digest of the training data's file list; empty where nothing was trained."""
    method: str
    best_epoch: int | None = None
    """The epoch whose weights are in ``model.safetensors``; None for the model as it started."""
    val_loss: float | None = None
    """Its validation cross-entropy."""
    remark: str = ""
    """A known problem of the weights in words; empty if there is none."""

    @property
    def problem(self) -> str:
        """Why these weights are not the result of a full training; empty if they are."""
        if self.trained_on and self.best_epoch is None:
            return "training did not finish one epoch, so the weights are those that it started with"
        return self.remark


class RunFile(TrainConfig, frozen=True, forbid_unknown_fields=True):
    """``config.yaml`` of a run."""

    run: RunRecord | None = None
    """Written by training; left out of account where the file is a ``--config``."""


RECIPES = Path(__file__).parent / "recipes"
"""The paper's set-ups, part of the package."""
FLAGS: dict[str, tuple[str, ...]] = {
    "data": ("data", "source"),
    "workers": ("data", "workers"),
    "augment": ("data", "augment"),
    "exif_orientation": ("data", "exif_orientation"),
    "model": ("model", "name"),
    "depth": ("model", "depth"),
    "img_size": ("model", "img_size"),
    "init": ("model", "init"),
    "pretrained": ("model", "pretrained"),
    "lr": ("optim", "lr"),
    "weight_decay": ("optim", "weight_decay"),
    "teacher": ("teacher", "model"),
    "teacher_weights": ("teacher", "weights"),
    "teacher_kind": ("teacher", "kind"),
}
"""Where a flag stands in the configuration; a flag that is not here stands at its top under its own name."""


def read_config(path: str | Path | None, flags: dict[str, Any]) -> tuple[TrainConfig, frozenset[str]]:
    """The file's settings with the flags (None: not given) over them, and which ones were named by either.

    Names are dotted, ``optim.lr``. Raises :class:`ConfigError` or :class:`UsageError` for what cannot be.
    """
    plain: dict[str, Any] = {}
    if path is not None:
        parsed, source_map = yaml_source.load(path, RunFile)
        plain = {key: _named(parsed, key, source_map) for key in _keys(source_map, ()) if key != "run"}
        config: TrainConfig = msgspec.convert(plain, TrainConfig)
        check(config, source_map)
    for name, value in flags.items():
        if value is None:
            continue
        *sections, last = FLAGS.get(name, (name,))
        target = plain
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    try:
        config = msgspec.convert(plain, TrainConfig)
    except msgspec.ValidationError as error:
        text = validation.explain(str(error), plain, TrainConfig).text
        raise UsageError(f"{text}; see 'ls-edge train --help'") from None
    check(config, None)
    if isinstance(config.bands, str):
        config = msgspec.structs.replace(config, bands=Bands.from_json(config.bands).to_json())
    return config, frozenset(_dotted(plain))


def find_recipe(path: Path) -> Path:
    """``path``, or the packaged recipe of that name where there is no such file; raises :class:`UsageError`."""
    recipe = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.exists() or len(path.parts) > 1 or path.suffix not in ("", ".yaml"):
        return path
    if not recipe.is_file():
        names = ", ".join(sorted(item.stem for item in RECIPES.glob("*.yaml")))
        raise UsageError(f"no such file and no recipe {str(path)!r}; the recipes are {names}")
    return recipe


def _keys(source_map: yaml_source.SourceMap, where: tuple[str | int, ...]) -> list[str]:
    return [str(path[-1]) for path in source_map.key_marks if path[:-1] == where]


def _named(parsed: RunFile, key: str, source_map: yaml_source.SourceMap) -> Any:
    """The value of a key, with only those settings that the file names."""
    value = msgspec.to_builtins(getattr(parsed, key))
    if isinstance(getattr(parsed, key), msgspec.Struct):
        named = _keys(source_map, (key,))
        return {name: item for name, item in value.items() if name in named}
    return value


def _dotted(plain: dict[str, Any]) -> list[str]:
    names = []
    for key, value in plain.items():
        section = isinstance(value, dict) and key in {"data", "model", "optim", "teacher"}
        names += [f"{key}.{inner}" for inner in value] if section else [key]
    return names


def check(config: TrainConfig, source_map: yaml_source.SourceMap | None) -> None:
    """Refuse values that no run can have; raises :class:`ConfigError` (with its place) or :class:`UsageError`."""
    c, o = config, config.optim
    if c.bands is not None:
        try:
            Bands.from_json(c.bands)
        except UsageError as error:
            raise source_map.error(str(error), "bands") if source_map is not None else error from None
    rules: list[tuple[bool, tuple[str, ...], str]] = [
        (c.epochs >= 0, ("epochs",), "0 or more"),
        (c.batch_size >= 1, ("batch_size",), "1 or more"),
        (c.accumulate >= 1, ("accumulate",), "1 or more"),
        (0 <= c.seed < 2**31, ("seed",), "0 to 2147483647"),
        (c.threads is None or c.threads >= 1, ("threads",), "1 or more"),
        (c.validation_orders >= 1, ("validation_orders",), "1 or more"),
        (o.lr is None or 0 < o.lr < float("inf"), ("optim", "lr"), "above 0"),
        (o.weight_decay >= 0, ("optim", "weight_decay"), "0 or more"),
        (0 <= o.warmup < 1, ("optim", "warmup"), "a part of all steps, 0 to below 1"),
        (0 <= o.final <= 1, ("optim", "final"), "0 to 1"),
        (0 <= o.smoothing < 1, ("optim", "smoothing"), "0 to below 1"),
        (all(0 <= beta < 1 for beta in o.betas), ("optim", "betas"), "two numbers from 0 to below 1"),
        (0 <= o.average_decay < 1, ("optim", "average_decay"), "0 to below 1"),
        (0 <= o.average_from < 1, ("optim", "average_from"), "0 to below 1"),
        (o.clip is None or o.clip > 0, ("optim", "clip"), "above 0, or null"),
        (0 <= c.teacher.weight <= 1, ("teacher", "weight"), "0 to 1"),
        (c.teacher.temperature > 0, ("teacher", "temperature"), "above 0"),
        (
            c.teacher.weights is None or c.teacher.model is not None,
            ("teacher", "weights"),
            "left out where no teacher is named (--teacher)",
        ),
        (c.data.workers is None or c.data.workers >= 0, ("data", "workers"), "0 or more, or null"),
        (c.data.cache_mb >= 0, ("data", "cache_mb"), "0 or more"),
        (0 < c.data.validation < 1, ("data", "validation"), "above 0 and below 1"),
        (c.data.crop_pct is None or 0 < c.data.crop_pct <= 8, ("data", "crop_pct"), "above 0 and at most 8"),
        (c.model.depth is None or c.model.depth >= 1, ("model", "depth"), "1 or more"),
        *_argument_rules(c.model.args),
        (c.model.img_size is None or c.model.img_size >= 1, ("model", "img_size"), "1 or more pixels"),
    ]
    for good, where, wanted in rules:
        if not good:
            value: Any = config
            for step in where:
                value = value[step] if isinstance(value, dict) else getattr(value, step)
            message = f"{where[-1]} is {value!r}; it has to be {wanted}"
            raise source_map.error(message, *where) if source_map is not None else UsageError(message)


def _argument_rules(args: dict[str, Any]) -> list[tuple[bool, tuple[str, ...], str]]:
    """Arguments of timm's ``create_model`` that are not the user's to choose, or with which there is no answer."""
    rules = {
        "num_classes": (False, "left out: it is the number of classes that the data has"),
        "in_chans": (args.get("in_chans") == 3, "3 or left out: images are decoded to red, green and blue"),
        "global_pool": (
            args.get("global_pool") not in ("", None),
            "avg, token or another kind, or left out: without pooling each token has an answer and the image none",
        ),
        "pretrained": (False, "given as pretrained in the section model, or with --pretrained"),
    }
    return [(good, ("model", "args", name), wanted) for name, (good, wanted) in rules.items() if name in args]


def to_yaml(value: msgspec.Struct) -> str:
    """A struct as the YAML that :func:`ls_edge.core.yaml_source.load` reads."""
    return yaml.safe_dump(
        msgspec.to_builtins(value), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )
