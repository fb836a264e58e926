"""Training curves in TensorBoard, Weights & Biases, or MLflow, each written by its own library.

TensorBoard events are always written to the run folder. ``--log`` selects the destination of the curves by order, by
blocks kept, and by slot, for which some validation images are evaluated after each epoch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch.utils.tensorboard import SummaryWriter

from ls_edge.core.bands import Bands
from ls_edge.core.errors import TrainingStopped
from ls_edge.device.requirements import require_import
from ls_edge.evaluation.evaluate import evaluate
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings
from ls_edge.training.config import TrainConfig
from ls_edge.training.models.torch_blocks import TorchBlocks
from ls_edge.training.models.view import BlockView

CURVE_IMAGES = 64
"""Number of validation images for the curves by order, blocks kept, and slot."""
CURVE_ORDERS = 4
SCALARS = ("train_loss", "val_loss", "val_top1", "lr", "images_per_second")

Write = Callable[[dict[str, float], int], None]
"""Function that writes named values of an epoch."""


def curves(view: BlockView, bands: Bands, batch: tuple[np.ndarray, np.ndarray], seed: int) -> dict[str, float]:
    """Return accuracies on a batch of images and labels by order, by blocks kept, and by slot.

    The accuracy by slot is that of the model if it ended after the slot and, with a predictor, that of the predicted
    slot.
    """
    model, (images, labels) = TorchBlocks(view), batch
    orders = EvaluationOrders(EvaluationSettings(orders=CURVE_ORDERS, seed=seed), bands)
    found = evaluate(model, [batch], orders)
    values = {
        "order/trained": found.sequential.top1,
        "order/random_mean": found.arbitrary.top1_mean,
        "order/random_worst": found.arbitrary.top1_worst,
    }
    if found.position_accuracy is not None:
        values["order/own_slot"] = found.position_accuracy
    for keep, kept in found.kept.items():
        values[f"kept_{keep}/trained"] = kept.sequential
        values[f"kept_{keep}/random"] = kept.arbitrary
    stem, right, named = model.stem(images), np.zeros(bands.num_blocks), np.zeros(bands.num_blocks)
    for order in orders.uniform():
        tokens = stem
        for slot, block in enumerate(order):
            tokens = model.block(block, tokens, slot)
            right[slot] += np.mean(model.head(tokens).argmax(1) == labels) / CURVE_ORDERS
            if found.position_accuracy is not None:
                named[slot] += np.mean(model.slots_of(block, tokens) == slot) / CURVE_ORDERS
    values |= {f"slot_{slot}/random": float(share) for slot, share in enumerate(right)}
    if found.position_accuracy is not None:
        values |= {f"slot_{slot}/own_slot": float(share) for slot, share in enumerate(named)}
    return values


@contextlib.contextmanager
def tensorboard(folder: Path, epochs_done: int) -> Iterator[Write]:
    """Yield a writer of TensorBoard events in the run folder."""
    make: Any = SummaryWriter  # untyped
    writer: Any = make(str(folder), purge_step=epochs_done + 1 if epochs_done else None)

    def write(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextlib.contextmanager
def _wandb(folder: Path, config: TrainConfig) -> Iterator[Write]:
    library: Any = importlib.import_module("wandb")
    run = library.init(project="ls-edge", dir=str(folder), name=folder.name, config=msgspec.to_builtins(config))
    try:
        yield lambda values, epoch: run.log(values, step=epoch)
    finally:
        run.finish()


@contextlib.contextmanager
def _mlflow(folder: Path, config: TrainConfig) -> Iterator[Write]:
    library: Any = importlib.import_module("mlflow")
    entities = importlib.import_module("mlflow.entities")
    client = library.MlflowClient()
    experiment = client.get_experiment_by_name("ls-edge")
    place = client.create_experiment("ls-edge") if experiment is None else experiment.experiment_id
    run = client.create_run(place, run_name=folder.name).info.run_id
    client.log_dict(run, msgspec.to_builtins(config), "config.yaml")

    def write(values: dict[str, float], epoch: int) -> None:
        at = int(time.time() * 1000)
        client.log_batch(run, [entities.Metric(name, value, at, epoch) for name, value in values.items()])

    ended = "FAILED"
    try:
        yield write
        ended = "FINISHED"
    finally:
        client.set_terminated(run, ended)


_OTHERS = {"wandb": _wandb, "mlflow": _mlflow}


def check_library(config: TrainConfig) -> None:
    """Raise :class:`UsageError` if the library of ``config.log`` cannot be imported."""
    if config.log in _OTHERS:
        require_import(f"--log {config.log}", (config.log,), config.log)


def where_to_look(config: TrainConfig, folder: Path) -> str:
    """Return the command or place that shows the curves of a run."""
    return {
        "wandb": f"wandb: project ls-edge, or 'wandb sync' of {folder / 'wandb'} if it was offline",
        "mlflow": "mlflow: experiment ls-edge at MLFLOW_TRACKING_URI",
    }.get(config.log or "", f"tensorboard --logdir {folder}")


@contextlib.contextmanager
def open_logs(folder: Path, config: TrainConfig, epochs_done: int) -> Iterator[Write]:
    """Yield a function that writes values to TensorBoard and to ``config.log``.

    Raise :class:`TrainingStopped` if a library fails.
    """
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(tensorboard(folder, epochs_done))]
        if config.log in _OTHERS:
            writers.append(_guarded(config.log, lambda: stack.enter_context(_OTHERS[str(config.log)](folder, config))))

        def write(values: dict[str, float], epoch: int) -> None:
            for one in writers:
                _guarded(config.log, functools.partial(one, values, epoch))

        yield write


def _guarded(name: str | None, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - each library raises its own kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingStopped(f"--log {name} failed: {reason}; correct it, or leave --log out") from None


def first_images(batches: Iterable[tuple[Any, Any]], normalize: Callable[[Any], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return up to :data:`CURVE_IMAGES` normalized images and their labels as arrays."""
    pixels: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for some, targets in batches:
        pixels.append(normalize(some).cpu().numpy())
        labels.append(targets.cpu().numpy())
        if sum(map(len, labels)) >= CURVE_IMAGES:
            break
    return np.concatenate(pixels)[:CURVE_IMAGES], np.concatenate(labels)[:CURVE_IMAGES]
