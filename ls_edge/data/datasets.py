"""Images with labels, without torch: class folders, tars of them, and the embedded digits.

An :class:`ImageSet` lists images; reading one returns encoded bytes or raw pixels, which the caller decodes
(``ls_edge.data.preprocess`` on a board, timm's transforms in training). :func:`open_data` accepts

- a folder of class folders, or a tar of it: the top-level folder is the class, and deeper folders become part of the
  image names. A tar may wrap everything in additional folders and contain one tar per class;
- a folder or tar with a training and a held-out split (:func:`split_of`), each of which may be a tar. Other splits are
  refused, since they would become classes;
- a flat folder or tar of images, or a single image; without labels, there is no accuracy;
- a video file, frame by frame, and the newest frame of a camera or network stream (``ls_edge.data.camera``);
- ``digits``, which is part of the package (``assets/digits.md``);
- names from timm's factory and of Hugging Face's data sets (``ls_edge.data.timm_data``).

``ls_edge.data.image_files`` reads the files.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ls_edge.core.errors import DataError, UsageError, printable
from ls_edge.core.files import read_file
from ls_edge.core.text import counted, shorten
from ls_edge.core.validation import show_value
from ls_edge.data.camera import LiveFrames, VideoFile, is_video
from ls_edge.data.frame_source import FrameSource, visible_name
from ls_edge.data.image_files import (
    EXTENSIONS,
    STRAY,
    UNLABELED,
    ImageFile,
    Listing,
    expand,
    is_image,
    read_folder,
    read_tar,
    unwrap,
)
from ls_edge.data.splits import Split, choose_part, split_of
from ls_edge.data.timm_data import read_named

if TYPE_CHECKING:
    from PIL import Image

MAX_LIST = 64_000_000
"""Maximum bytes of a list of classes, a line each."""
_TIMM_PREFIXES = ("torch/", "hfds/", "hfids/", "tfds/", "wds/")


@dataclass(frozen=True)
class ImageRef:
    """Name, class, and reader of an image in a set."""

    name: str
    """Unique path in the set, ``class/file``."""
    label: int | None
    """Index into :attr:`ImageSet.classes`; None if the set has no labels."""
    read: Callable[[], bytes | np.ndarray | Image.Image] = field(repr=False)
    """Reader of the encoded file, pixels uint8 ``[H, W, 3]``, or (timm's data sets) an image; called by any thread."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one split of a data set, sorted by name unless :meth:`take` drew them."""

    source: str
    part: Split
    """``all`` if the data has no splits."""
    classes: tuple[str, ...]
    """Sorted folder names; empty if the data has no labels."""
    images: tuple[ImageRef, ...]
    empty_classes: tuple[str, ...] = ()
    """Folders without images, which are not classes."""
    live: LiveFrames | None = None
    """Camera or stream that provides the images, which :meth:`take` lists."""
    in_order: bool = False
    """Whether :meth:`take` keeps the order, as for the frames of a video."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Number of files that are not used, by reason, such as ``.heic`` or ``empty``."""
    where: str = ""
    """Folder that contains the class folders, if it is not :attr:`source`."""

    def __len__(self) -> int:
        return len(self.images)

    def account(self, unreadable: Iterable[str] = ()) -> dict[str, Any]:
        """Return a description of the data for the JSON of commands; :func:`describe` formats it.

        ``unreadable`` lists the images that could not be decoded, by name or error message; each counts once.
        """
        left_out = len(set(unreadable))
        labels = sorted({image.label for image in self.images if image.label is not None})
        return {
            "data": printable(self.where or self.source),
            "part": self.part,
            "images": len({image.name for image in self.images}) - left_out,
            "classes": [printable(self.classes[label]) for label in labels],
            "ignored": dict(sorted(self.ignored.items())),
            "unreadable": left_out,
        }

    def labels_for(self, model_classes: Sequence[str]) -> list[int | None]:
        """Return the label of each image as an index into ``model_classes``, matched by name, or None without a label.

        Raise :class:`DataError` with the classes that the model lacks.
        """
        index = {unicodedata.normalize("NFC", name): position for position, name in enumerate(model_classes)}
        own = [unicodedata.normalize("NFC", name) for name in self.classes]
        unknown = [name for name in own if name not in index]
        if unknown:
            raise DataError(
                f"{self.where or self.source}: the model has no class {_some(unknown)}; its classes are "
                f"{_some(model_classes)}; name the class folders as in the training data"
            )
        return [None if image.label is None else index[own[image.label]] for image in self.images]

    def take(self, count: int | None) -> ImageSet:
        """Draw ``count`` images, by default all, spread evenly over the classes and always in the same sequence.

        Since sorted names begin with a single class, images are taken in strides of about the golden section of the
        set, so that every part of the sequence, however short, is a fair sample. A ``count`` above the number of images
        repeats the sequence. Frames of videos keep their order, and a camera needs a ``count``.
        """
        if count is not None and count < 1:
            raise UsageError(f"a limit of {count} images leaves none; give at least 1")
        if self.live is not None:
            if count is None:
                raise UsageError(f"{self.source} has no end; give the number of images, such as --limit 100")
            return replace(
                self, images=tuple(ImageRef(f"{self.source}#{i}", None, self.live.read) for i in range(count))
            )
        size = len(self.images)
        step = 1 if self.in_order else max(1, round(size * (math.sqrt(5) - 1) / 2))
        while math.gcd(step, size) != 1:
            step += 1
        picked = tuple(self.images[i * step % size] for i in range(size if count is None else count))
        return replace(self, images=picked)


def natural_order(classes: Iterable[str]) -> tuple[str, ...]:
    """Return class names in timm's order: numbers by value, ignoring case."""
    return tuple(sorted(classes, key=_natural))


def read_classes(path: str | Path) -> tuple[str, ...]:
    """Return the class names in a text file, one per line; raise :class:`DataError` for duplicates or an empty file."""
    try:
        lines = read_file(Path(path), MAX_LIST).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(
            f"cannot read the class names in {path}: {reason}; give a text file with one per line"
        ) from None
    names = tuple(unicodedata.normalize("NFC", line.strip()) for line in lines if line.strip())
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise DataError(f"{path} lists {f'{_some(twice)} twice' if twice else 'no class'}; give each class a line")
    return names


def _natural(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    pieces = re.split(r"(\d+)", name.lower())
    return [
        (not piece.isdecimal(), len(piece.lstrip("0")) if piece.isdecimal() else 0, piece) for piece in pieces
    ], name


def describe(account: Mapping[str, Any]) -> str:
    """Return one line about a data set from :meth:`ImageSet.account`: images, classes, and ignored files by reason."""
    names = account["classes"]
    listed = ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])
    classes = f"{counted(len(names), 'class', 'classes')} ({listed})" if names else "no classes"
    unreadable = account["unreadable"]
    ignored = {**account["ignored"], **({"unreadable": unreadable} if unreadable else {})}
    return f"{account['data']}: {counted(account['images'], 'image')}, {classes}{describe_ignored(ignored)}"


