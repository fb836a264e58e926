"""Images with labels, without torch: class folders, tars of them, and the embedded digits.

An :class:`ImageSet` lists images; reading one returns encoded bytes or raw pixels, which the caller decodes
(``ls_edge.data.preprocess`` on a board, timm's transforms in training). :func:`open_data` understands

- a folder of class folders, or a tar of one: the first folder below the top is the class, deeper ones are kept
  in the names; a tar may wrap everything in additional folders;
- the same in splits: a folder or tar with ``train`` and one of ``val``, ``validation``, ``test`` (in a folder each
  may be a folder or a tar); without both, everything is used. A held-out split without class folders, as in
  ImageNet's archive, is labeled by one of :data:`LABEL_FILES` next to it;
- a flat folder or tar of images without labels, or one image; these have no accuracy;
- a video file, frame by frame, and the newest frame of a camera or network stream (``ls_edge.data.camera``);
- ``digits``, which is part of the package (``assets/digits.md``);
- names of timm's dataset factory, which need torch and timm (``ls_edge.data.timm_data``).

``ls_edge.data.image_files`` reads the files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.files import read_file
from ls_edge.data.camera import LiveFrames, VideoFile, is_live, is_video
from ls_edge.data.image_files import (
    EXTENSIONS,
    ImageTree,
    is_hidden,
    read_folder,
    read_image,
    read_tar,
    tar_stem,
    unwrap,
)
from ls_edge.data.timm_data import read_timm

if TYPE_CHECKING:
    from PIL import Image

Split = Literal["train", "val", "all"]

_TRAIN = ("train", "training")
_HELD_OUT = ("val", "validation", "valid", "test")
_PARTS = (*_TRAIN, *_HELD_OUT)
LABEL_FILES = ("LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt")
"""Lists of the classes of ImageNet's validation images: Kaggle's, by file name, and TensorFlow's, in order."""
_TIMM_PREFIXES = ("torch/", "hfds/", "hfids/", "tfds/", "wds/")


@dataclass(frozen=True)
class ImageRef:
    """One image: its name inside the set, its class, and how to read it."""

    name: str
    """Path inside the set, ``class/file``; unique."""
    label: int | None
    """Index into :attr:`ImageSet.classes`; None if the set has no labels."""
    read: Callable[[], bytes | np.ndarray | Image.Image] = field(repr=False)
    """Return the encoded file, pixels uint8 ``[H, W, 3]``, or (timm's data sets) an image; called from any thread."""


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
    """Folders without an image, which do not count as classes."""
    live: LiveFrames | None = None
    """Camera or stream that provides every image; :meth:`take` creates the images."""
    in_order: bool = False
    """Whether :meth:`take` keeps the order, as for the frames of a video."""

    def __len__(self) -> int:
        return len(self.images)

    def digest(self) -> str:
        """Return the SHA-256 of the sorted names: the same for a folder and a tar of it, and with repeated images."""
        names = sorted({image.name for image in self.images})
        return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()

    def labels_for(self, model_classes: Sequence[str]) -> list[int | None]:
        """Return the label of each image as an index into ``model_classes``, matched by name; None without a label.

        Raises :class:`DataError` with the classes that the model does not have.
        """
        index = {name: position for position, name in enumerate(model_classes)}
        unknown = [name for name in self.classes if name not in index]
        if unknown:
            raise DataError(
                f"{self.source}: the model has no class {_some(unknown)}; its classes are {_some(model_classes)}; "
                "name the class folders as in the training data"
            )
        return [None if image.label is None else index[self.classes[image.label]] for image in self.images]

    def take(self, count: int | None) -> ImageSet:
        """Draw ``count`` images, by default all, spread evenly over the classes and always in the same sequence.

        Sorted names begin with a single class. So images are taken in strides of about the golden section of the set,
        and every part of the sequence, however short, is a fair sample. A ``count`` above the number
        of images repeats the sequence. Frames of videos keep their order, and a camera needs a ``count``.
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


def image_warnings(images: ImageSet, trained_on: str) -> list[str]:
    """Return warnings about class folders without images, and about images that a model was trained on."""
    return [text for text in (trained_on_warning(images, trained_on), empty_classes_warning(images)) if text]


def trained_on_warning(images: ImageSet, trained_on: str) -> str:
    """Return a warning if a model was trained on these images, else an empty string.

    ``trained_on`` is the digest of its training images, empty if unknown. A split that training does not use never
    counts, whatever the names.
    """
    if images.part == "val" or not trained_on or images.digest() != trained_on:
        return ""
    return f"the model was trained on the images of {images.source}, so its accuracy on them says little; use others"


def empty_classes_warning(images: ImageSet) -> str:
    """Return a warning if class folders have no images, else an empty string."""
    names = images.empty_classes
    if not names:
        return ""
    return (
        f"{images.source}: {_some(names)} {'has' if len(names) == 1 else 'have'} no images and "
        f"{'is not a class' if len(names) == 1 else 'are not classes'} of this data; files have to end in "
        f"{', '.join(sorted(EXTENSIONS))}"
    )


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
            f"of each class in a folder, or a list of classes next to the split ({' or '.join(LABEL_FILES)})"
        )
    return match_classes(image_set, model_classes)


def is_timm_name(source: str) -> bool:
    """Return whether ``source`` is a name for timm's dataset factory, such as ``torch/cifar100``, and not a path."""
    return source.startswith(_TIMM_PREFIXES) and not Path(source).exists()


