"""Data sets of timm's factory: ``torch/...`` and ``hfds/...`` names. Needs torch and timm.

``torch/...`` sets are kept in ``$LS_EDGE_DATA``, by default ``~/.cache/ls-edge/data``; ``hfds/...`` in Hugging
Face's own cache. Both are downloaded if they are not there. Sets that can only be streamed (``wds/...``,
``hfids/...``, ``tfds/...``) are not supported, since training and evaluation take images by index.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from ls_edge.core.errors import DataError, UsageError
from ls_edge.device.requirements import require_import

_IMAGENET_CLASSES = 1000


def _read_image(data: Any, index: int) -> bytes | Image.Image:
    picture: bytes | Image.Image = data[index][0]
    return picture


def read_timm(
    source: str, part: Literal["train", "eval"]
) -> tuple[Sequence[str], list[tuple[str, int, Callable[[], bytes | Image.Image]]]]:
    """Return class names, and name, label, and reader of each image."""
    advice = "; or give a folder of class folders, a tar of one, or 'digits'"
    require_import(f"{source!r}, a data set of timm's factory,", ("timm.data",), "train", instead=advice)
    timm_data: Any = importlib.import_module("timm.data")
    if not source.startswith(("torch/", "hfds/")):
        raise UsageError(f"{source!r} can only be streamed; use a torch/ or hfds/ name, a folder or a tar")
    root = Path(os.environ.get("LS_EDGE_DATA") or Path.home() / ".cache" / "ls-edge" / "data")
    # encoded files, because the conversion to RGB by timm and torchvision clips pixels of more than 8 bits
    options: dict[str, Any] = {"download": True} if source.startswith("torch/") else {"load_bytes": True}
    reasons: list[str] = []
    for split in ("train",) if part == "train" else ("validation", "test"):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = timm_data.create_dataset(source, root=str(root), split=split, **options)
                if hasattr(data, "loader"):  # torchvision's folders
                    data.loader = _read_file
                labels, classes = _labels(data)
        except Exception as error:  # noqa: BLE001 - the libraries below raise many kinds
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            reasons.append(f"{split}: {first[:200]}")
            continue
        if not labels:
            raise DataError(f"{source} has no images; use another name")
        if source.startswith("hfds/") and source.endswith("imagenet-1k") and len(classes) == _IMAGENET_CLASSES:
            classes = timm_data.ImageNetInfo().label_names()  # synsets, the names of the folders in its archives
        items = enumerate(labels)
        return classes, [
            (f"{classes[label]}/{index:07d}", label, functools.partial(_read_image, data, index))
            for index, label in items
        ]
    raise DataError(
        f"{source}: timm's factory could not open it ({'; '.join(reasons)}); check the name and the network, or give "
        "a folder of class folders"
    )


def _labels(data: Any) -> tuple[list[int], Sequence[str]]:
    """Return labels and class names of a data set, without decoding images if possible."""
    reader: Any = getattr(data, "reader", None)
    if hasattr(reader, "label_key") and hasattr(reader, "dataset"):
        table, key = reader.dataset, reader.label_key
        labels = [int(label) for label in table[key]]
        names = getattr(table.features[key], "names", None)
    else:
        targets = getattr(data, "targets", None)
        if targets is None:
            targets = [data[index][1] for index in range(len(data))]
        labels = [int(label) for label in targets]
        names = getattr(data, "classes", None)
    classes = [str(name).replace("/", "_") for name in names or ()]
    if len(set(classes)) != len(classes) or (labels and max(labels) >= len(classes)):
        classes = [str(index) for index in range(max(labels) + 1)]
    return labels, classes


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()
