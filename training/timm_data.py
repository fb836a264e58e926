"""DATA for training and evaluation: what ``ls_edge.data.datasets`` opens, and the names that timm's factory knows.

``torch/...`` sets are kept in ``$LS_EDGE_DATA``, by default ``~/.cache/ls-edge/data``; ``hfds/...`` in Hugging
Face's own cache. Both are fetched when they are not there. Left out: sets that can only be streamed (``wds/...``,
``hfids/...``, ``tfds/...``), since training and evaluation take images by index.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm.data
from PIL import Image

from ls_edge.data.datasets import ImageRef, ImageSet, is_timm_name, open_data
from ls_edge.errors import DataError, UsageError

_timm_data: Any = timm.data  # it re-exports its functions without saying so


def open_images(source: str, part: Literal["train", "eval"]) -> ImageSet:
    """List the images of ``source``; raises what :func:`ls_edge.data.datasets.open_data` raises."""
    return _open_timm(source, part) if is_timm_name(source) else open_data(source, part)


def _open_timm(source: str, part: Literal["train", "eval"]) -> ImageSet:
    if not source.startswith(("torch/", "hfds/")):
        raise UsageError(f"{source!r} can only be streamed; use a torch/ or hfds/ name, a folder or a tar")
    root = Path(os.environ.get("LS_EDGE_DATA") or Path.home() / ".cache" / "ls-edge" / "data")
    # encoded files, where timm and torchvision would convert to RGB themselves, and clip what has more than 8 bits
    options: dict[str, Any] = {"download": True} if source.startswith("torch/") else {"load_bytes": True}
    reasons: list[str] = []
    for split in ("train",) if part == "train" else ("validation", "test"):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = _timm_data.create_dataset(source, root=str(root), split=split, **options)
                if hasattr(data, "loader"):  # of torchvision's folders
                    data.loader = _read_file
                return _image_set(source, part, data)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the libraries below raise for what is not there
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            reasons.append(f"{split}: {first[:200]}")
    raise DataError(
        f"{source}: timm's factory could not open it ({'; '.join(reasons)}); check the name and the network, or give "
        "a folder of class folders"
    )


def _image_set(source: str, part: Literal["train", "eval"], data: Any) -> ImageSet:
    labels, classes = _labels(data)
    if not labels:
        raise DataError(f"{source} holds no images; use another name")
    images = (
        ImageRef(f"{classes[label]}/{index:07d}", label, _Item(data, index)) for index, label in enumerate(labels)
    )
    which: Literal["train", "val"] = "train" if part == "train" else "val"
    return ImageSet(source, which, tuple(classes), tuple(sorted(images, key=lambda image: image.name)))


def _labels(data: Any) -> tuple[list[int], Sequence[str]]:
    """Labels and class names of a dataset, without decoding its images where that can be avoided."""
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


@dataclass(frozen=True)
class _Item:
    data: Any
    index: int

    def __call__(self) -> bytes | Image.Image:
        picture: bytes | Image.Image = self.data[self.index][0]
        return picture


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()