def open_data(source: str, part: Literal["train", "eval"]) -> ImageSet:
    """List the images of ``source`` for training or evaluation; see the docstring of this module.

    Raises :class:`DataError` if there are none, :class:`UsageError` for a name of timm's factory if timm
    is not installed.
    """
    if source == "digits":
        return _digits(part)
    if is_timm_name(source):
        return _of_timm(source, part)
    if is_live(source) or is_video(source):
        if part == "train":
            raise DataError(f"{source} has frames but no classes, which training needs; give class folders of images")
        return _of_frames(source)
    path = Path(source)
    if not path.exists():
        raise DataError(f"{source}: no such folder or tar; check the path, or write 'digits' for the embedded images")
    if path.is_dir():
        return _in_folder(path, source, part)
    if path.suffix.lower() in EXTENSIONS:
        return _image_set({path.name: functools.partial(read_image, path)}, source, "all", part)
    return _in_tree(read_tar(path), source, part)


def _in_folder(path: Path, source: str, part: Literal["train", "eval"]) -> ImageSet:
    parts: dict[str, Path] = {}
    try:
        children = sorted(path.iterdir(), key=lambda child: (child.is_dir(), child.name))
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}; check its permissions") from None
    for child in children:
        stem = child.name if child.is_dir() else tar_stem(child.name)
        if stem is not None and not is_hidden(stem) and (child.is_dir() or stem.lower() in _PARTS):
            parts[stem.lower()] = child  # a folder wins over a tar of the same name
    name, which = _choose_part(parts, part)
    chosen = path if name is None else parts[name]
    tree = read_folder(chosen) if chosen.is_dir() else unwrap(read_tar(chosen))
    if name is not None and which == "val" and not any("/" in name for name in tree):
        tree = _labeled(tree, path)
    found = _image_set(tree, source, which, part, where=source if name is None else str(chosen))
    if not found.classes or not chosen.is_dir():
        return found
    folders = {child.name for child in chosen.iterdir() if child.is_dir() and not is_hidden(child.name)}
    return replace(found, empty_classes=tuple(sorted(folders.difference(found.classes))))


