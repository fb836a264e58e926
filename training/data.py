"""Training images: decoding, split, batches, and augmentation, all determined by the seed and the epoch.

Batches are uint8 ``[B, 3, H, W]`` and are normalized on the model's device. Small sets are decoded once and kept in
memory; larger sets, and sets with timm's augmentation, are decoded in every epoch, optionally by worker processes.
Validation images get the same preprocessing as on a board (``ls_edge.data.preprocess``). Images that cannot be decoded
are reported, skipped, and counted.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import timm.data
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError
from ls_edge.data.datasets import ImageRef, ImageSet
from ls_edge.data.decoding import decode
from ls_edge.data.preprocess import Preprocessor
from ls_edge.device import hardware
from ls_edge.training.config import TrainConfig
from ls_edge.training.distributed import DistributedContext

_timm_data: Any = timm.data
Batch = tuple[Tensor, Tensor]
"""Pixels uint8 ``[B, 3, H, W]`` and labels int64 ``[B]``."""
MAX_WORKERS = 8
"""Default maximum of decoding processes; more would only wait for the disk or the GPU."""


def split(images: ImageSet, part: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of training and validation images; the latter are a seeded ``part``, at least one image.

    Validation images are in random order, so that the first ones are a fair sample. Each class keeps at least one
    training image. Raise :class:`DataError` for a set of one class.
    """
    by_class: dict[int, list[int]] = {}
    for index, image in enumerate(images.images):
        assert image.label is not None
        by_class.setdefault(image.label, []).append(index)
    if len(by_class) < 2:
        only = images.classes[next(iter(by_class))] if by_class else "none"
        raise DataError(f"{images.source} has images of one class only ({only}); training needs two or more")
    rng = random.Random((seed << 8) ^ 0x51)
    held: list[int] = []
    owed = 0.5  # images from classes too small to give one each; half an image rounds it
    for label in sorted(by_class):
        indices = by_class[label]
        rng.shuffle(indices)
        count = min(round(part * len(indices)), len(indices) - 1)
        if not count and len(indices) > 1:
            owed += part * len(indices)
            count = int(owed)
            owed -= count
        held += indices[:count]
        del indices[:count]
    if not held:
        held.append(max(by_class.values(), key=len).pop(0))
    return sorted(itertools.chain(*by_class.values())), rng.sample(held, len(held))


class ImageDataset(Dataset[tuple[Tensor | None, int, str]]):
    """Images of a set as uint8 ``[3, H, W]`` with their label, or with the reason if decoding failed."""

    def __init__(self, images: Sequence[ImageRef], spec: ImageSpec, transform: Callable[[Any], Any] | None) -> None:
        self.images = images
        self.preprocess = Preprocessor(spec)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor | None, int, str]:
        image = self.images[index]
        label = -1 if image.label is None else image.label
        try:
            picture = decode(image.read(), image.name, exif_orientation=self.preprocess.spec.exif_orientation is True)
            if self.transform is not None:
                return torch.as_tensor(self.transform(picture)), label, ""
            pixels = np.array(self.preprocess.crop(picture, image.name)).transpose(2, 0, 1)
        except DataError as error:
            return None, label, str(error)
        return torch.from_numpy(np.ascontiguousarray(pixels)), label, ""