def describe_ignored(reasons: Mapping[str, int]) -> str:
    """Return the number of ignored files by reason, to append to a line, or an empty string if there are none."""
    if not reasons:
        return ""
    listed = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items()))
    return f"; {counted(sum(reasons.values()), 'file')} ignored: {listed}"


def image_warnings(images: ImageSet) -> list[str]:
    """Return warnings about class folders without images, and about ambiguous names."""
    found: list[str] = []
    if names := images.empty_classes:
        found.append(
            f"{images.source}: {_some(names)} {'has' if len(names) == 1 else 'have'} no images and "
            f"{'is not a class' if len(names) == 1 else 'are not classes'} of this data; files have to end in "
            f"{', '.join(sorted(EXTENSIONS))}"
        )
    if images.source in ("digits", "camera") and Path(images.source).exists():
        found.append(f"{images.source} is not the file or folder of that name; write ./{images.source} for that")
    return found


def match_classes(image_set: ImageSet, model_classes: Sequence[str]) -> ImageSet:
    """Return the images with labels and classes of the model, matched by name (see :meth:`ImageSet.labels_for`)."""
    labels = image_set.labels_for(model_classes)
    images = tuple(replace(image, label=label) for image, label in zip(image_set.images, labels, strict=True))
    return replace(image_set, classes=tuple(model_classes) if image_set.classes else (), images=images)


