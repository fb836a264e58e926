"""``ls_edge.train``: from images to a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ls_edge.core.errors import RunError, UsageError
from ls_edge.core.files import is_hub
from ls_edge.core.logs import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.data.datasets import open_data
from ls_edge.device.requirements import require_import

if TYPE_CHECKING:
    from ls_edge.training.config import TrainConfig
    from ls_edge.training.progress import OnEpoch, Reporter, TrainingResult

FREE = ("workers", "cache_mb")
"""Settings of the data that a resumed run may change, since they do not change the result."""


def train(
    data: str | Path | None = None,
    out: str | Path = "run",
    *,
    changes: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    on_epoch: OnEpoch = lambda _epoch, _epochs: None,
    on_progress: OnProgress = ignore_progress,
    on_warning: OnWarning = warn_in_python,
    **settings: Any,
) -> TrainingResult:
    """Fine-tune a vision transformer with shuffled block order, and write the run ``out``; as ``ls-edge train``.

    ``settings`` are the flags of the command, such as ``config``, ``model``, ``method`` or ``epochs``; ``changes`` are
    values of ``--set``, such as ``"optim.clip=0.5"``. ``on_epoch`` is called with the metrics of each epoch and the
    number of epochs. Raise :class:`RunError` if ``out`` holds a run, unless ``resume`` or ``overwrite`` is set.
    """
    flags = {
        name: str(value) if isinstance(value, Path) else value for name, value in {"data": data, **settings}.items()
    }
    asked, named = read_settings(flags.pop("config", None), flags, changes, resume=resume, overwrite=overwrite)
    from ls_edge.training.progress import Reporter

    reporter = Reporter(on_epoch, on_progress, on_warning)
    result = train_run(Path(out), asked, named, reporter, resume=resume, overwrite=overwrite)
    if result is None:
        raise RunError(f"{out} is finished: nothing to resume")
    return result


def read_settings(
    config: str | Path | None, flags: Mapping[str, Any], changes: Sequence[str], *, resume: bool, overwrite: bool
) -> tuple[TrainConfig, frozenset[str]]:
    """Return the settings of a training, and the names of the settings that were given; raise :class:`UsageError`."""
    from ls_edge.training.config import FLAGS, TrainConfig, find_recipe, read_config

    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other; leave one out")
    unknown = sorted(set(flags) - set(FLAGS) - set(TrainConfig.__struct_fields__))
    if unknown:
        raise UsageError(f"{unknown[0]!r} is not a setting of training; see 'ls-edge train --help' and --set")
    settings, named = read_config(None if config is None else find_recipe(Path(config)), dict(flags), changes)
    return settings, named


def train_run(
    out: Path,
    settings: TrainConfig,
    named: frozenset[str],
    reporter: Reporter,
    *,
    resume: bool,
    overwrite: bool,
) -> TrainingResult | None:
    """Train one run and return its result, or None if ``resume`` finds it finished."""
    if not resume and not settings.data.source:
        raise UsageError(f"no data for {out}: give --data DATA, or name data.source in the --config file")
    if not resume and settings.data.source != "digits" and not named & {"model.name", "model.args", "model.init"}:
        open_data(settings.data.source, "train")  # raises for data that cannot be used, with any model
        raise UsageError(
            "no model: only 'digits' has a default one, vit_digits, for images of 16 pixels; give one for photos, such "
            "as --model vit_tiny_patch16_224 --pretrained --method sequential"
        )
    require_import("training", ("ls_edge.training.loop",), "train")
    from ls_edge.training.loop import train as train_model
    from ls_edge.training.runs.checkpoint import is_finished

    if resume:
        if other := other_setting(out, settings, named):
            raise UsageError(
                f"--resume continues with the settings of {out}, where {other}; leave it out, or start again in "
                "another folder with --init"
            )
        settings = resumed_settings(out, settings, named)
        if is_finished(out, settings.epochs):
            return None
    model_named = "model.name" in named
    return train_model(settings, out, reporter=reporter, resume=resume, overwrite=overwrite, model_named=model_named)


def other_setting(out: Path, asked: TrainConfig, named: frozenset[str]) -> str:
    """Describe the first of the settings ``named`` that differs in the run; empty if none does.

    A run has values for the settings that were left open, and all settings of its method.
    """
    from ls_edge.training.methods.registry import make_method

    own = _own_settings(out)
    for name in sorted(named - {f"data.{free}" for free in FREE}):
        value: Any = asked
        was: Any = own
        for step in name.split("."):
            value, was = getattr(value, step), getattr(was, step)
        if value in (None, "auto"):
            continue
        if name == "method_args":
            value = was | {  # the training may have set others
                key: one
                for key, one in msgspec.to_builtins(make_method(str(own.method), value).settings).items()
                if key in value
            }
        # data and data/ are the same, and a run pins what comes from a hub
        if not (
            value == was
            or Path(str(value)).resolve() == Path(str(was)).resolve()
            or (
                is_hub(str(value))
                and re.match(re.escape(str(value).partition("@")[0]) + "@", str(was))
                and not re.search("@[0-9a-f]{40}$", str(value))
            )
        ):
            return f"{name} is {was!r}, not {value!r}"
    return ""


def resumed_settings(out: Path, asked: TrainConfig, named: frozenset[str]) -> TrainConfig:
    """Return the settings of the run ``out``; those of :data:`FREE` are the ``asked`` ones if they are ``named``."""
    own = _own_settings(out)
    changes = {free: getattr(asked.data, free) for free in FREE if f"data.{free}" in named}
    return msgspec.structs.replace(own, data=msgspec.structs.replace(own.data, **changes))


def _own_settings(out: Path) -> TrainConfig:
    from ls_edge.training.config import TrainConfig
    from ls_edge.training.runs.checkpoint import read_record

    file, _ = read_record(out)
    return TrainConfig(**{name: getattr(file, name) for name in TrainConfig.__struct_fields__})
