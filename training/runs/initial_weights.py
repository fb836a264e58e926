"""Initial model and weights of training.

Weights come from a run or a file (``--init``), from timm (``--pretrained``), or from the seed. A run given as
``--init`` also determines the model, unless a model is named.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import ModelError, RunError, UsageError
from ls_edge.core.text import counted
from ls_edge.training.config import ModelConfig
from ls_edge.training.models.families import evenly_spaced
from ls_edge.training.models.small_models import architecture, build, create, image_spec_of
from ls_edge.training.models.view import METHOD, BlockView
from ls_edge.training.runs.checkpoint import CONFIG, LoadedRun, load_run
from ls_edge.training.runs.foreign_checkpoint import read_foreign

_KEEPS_WEIGHTS = re.compile(r"\w*drop_(path_)?rate|img_size|dynamic_img_(size|pad)")
"""timm's arguments with which the blocks of a run compute the same: regularization and image size."""
_BLOCK = re.compile(r"blocks\.(\d+)\.")
PATCHES = "patch_embed.proj.weight"
"""timm's name of the filters that embed patches."""
NEW_CLASSIFIER = "the classifier is new and was not trained"
"""Remark of a run whose other weights were given."""


@dataclass(frozen=True)
class InitialWeights:
    """The model before training, with everything needed to build it again."""

    view: BlockView
    model: str
    args: dict[str, Any]
    kept: tuple[int, ...]
    image: ImageSpec
    trained: bool
    """Whether all weights, including the classifier's, were loaded instead of drawn from the seed."""
    method_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights of the method's modules in the run that ``init`` names."""
    source: BlockView | None = None
    """Model of that run with its method's modules, if blocks, images, and classes are unchanged."""
    bands: Bands | None = None
    """Bands of that run for the kept blocks; None if it was trained in one order and does not set bands."""
    run: LoadedRun | None = None
    """That run."""

    @property
    def could_share(self) -> bool:
        """Whether the model has several blocks that could share weights and were trained in only one order."""
        view = self.view
        if not self.trained or self.bands is not None or view.num_blocks < 2 or view.shares_weights:
            return False
        try:
            return bool(view.branches)
        except ModelError:
            return False


def make_initial_weights(
    config: ModelConfig,
    classes: Sequence[str],
    *,
    seed: int,
    model_named: bool,
    warn: Callable[[str], None] = lambda _: None,
) -> InitialWeights:
    """Build the model for these classes; raise :class:`ModelError`, :class:`RunError`, or :class:`UsageError`.

    ``model_named`` means that the user chose ``config.name``. Set the global random state from ``seed``.
    """
    if config.init is not None and config.pretrained:
        raise UsageError("--init and --pretrained exclude each other; leave one out")
    torch.manual_seed(seed)
    if config.init is not None and (Path(config.init) / CONFIG).is_file():
        return _from_run(load_run(config.init), config, classes, model_named=model_named, warn=warn)
    name, args = architecture(config.name)
    args = {**args, **config.args, "num_classes": len(classes)}
    trained = False
    if config.pretrained:
        view = BlockView(create(config.name, pretrained=True, **args))
        trained = (getattr(view.model, "pretrained_cfg", None) or {}).get("num_classes") == len(classes)
    else:
        view = build(name, args, empty=config.init is not None)
    image = image_spec_of(view)
    if config.init is not None:
        if Path(config.init).is_dir():
            raise RunError(f"{config.init} is not a run: it has no {CONFIG}; give a run folder or a checkpoint file")
        found, stated = read_foreign(config.init, warn)
        depth = len({part[1] for part in map(_BLOCK.match, found) if part})
        if depth not in (0, view.num_blocks):
            named = "num_blocks" if "num_blocks" in inspect.signature(type(view.model)).parameters else "depth"
            raise ModelError(
                f"{config.init} has {counted(depth, 'block')}, {config.name} has {view.num_blocks}: --set "
                f"model.args.{named}={depth}"
            )
        size = stated.pop("size", None)
        stated = {field: value for field, value in stated.items() if value != getattr(image, field)}
        if stated:
            listed = ", ".join(f"{field} {value}" for field, value in stated.items())
            warn(f"{config.init}: images are prepared as its settings say, not as usual for {name}: {listed}")
            image = msgspec.structs.replace(image, **stated)
        (height, width), positions = view.image_size, found.get("pos_embed")
        if size is None and height != width and positions is not None:
            warn(f"{config.init} does not say its image size; if it is not {height} x {width}, positions are mixed up")
        fitted = _fitted(view, found, size, config.init)
        was, now = (tuple(getattr(one.get(PATCHES), "shape", ()))[2:] for one in (found, fitted))
        if was and was != now:
            warn(
                f"{config.init} has patches of {was[0]} x {was[1]} pixels and {name} of {now[0]} x {now[1]}, so they "
                f"are resampled, and answers are worse until it is trained; or: --set model.args.patch_size={was[0]}"
            )
        trained = _take(view, fitted, config.init, warn)
    kept = tuple(range(view.num_blocks))
    if config.depth is not None:
        kept = evenly_spaced(view.num_blocks, config.depth)
        view.keep_blocks(kept)
    return InitialWeights(view, name, args, kept, image, trained)