def require_labels(image_set: ImageSet, model_classes: Sequence[str]) -> ImageSet:
    """Match classes as :func:`match_classes`; also raise :class:`DataError` if the images have no labels."""
    if not image_set.classes:
        raise DataError(
            f"{image_set.source} has images but no class folders, so there is no accuracy to measure; put the images "
            "of each class in a folder"
        )
    return match_classes(image_set, model_classes)


def is_timm_name(source: str) -> bool:
    """Return whether ``source`` is a name for timm's dataset factory, such as ``torch/cifar100``, and not a path."""
    return source.startswith(_TIMM_PREFIXES) and not os.path.exists(source)


def open_data(source: str, part: Literal["train", "eval"]) -> ImageSet:
    """List the images of ``source`` for training or evaluation; see the docstring of this module.

    Raise :class:`DataError` if there are none, and :class:`UsageError` for a named data set if its library is not
    installed.
    """
    if source == "digits":
        return _digits(part)
    if is_timm_name(source):
        return _of_name(source, part)
    camera = FrameSource.parse(source)
    if camera is not None or is_video(source):
        if part == "train":
            raise DataError(
                f"{visible_name(source)} has frames but no classes, which training needs; give class folders of images"
            )
        return _of_video(source) if camera is None else _of_camera(camera)
    path = Path(source)
    if not os.path.exists(source):  # an empty path would be the working folder
        name = shorten(visible_name(source), 100) or repr(source)
        raise DataError(f"{name}: no such folder or tar; check the path, or write 'digits' for the embedded images")
    if path.is_dir():
        return _in_listing(read_folder(path), source, part, is_tar=False)
    if not path.is_file():  # opening a pipe would wait for a writer
        raise DataError(f"{source} is neither a folder nor a file, but a pipe or a device; give a folder or a tar")
    if path.suffix.lower() in EXTENSIONS or is_image(path):
        return _image_set(Listing({path.name: ImageFile(source, path.stat().st_size)}), source, "all", part)
    return _in_listing(read_tar(path), source, part, is_tar=True)


def _in_listing(listing: Listing, source: str, part: Literal["train", "eval"], *, is_tar: bool) -> ImageSet:
    """Choose the split; raise :class:`DataError` for splits that are not a training and a held-out one."""
    between = ":" if is_tar else "/"
    listing, wrapper = unwrap(expand(listing, source + between))
    tops = {path for path in listing.folders if "/" not in path}
    tops |= {path for path in listing.archives if "/" not in path and split_of(path)}
    name, which = choose_part(tops, part)
    if name is None:
        _refuse_splits(listing, source, f"a folder like {wrapper}" if is_tar else f"{Path(source) / wrapper}/")
        return _image_set(listing, source, which, part, f"{source}{between}{wrapper}" if wrapper else source)
    where = f"{source}{between}{wrapper}{name}"
    used = [choose_part(tops, each)[0] for each in ("train", "eval")]
    unused = {path: path.split("/")[0] for path in listing.images if path.split("/")[0] not in used}
    inner, wrapper = unwrap(expand(listing.below(f"{name}/"), where))
    where += f"/{wrapper}" if wrapper else ""
    inner.ignored.update(
        {f"../{path}": f"in {printable(top)}" if "/" in path else STRAY for path, top in unused.items()}
        | {f"../{path}": STRAY for path, reason in listing.ignored.items() if reason == STRAY}  # next to a wrapper
    )
    return _image_set(inner, source, which, part, where)


def _refuse_splits(listing: Listing, source: str, inside: str) -> None:
    """Raise :class:`DataError` if the top-level folders are splits of a data set that contain the classes."""
    inner: dict[str, set[str]] = {}
    for path in listing.images:
        top, *rest = path.split("/")
        if rest:
            inner.setdefault(top, set()).add("" if len(rest) == 1 else rest[0])
    shared = set.intersection(*inner.values()) if len(inner) > 1 else set()
    everywhere = "" not in set().union(*inner.values()) and len(shared) > 1
    if len(inner) > 1 and (all(map(split_of, inner)) or everywhere):
        tops = sorted(inner)
        raise DataError(
            f"{source}: the folders {_some(tops)} look like splits, not classes"
            f"{f' (each has {_some(sorted(shared))})' if everywhere else ''}; give one of them, such as "
            f"{inside}{tops[0]}, or call one 'train' and one 'val'"
        )