def _labeled(tree: ImageTree, folder: Path) -> ImageTree:
    """Sort images without class folders into classes by a list in ``folder``, if there is one."""
    path = next((folder / name for name in LABEL_FILES if (folder / name).is_file()), None)
    if path is None or not tree:
        return tree
    lines = [line.replace(",", " ").split() for line in read_file(path).decode("utf-8", "replace").splitlines()]
    lines = [words for words in lines if words and words[0] != "ImageId"]
    names = sorted(tree)
    if all(len(words) == 1 for words in lines):
        if len(lines) != len(names):
            raise DataError(f"{path} lists {len(lines)} classes, there are {len(names)} images; use the whole set")
        classes = {Path(name).stem: words[0] for name, words in zip(names, lines, strict=True)}
    else:
        classes = {Path(words[0]).stem: words[1] for words in lines if len(words) > 1}
    missing = [name for name in names if Path(name).stem not in classes]
    if missing:
        raise DataError(f"{path} has no class for {_some(missing)}; add a line for each, or remove the images")
    return {f"{classes[Path(name).stem]}/{name}": tree[name] for name in names}


def _in_tree(tree: ImageTree, source: str, part: Literal["train", "eval"]) -> ImageSet:
    """Choose the split inside a tar, where splits can only be folders."""
    tree = unwrap(tree)
    tops = {name.split("/", 1)[0] for name in tree if "/" in name}
    name, which = _choose_part({top.lower(): top for top in tops}, part)
    if name is None:
        return _image_set(tree, source, which, part)
    prefix = next(top for top in sorted(tops) if top.lower() == name) + "/"
    inner = {path[len(prefix) :]: read for path, read in tree.items() if path.startswith(prefix)}
    return _image_set(inner, source, which, part, where=f"{source}:{prefix}")


def _choose_part(folders: Collection[str], part: Literal["train", "eval"]) -> tuple[str | None, Split]:
    """Return the folder to use and the split that it is; None if all folders are classes.

    One of the names among others is a class (COCO has a class "train"); a single folder only wraps the classes.
    """
    train = next((name for name in _TRAIN if name in folders), None)
    held_out = next((name for name in _HELD_OUT if name in folders), None)
    if train is not None and held_out is not None:
        return (train, "train") if part == "train" else (held_out, "val")
    return (train or held_out, "all") if len(folders) == 1 else (None, "all")


def _image_set(
    tree: ImageTree, source: str, which: Split, part: Literal["train", "eval"], where: str | None = None
) -> ImageSet:
    where = where or source
    if not tree:
        raise DataError(
            f"{where} holds no images; expected class folders with files ending in {', '.join(sorted(EXTENSIONS))}"
        )
    labeled = {name: read for name, read in tree.items() if "/" in name}
    if not labeled:
        if part == "train":
            raise DataError(f"{where} has images but no class folders, which training needs; put each class in its own")
        return ImageSet(source, which, (), tuple(ImageRef(name, None, tree[name]) for name in sorted(tree)))
    classes = sorted({name.split("/", 1)[0] for name in labeled})
    index = {name: position for position, name in enumerate(classes)}
    images = (ImageRef(name, index[name.split("/", 1)[0]], labeled[name]) for name in sorted(labeled))
    return ImageSet(source, which, tuple(classes), tuple(images))


def _of_frames(source: str) -> ImageSet:
    if is_live(source):
        return ImageSet(source, "all", (), (), live=LiveFrames(source))
    video = VideoFile(source)
    if not video.count:
        raise DataError(f"{source} does not say how many frames it has; convert it, for example to MP4 with H.264")
    refs = (ImageRef(f"{source}#{i}", None, functools.partial(video.read, i)) for i in range(video.count))
    return ImageSet(source, "all", (), tuple(refs), in_order=True)


def _of_timm(source: str, part: Literal["train", "eval"]) -> ImageSet:
    classes, images = read_timm(source, part)
    which: Split = "train" if part == "train" else "val"
    refs = (ImageRef(name, label, read) for name, label, read in images)
    return ImageSet(source, which, tuple(classes), tuple(sorted(refs, key=lambda ref: ref.name)))


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
    text = ", ".join(repr(name) for name in listed[:5])
    return text if len(listed) <= 5 else f"{text} and {len(listed) - 5} more"