def _from_run(
    run: LoadedRun, config: ModelConfig, classes: Sequence[str], *, model_named: bool, warn: Callable[[str], None]
) -> InitialWeights:
    record = run.record
    if model_named and config.name != record.model:
        raise UsageError(
            f"--init {run.folder} is a {record.model}, --model is {config.name}; leave --model out, or give a "
            "checkpoint of that model"
        )
    for name, value in config.args.items():
        if value != record.model_args.get(name) and not _KEEPS_WEIGHTS.fullmatch(name):
            was = repr(record.model_args[name]) if name in record.model_args else "the model's default"
            raise UsageError(
                f"model.args.{name} is {value!r}, but --init {run.folder} has weights for a model in which it is "
                f"{was}; leave it out{', or keep fewer of its blocks with --depth' if name == 'depth' else ''}"
            )
    args = {**record.model_args, **config.args, "num_classes": len(classes)}
    view = build(record.model, args, record.kept, empty=True)
    image = msgspec.structs.replace(record.image, size=view.image_size)
    everything = run.view.weights()
    weights = {name: value for name, value in everything.items() if not name.startswith(METHOD)}
    added = {name: value for name, value in everything.items() if name.startswith(METHOD)}
    if view.image_size != run.view.image_size:
        weights = _fitted(view, weights, run.view.image_size, str(run.folder))
    if tuple(classes) != record.classes:
        warn(f"the classes differ from those of {run.folder}, so the classifier is reinitialized")
        weights = {name: value for name, value in weights.items() if name not in view.classifier}
    whole = _take(view, weights, str(run.folder), warn)
    kept = record.kept
    in_order = record.method == "sequential" or record.best_epoch is None
    bands = None if run.config.bands is None and in_order else run.bands
    if config.depth is not None:
        chosen = evenly_spaced(view.num_blocks, config.depth)
        bands = None if bands is None else bands.keep(chosen)
        view.keep_blocks(chosen)
        kept = tuple(kept[index] for index in chosen)
    trained = whole and (record.best_epoch is not None or (run.config.model.has_weights and not record.remark))
    unchanged = whole and config.depth is None and view.image_size == run.view.image_size
    source = run.view if unchanged else None
    return InitialWeights(view, record.model, args, kept, image, trained, added, source, bands, run)


def _fitted(
    view: BlockView, found: dict[str, torch.Tensor], size: tuple[int, int] | None, source: str
) -> dict[str, torch.Tensor]:
    try:
        return view.fit_state(found, size)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None


def _take(view: BlockView, found: dict[str, torch.Tensor], source: str, warn: Callable[[str], None]) -> bool:
    """Load weights; return whether they include the classifier.

    If the classifier is missing or, with a warning, has other classes, it keeps its initial weights.
    """
    own = view.weights()
    fresh = [name for name in view.classifier if name not in found or found[name].shape != own[name].shape]
    if fresh and any(name in found for name in fresh):
        warn(f"the classifier of {source} has other classes, so the classifier is reinitialized")
    try:
        view.load_weights({**found, **{name: own[name] for name in fresh}})
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    return not fresh
