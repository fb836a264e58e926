"""Data sets by name: ``torch/...`` from timm's factory, and ``hfds/...`` from Hugging Face's ``datasets``.

``torch/...`` sets are stored in ``$LS_EDGE_DATA``, by default ``~/.cache/ls-edge/data``, and ``hfds/...`` sets in
Hugging Face's own cache. Both are downloaded if they are missing. Images are read as encoded files, because the
conversions of these libraries clip pixels of more than 8 bits.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ls_edge.core.errors import DataError, LsEdgeError, UsageError
from ls_edge.core.files import cache_folder
from ls_edge.data.image_files import read_image
from ls_edge.data.splits import Split, choose_part, split_of
from ls_edge.device.requirements import require_import

_IMAGENET_CLASSES = 1000
Named = tuple[Split, Sequence[str], list[tuple[int | None, Callable[[], Any]]]]
"""Split, class names, and the label and reader of each image."""


def read_named(source: str, part: Literal["train", "eval"]) -> Named:
    """Open a data set; a label is None if it is hidden or the set has no labels."""
    kind, name = source.split("/", 1)
    advice = "; or give a folder of class folders, a tar of one, or 'digits'"
    if kind not in ("torch", "hfds"):
        raise UsageError(f"{source!r} can only be streamed; use a torch/ or hfds/ name, a folder or a tar")
    if kind == "hfds":
        require_import(f"{source!r}, a data set of Hugging Face,", ("datasets",), "hfds", instead=advice)
    else:
        require_import(f"{source!r}, a data set of timm's factory,", ("timm.data",), "train", instead=advice)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _of_hugging_face(name, part) if kind == "hfds" else _of_torchvision(source, part)
    except LsEdgeError:
        raise
    except Exception as error:  # noqa: BLE001 - the libraries below raise many kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{source} could not be opened ({first[:200]}); check the name and the network, or give a folder of class "
            "folders"
        ) from None


def _of_hugging_face(name: str, part: Literal["train", "eval"]) -> Named:
    datasets: Any = importlib.import_module("datasets")
    names = datasets.get_dataset_split_names(name)
    chosen, which = choose_part([one for one in names if split_of(one)] or names, part)
    if chosen is None:
        raise DataError(
            f"hfds/{name} has the splits {', '.join(names)}, but no training and held-out split; use another"
        )
    table = datasets.load_dataset(name, split=chosen)
    features = table.features
    image = _column(name, features, datasets.Image, ("image", "img", "images"))
    if image is None:
        raise DataError(f"hfds/{name} has the columns {', '.join(features)} but no images; use another data set")
    key = _column(name, features, datasets.ClassLabel, ("label", "labels", "class"))
    table = table.cast_column(image, datasets.Image(decode=False))
    values = table.select_columns([key])[:][key] if key else [None] * len(table)
    labels, classes = _named(f"hfds/{name}", values, getattr(features[key], "names", None) if key else None)
    if name.endswith("imagenet-1k") and len(classes) == _IMAGENET_CLASSES:
        timm_data: Any = importlib.import_module("timm.data")
        classes = timm_data.ImageNetInfo().label_names()  # synsets, the names of the folders in its archives
    readers = (functools.partial(_read_row, table, image, row) for row in range(len(labels)))
    return which, classes, list(zip(labels, readers, strict=True))


def _column(name: str, features: Any, kind: type, usual: Sequence[str]) -> str | None:
    """Return the column of a kind with a usual name, or the only column of the kind, or a column with a usual name."""
    typed = [key for key, feature in features.items() if isinstance(feature, kind)]
    found = next((key for key in usual if key in typed), None) or (typed[0] if len(typed) == 1 else None)
    if found is None and len(typed) > 1:
        raise DataError(f"hfds/{name} has several columns of one kind, {', '.join(typed)}; rename one to {usual[0]!r}")
    return found or next((key for key in usual if key in features), None)


def _named(source: str, values: Sequence[Any], names: Sequence[str] | None) -> tuple[list[int | None], Sequence[str]]:
    """Return labels and class names; without ``names``, the values that occur are the classes.

    A hidden label is None; so is -1 if labels have names or if all labels are -1.
    """
    hides = names is not None or all(value == -1 for value in values)
    labels = [None if value == -1 and hides else value for value in values]
    for label in labels:
        is_number = isinstance(label, int) and (names is None or 0 <= label < len(names))
        if not (label is None or is_number or (isinstance(label, str) and names is None)):
            raise DataError(f"{source} has the label {label!r}; expected a text or the number of a class")
    known = set(labels) - {None}
    listed: Sequence[Any] = sorted(known) if names is None else range(len(names))
    classes = [str(one).replace("/", "_") for one in (listed if names is None else names)]
    if len(set(classes)) != len(classes):
        classes = [str(one) for one in range(len(classes))]
    index = {value: position for position, value in enumerate(listed)} | {None: None}
    return [index[label] for label in labels], classes if known else ()


def _read_row(table: Any, column: str, row: int) -> bytes:
    """Return the encoded image in a row; raise :class:`DataError` if there is none."""
    cell = table[row][column] or {}
    if content := cell.get("bytes"):
        return bytes(content)
    try:
        with importlib.import_module("fsspec").open(cell["path"], "rb") as stream:  # maybe inside an archive
            found: bytes = stream.read()
    except Exception as error:  # noqa: BLE001 - each file system raises its own errors
        raise DataError(f"row {row} has no image ({error})") from None
    return found


def _of_torchvision(source: str, part: Literal["train", "eval"]) -> Named:
    timm_data: Any = importlib.import_module("timm.data")
    root = Path(os.environ.get("LS_EDGE_DATA") or cache_folder() / "data")
    root.mkdir(parents=True, exist_ok=True)
    reasons: list[Exception] = []
    for split in ("train",) if part == "train" else ("validation", "test"):
        try:
            data = timm_data.create_dataset(source, root=str(root), split=split, download=True)
        except Exception as error:  # noqa: BLE001 - as above
            reasons.append(error)
            continue
        if hasattr(data, "loader"):  # torchvision's folders
            data.loader = read_image
        targets = getattr(data, "targets", None)
        labels = [int(one) for one in ([row[1] for row in data] if targets is None else targets)]
        # The classes of torchvision's ImageNet are tuples of synonyms, its folders synsets.
        names = getattr(data, "wnids", None) or getattr(data, "classes", None) or ()
        known, classes = _named(source, labels, names if max(labels, default=0) < len(names) else None)
        readers = (functools.partial(_read_image, data, row) for row in range(len(labels)))
        return "train" if part == "train" else "val", classes, list(zip(known, readers, strict=True))
    raise reasons[0]


def _read_image(data: Any, index: int) -> Any:
    return data[index][0]