def _image_set(
    listing: Listing, source: str, which: Split, part: Literal["train", "eval"], where: str | None = None
) -> ImageSet:
    where, images = where or source, listing.images
    reasons = Counter(reason for _, reason in listing.reasons())
    if not images:
        raise DataError(
            f"{where} holds no images{describe_ignored(reasons)}; expected class folders with files ending in "
            f"{', '.join(sorted(EXTENSIONS))}"
        )
    class_of = {path: unicodedata.normalize("NFC", path.split("/", 1)[0]) for path in images if "/" in path}
    if not class_of:
        if part == "train":
            raise DataError(f"{where} has images but no class folders, which training needs; make one for each class")
        refs = tuple(ImageRef(name, None, images[name]) for name in sorted(images))
        return ImageSet(source, which, (), refs, ignored=reasons, where=where)
    classes = sorted(set(class_of.values()))
    for name in classes:
        if part == "train" and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"{where}: the class folder {printable(name)!r} is not UTF-8; rename it")
    index = {name: position for position, name in enumerate(classes)}
    refs = tuple(ImageRef(path, index[class_of[path]], images[path]) for path in sorted(class_of))
    reasons.update([STRAY] * (len(images) - len(class_of)))
    tops = {unicodedata.normalize("NFC", path) for path in listing.folders if "/" not in path}
    empty = tuple(sorted(tops.difference(classes)))
    return ImageSet(source, which, tuple(classes), refs, empty, ignored=reasons, where=where)


def _of_camera(source: FrameSource) -> ImageSet:
    live = LiveFrames(source)
    if not live.is_photo:
        return ImageSet(source.name, "all", (), (), live=live)
    photo = live.read()
    return ImageSet(source.name, "all", (), (ImageRef(source.name, None, lambda: photo),))


def _of_video(source: str) -> ImageSet:
    video = VideoFile(source)
    refs = (ImageRef(f"{source}#{i}", None, functools.partial(video.read, i)) for i in range(video.count))
    return ImageSet(source, "all", (), tuple(refs), in_order=True)


def _of_name(source: str, part: Literal["train", "eval"]) -> ImageSet:
    which, names, images = read_named(source, part)
    classes = tuple(unicodedata.normalize("NFC", name) for name in names)
    if not classes and part == "train":
        raise DataError(f"{source} has images but no labels, which training needs; use another data set")
    refs = [
        ImageRef(f"{classes[label]}/{row:07d}" if label is not None else f"{row:07d}", label, read)
        for row, (label, read) in enumerate(images)
        if label is not None or not classes
    ]
    if not refs:
        raise DataError(f"{source} has no images; use another name")
    ignored = {UNLABELED: len(images) - len(refs)} if len(refs) < len(images) else {}
    return ImageSet(source, which, classes, tuple(sorted(refs, key=lambda ref: ref.name)), ignored=ignored)


@functools.cache
def _digits_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    asset = importlib.resources.files("ls_edge.data") / "assets" / "digits.npz"
    with asset.open("rb") as stream, np.load(stream) as arrays:
        return arrays["images"], arrays["labels"], arrays["held_out"]


def _digits(part: Literal["train", "eval"]) -> ImageSet:
    images, labels, held_out = _digits_arrays()
    pixels = np.rint(images * (255 / 16)).astype(np.uint8)
    rows = np.flatnonzero(held_out if part == "eval" else ~held_out)
    refs = (
        ImageRef(
            f"{labels[row]}/{row:04d}.png", int(labels[row]), functools.partial(np.stack, [pixels[row]] * 3, axis=-1)
        )
        for row in rows
    )
    which: Split = "val" if part == "eval" else "train"
    return ImageSet("digits", which, tuple("0123456789"), tuple(sorted(refs, key=lambda ref: ref.name)))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(show_value(name) for name in listed[:5])
    return text if len(listed) <= 5 else f"{text} and {len(listed) - 5} more"