class Batches:
    """Batches of one part of a set; :meth:`epoch` shuffles and augments, :meth:`fixed` does neither."""

    def __init__(
        self,
        images: Sequence[ImageRef],
        spec: ImageSpec,
        config: TrainConfig,
        *,
        augment: str,
        on_skipped: Callable[[str], None],
        on_decoded: Callable[[], None] = lambda: None,
        context: DistributedContext = DistributedContext(),  # noqa: B008 - frozen
        pin: bool = False,
    ) -> None:
        """Decode the images if they fit in memory; ``augment`` is a result of :func:`choose_augment`.

        ``on_skipped`` receives the reason, with the name of the image, whenever an image cannot be decoded. ``pin``
        puts batches in pinned memory, from which a GPU can copy while it computes.
        """
        self.config, self._augment, self._on_skipped = config, augment, on_skipped
        self._context, self._pin = context, pin
        self._set = ImageDataset(tuple(images), spec, _timm_transform(spec) if augment == "timm" else None)
        self._pixels: Tensor | None = None
        self._labels = torch.tensor([-1 if image.label is None else image.label for image in images])
        if augment != "timm" and len(images) * 3 * spec.size[0] * spec.size[1] <= config.data.cache_mb << 20:
            self._keep(on_decoded)

    def __len__(self) -> int:
        return len(self._labels)

    def steps(self) -> int:
        """Return the number of batches per epoch; images beyond the last full batch are left out."""
        return len(self) // self.config.batch_size

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this process's share of the shuffled and augmented batches, without undecodable images."""
        size, rank = self.config.batch_size, self._context.rank
        local = self._context.local_batch_size(size)
        generator = torch.Generator().manual_seed((self.config.seed << 20) ^ epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        batches = [order[i * size : (i + 1) * size] for i in range(self.steps())]
        share = slice(rank * local, (rank + 1) * local)
        if self._pixels is not None:  # shifts are drawn for the whole batch, so that all processes draw the same
            for batch in self._load(batches, generator):
                assert batch is not None
                pixels, labels = batch
                yield self._pinned(augment(pixels, self._augment, generator)[share], labels[share])
            return
        for pixels, labels in self._same_count(self._load([batch[share] for batch in batches], generator)):
            yield self._pinned(augment(pixels, self._augment, generator), labels)

    def fixed(self) -> Iterator[Batch]:
        """Yield all images in the order of the set without augmentation; several processes divide the batches.

        If no image can be decoded, a single process raises :class:`DataError`; one of several yields nothing.
        """
        rows, size = list(range(len(self))), self.config.batch_size
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        share = batches[self._context.rank :: self._context.world_size]
        used = False
        for batch in self._load(share, torch.Generator().manual_seed(0)):
            if batch is not None:
                used = True
                yield self._pinned(*batch)
        if share and not used and self._context.world_size == 1:
            raise self.all_unreadable()

    def all_unreadable(self) -> DataError:
        """Return the error for a set in which no image can be decoded."""
        images = self._set.images
        return DataError(
            f"none of {len(images)} images can be decoded (the first is {images[0].name}); check the files"
        )

    def _same_count(self, batches: Iterator[Batch | None]) -> Iterator[Batch]:
        """Yield the usable batches; with several processes, exactly one for each step.

        Since processes that train together average their gradients in every step, the last good batch replaces an empty
        one. A single process skips it.
        """
        first = next((batch for batch in batches if batch is not None), None)
        if self._context.any(first is None):
            raise self.all_unreadable()
        assert first is not None
        yield first
        yielded, good = 1, first
        for batch in batches:
            if batch is None and self._context.world_size == 1:
                continue
            good = good if batch is None else batch
            yielded += 1
            yield good
        while self._context.world_size > 1 and yielded < self.steps():  # replaces batches before the first good one
            yielded += 1
            yield good

    def _pinned(self, pixels: Tensor, labels: Tensor) -> Batch:
        return (pixels.pin_memory(), labels.pin_memory()) if self._pin else (pixels, labels)

    def _keep(self, on_decoded: Callable[[], None]) -> None:
        good: list[tuple[Tensor, int]] = []
        with ThreadPoolExecutor(2, thread_name_prefix="decode") as pool:
            for pixels, label, why in pool.map(self._set.__getitem__, range(len(self._set)), chunksize=64):
                on_decoded()
                if pixels is None:
                    self._on_skipped(why)
                else:
                    good.append((pixels, label))
        if not good:
            raise self.all_unreadable()
        self._pixels, self._labels = torch.stack([pixels for pixels, _ in good]), torch.tensor([at for _, at in good])

    def _load(self, batches: list[list[int]], generator: torch.Generator) -> Iterator[Batch | None]:
        """Yield each batch without undecodable images, or None if no image is left."""
        if self._pixels is not None:
            for rows in batches:
                yield self._pixels[rows], self._labels[rows]
            return
        workers = self.config.data.workers
        workers = default_workers(on_gpu=self._pin) if workers is None else workers
        loader: DataLoader[Any] = DataLoader(
            self._set,
            batch_sampler=batches,
            num_workers=workers,
            generator=generator,
            collate_fn=_collate,
            prefetch_factor=4 if workers else None,
        )
        for batch, reasons in loader:
            for why in reasons:
                self._on_skipped(why)
            yield batch


def default_workers(*, on_gpu: bool) -> int:
    """Return the default number of decoding processes: enough to feed a GPU, none on the CPU.

    On the CPU, training itself needs the cores; with a GPU, all but one core of this process's share are free.
    """
    if not on_gpu:
        return 0
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_WORKERS, hardware.cores() // processes - 1))


def _collate(items: list[tuple[Tensor | None, int, str]]) -> tuple[Batch | None, list[str]]:
    good = [(pixels, label) for pixels, label, _ in items if pixels is not None]
    reasons = [why for pixels, _, why in items if pixels is None]
    if not good:
        return None, reasons
    return (torch.stack([pixels for pixels, _ in good]), torch.tensor([label for _, label in good])), reasons


def _timm_transform(spec: ImageSpec) -> Callable[[Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Callable[[Any], Any] = _timm_data.create_transform(
            input_size=(3, *spec.size),
            is_training=True,
            use_prefetcher=True,
            auto_augment="rand-m7-mstd0.5-inc1",
            interpolation=spec.interpolation,
            mean=spec.mean,
            std=spec.std,
            scale=(0.35, 1.0),
        )
    return made


def choose_augment(wanted: str, source: str, spec: ImageSpec) -> str:
    """Return ``wanted``, or the augmentation that ``auto`` selects for these images."""
    if wanted != "auto":
        return wanted
    if source == "digits":
        return "shift"
    return "crop" if max(spec.size) <= 64 else "timm"


def augment(pixels: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Shift images uint8 ``[B, 3, H, W]`` by up to a sixteenth; ``crop`` shifts by up to an eighth and also mirrors."""
    if kind not in ("shift", "crop"):
        return pixels
    count, _, height, width = pixels.shape
    reach = max(1, min(height, width) // (8 if kind == "crop" else 16))
    padded = torch.nn.functional.pad(pixels, (reach, reach, reach, reach))
    down = torch.randint(0, 2 * reach + 1, (count, 1), generator=generator) + torch.arange(height)
    right = torch.randint(0, 2 * reach + 1, (count, 1), generator=generator) + torch.arange(width)
    if kind == "crop":
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        right = torch.where(mirrored, right.flip(1), right)
    rows = torch.arange(count)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[rows, down[:, :, None], right[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def normalizer(spec: ImageSpec, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that converts pixels uint8 ``[B, 3, H, W]`` to the stem's input on ``device``."""
    mean = torch.tensor(spec.mean, device=device)[:, None, None] * 255
    scale = 1 / (torch.tensor(spec.std, device=device)[:, None, None] * 255)
    return lambda pixels: (pixels.to(device, non_blocking=True).float() - mean) * scale
