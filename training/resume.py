"""The state from which training resumes after a kill: one file, ``resume.safetensors``, beside the configuration.

Weights, the optimiser's moments and, in the file's metadata as JSON, the counters. One file, replaced in one
step, so it is of one epoch whenever the process dies. All random draws depend on seed, epoch and step alone and
need no state. Removed when training is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from ls_edge.core.errors import RunError
from ls_edge.training.checkpoint import write_tensors
from ls_edge.training.models.view import BlockView

RESUME = "resume.safetensors"
_OPTIMISER = "optimiser."
_AVERAGE = "average."


class TrainingProgress(msgspec.Struct, frozen=True):
    """How far a run is."""

    epochs_done: int = 0
    best_epoch: int | None = None
    best_loss: float | None = None
    scaler: dict[str, Any] = {}
    """State of the gradient scaler (float16 on CUDA only)."""
    cost: float = 0.0
    """Cost of the training so far, in forward passes of the model."""


def save_progress(
    folder: Path,
    view: BlockView,
    optimiser: torch.optim.Optimizer,
    progress: TrainingProgress,
    averaged: AveragedModel | None = None,
) -> None:
    """Write the state at the end of an epoch."""
    tensors = {f"model.{name}": value for name, value in view.weights().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"{_OPTIMISER}{index}.{key}": value for key, value in state.items()}
    if averaged is not None:
        tensors |= {f"{_AVERAGE}{name}": value for name, value in averaged.state_dict().items()}
    write_tensors(folder / RESUME, tensors, {"progress": msgspec.json.encode(progress).decode()})


def load_progress(
    folder: Path, view: BlockView, optimiser: torch.optim.Optimizer, averaged: AveragedModel | None = None
) -> TrainingProgress:
    """Load the state; raises :class:`RunError` if the file belongs to another model or is broken."""
    path = folder / RESUME
    model: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    mean: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            progress = msgspec.json.decode((file.metadata() or {})["progress"], type=TrainingProgress)
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.startswith(_OPTIMISER):
                    index, _, key = name.removeprefix(_OPTIMISER).partition(".")
                    state.setdefault(int(index), {})[key] = file.get_tensor(name)
                elif name.startswith(_AVERAGE):
                    mean[name.removeprefix(_AVERAGE)] = file.get_tensor(name)
                else:
                    model[name.removeprefix("model.")] = file.get_tensor(name)
        view.load_weights(model)
        if averaged is not None:
            averaged.load_state_dict(mean)
        if state:
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    except FileNotFoundError:
        raise RunError(f"{path} is missing, so the run cannot go on; train again with --overwrite") from None
    except (OSError, KeyError, ValueError, RuntimeError, safetensors.SafetensorError, msgspec.MsgspecError) as error:
        raise RunError(f"{path} cannot be used ({error}); train again with --overwrite") from None
    return progress
