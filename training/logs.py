"""Training curves as TensorBoard events in the run folder.

Losses are always written. ``--log tensorboard`` adds curves by order and by blocks kept, for which some validation
images are evaluated after each epoch.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorboard.compat.proto.event_pb2 as events
import torch.utils.tensorboard.summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ls_edge.core.bands import Bands
from ls_edge.evaluation.evaluate import evaluate
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings
from ls_edge.training.models.torch_blocks import TorchBlocks
from ls_edge.training.models.view import BlockView

_summary: Any = torch.utils.tensorboard.summary  # untyped
CURVE_IMAGES = 64
"""Number of validation images for the curves by order and blocks kept."""
CURVE_ORDERS = 4
SCALARS = ("train_loss", "val_loss", "val_top1", "lr", "images_per_second")

Write = Callable[[dict[str, float], int], None]
"""Function that writes named values of an epoch."""


def curves(view: BlockView, bands: Bands, batch: tuple[np.ndarray, np.ndarray], seed: int) -> dict[str, float]:
    """Return accuracies on a batch of images and labels by order, and by blocks kept."""
    orders = EvaluationOrders(EvaluationSettings(orders=CURVE_ORDERS, seed=seed), bands)
    found = evaluate(TorchBlocks(view), [batch], orders)
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
    return values


@contextlib.contextmanager
def open_log(folder: Path, epochs_done: int) -> Iterator[Write]:
    """Yield a function that writes TensorBoard events; events of epochs after ``epochs_done`` are replaced.

    torch's own writer has a thread, which prints a traceback if the disk is full.
    """
    with (folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}").open("wb") as stream:
        records = RecordWriter(stream)

        def put(**fields: Any) -> None:
            records.write(events.Event(wall_time=time.time(), **fields).SerializeToString())

        def write(values: dict[str, float], epoch: int) -> None:
            for name, value in values.items():
                put(step=epoch, summary=_summary.scalar(name, value))
            stream.flush()

        put(file_version="brain.Event:2")
        put(step=epochs_done + 1, session_log=events.SessionLog(status=events.SessionLog.START))
        yield write


def first_images(batches: Iterable[tuple[Any, ...]], normalize: Callable[[Any], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return up to :data:`CURVE_IMAGES` normalized images and their labels as arrays."""
    pixels: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for some, targets, *_ in batches:
        pixels.append(normalize(some).cpu().numpy())
        labels.append(targets.numpy())
        if sum(map(len, labels)) >= CURVE_IMAGES:
            break
    return np.concatenate(pixels)[:CURVE_IMAGES], np.concatenate(labels)[:CURVE_IMAGES]
