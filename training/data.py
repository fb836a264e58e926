"""Images for training: decoded to pixels, split, batched, augmented, all determined by the seed and the epoch.

Batches are uint8 ``[B, 3, H, W]``, normalised where the model is. Small sets are decoded once and kept in memory;
larger ones, and those with timm's augmentation, are decoded every epoch, by worker processes if asked for. Images
for validation go through the very preprocessing that a board uses (``ls_edge.data.preprocess``).

An image that cannot be decoded is reported, left out and counted. Datasets that cannot be indexed are not supported.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from ls_edge.training.config import DataConfig
from ls_edge.training.distributed import DistributedContext

_timm_data: Any = timm.data
Batch = tuple[Tensor, Tensor]
"""Pixels uint8 ``[B, 3, H, W]`` and labels int64 ``[B]``."""
MAX_WORKERS = 8
"""Most processes that decode by default; more than these wait for a disk, or for the GPU."""


def split(images: ImageSet, part: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and a seeded ``part`` of each class that selects, at least one image of all.

    Raises :class:`DataError` for a set of one class.
    """
    by_class: dict[int, list[int]] = {}
    for index, image in enumerate(images.images):
        assert image.label is not None
        by_class.setdefault(image.label, []).append(index)
    if len(by_class) < 2:
        only = images.classes[next(iter(by_class))] if by_class else "none"
        raise DataError(f"{images.source} has images of one class only ({only}); training needs two or more")
    rng = random.Random((seed << 8) ^ 0x51)
    train: list[int] = []
    held: list[int] = []
    for label in sorted(by_class):
        rng.shuffle(by_class[label])
        count = round(part * len(by_class[label]))
        held += by_class[label][:count]
        train += by_class[label][count:]
    if not held:
        held.append(train.pop(0))
    return sorted(train), sorted(held)


@dataclass
class Skipped:
    """Images that could not be decoded; each is reported once."""

    warn: Callable[[str], None]
    reasons: set[str] = field(default_factory=set)
    """One an image; a reason names its image."""

    def add(self, why: str) -> None:
        """Count one and warn."""
        if why not in self.reasons:
            self.reasons.add(why)
            self.warn(f"left out: {why}")


class Decoded(Dataset[tuple[Tensor | None, int, str]]):
    """Images of a set as uint8 ``[3, H, W]``, label and (where decoding failed) the reason."""

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
    """The batches of one part of a set: :meth:`epoch` shuffled and augmented, :meth:`fixed` neither."""

    def __init__(
        self,
        images: Sequence[ImageRef],
        spec: ImageSpec,
        config: DataConfig,
        *,
        batch_size: int,
        seed: int,
        augment: str,
        skipped: Skipped,
        on_decoded: Callable[[int], None] = lambda _: None,
        context: DistributedContext = DistributedContext(),  # noqa: B008 - frozen
        pin: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self._local = context.local_batch_size(batch_size)
        self._context = context
        self._pin = pin
        self._seed = seed
        self._augment = augment
        self._skipped = skipped
        self._workers = default_workers(on_gpu=pin) if config.workers is None else config.workers
        self._images = tuple(images)
        self._transform = _timm_transform(spec) if augment == "timm" else None
        self._set = Decoded(self._images, spec, self._transform)
        self._pixels: Tensor | None = None
        self._labels = torch.tensor([-1 if image.label is None else image.label for image in self._images])
        if self._transform is None and len(images) * 3 * spec.size[0] * spec.size[1] <= config.cache_mb << 20:
            self._keep(on_decoded)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def cached(self) -> bool:
        """Whether all pixels are in memory."""
        return self._pixels is not None

    def steps(self) -> int:
        """Batches an epoch; what remains of a full batch is left to the next epoch's shuffle."""
        return len(self) // self.batch_size

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Shuffled, augmented batches of equal size (smaller where images are left out); a process has its share."""
        generator = torch.Generator().manual_seed((self._seed << 20) ^ epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        batches = [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(self.steps())]
        share = slice(self._context.rank * self._local, (self._context.rank + 1) * self._local)
        if self.cached:  # moved as a whole, so that every process draws for all images alike
            for batch in self._load(batches, generator):
                assert batch is not None  # what cannot be decoded is not in memory
                pixels, labels = batch
                yield self._pinned(augment(pixels, self._augment, generator)[share], labels[share])
            return
        for pixels, labels in self._same_count(self._load([batch[share] for batch in batches], generator)):
            yield self._pinned(augment(pixels, self._augment, generator), labels)

    def fixed(self) -> Iterator[Batch]:
        """All images in the set's order, as they are; several processes divide the batches among themselves.

        A process among several whose share cannot be decoded yields nothing; one by itself raises :class:`DataError`.
        """
        rows = list(range(len(self)))
        batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        share = batches[self._context.rank :: self._context.world_size]
        used = False
        for batch in self._load(share, torch.Generator().manual_seed(0)):
            if batch is not None:
                used = True
                yield self._pinned(*batch)
        if share and not used and self._context.world_size == 1:
            raise self.all_unreadable()

    def all_unreadable(self) -> DataError:
        """The error where no image can be decoded."""
        return DataError(
            f"none of {len(self._images)} images can be used, {self._images[0].name} is the first; check the files"
        )

    def _same_count(self, batches: Iterator[Batch | None]) -> Iterator[Batch]:
        """The batches that can be used, or as many as there were in every process.

        Processes that train together average their gradients in every step, so where there are several the last good
        batch stands in for one that has no image. One process by itself leaves it out.
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
        while self._context.world_size > 1 and yielded < self.steps():  # those ahead of the first good one
            yielded += 1
            yield good

    def _pinned(self, pixels: Tensor, labels: Tensor) -> Batch:
        """In pinned memory where they go to a GPU: only from there they are copied while it computes."""
        return (pixels.pin_memory(), labels.pin_memory()) if self._pin else (pixels, labels)

    def _keep(self, on_decoded: Callable[[int], None]) -> None:
        pixels: list[Tensor] = []
        labels: list[int] = []
        with ThreadPoolExecutor(2, thread_name_prefix="decode") as pool:
            for found, label, why in pool.map(self._set.__getitem__, range(len(self._images)), chunksize=64):
                on_decoded(1)
                if found is None:
                    self._skipped.add(why)
                    continue
                pixels.append(found)
                labels.append(label)
        if not pixels:
            raise self.all_unreadable()
        self._pixels, self._labels = torch.stack(pixels), torch.tensor(labels)

    def _load(self, batches: list[list[int]], generator: torch.Generator) -> Iterator[Batch | None]:
        """Each batch without the images that cannot be decoded; None for one of which none can."""
        if self._pixels is not None:
            for rows in batches:
                yield self._pixels[rows], self._labels[rows]
            return
        loader: DataLoader[Any] = DataLoader(
            self._set, batch_sampler=batches, num_workers=self._workers, generator=generator,
            collate_fn=_collate, worker_init_fn=_seed_worker if self._workers else None,
            prefetch_factor=4 if self._workers else None,
        )  # fmt: skip
        for pixels, labels, reasons in loader:
            for why in reasons:
                self._skipped.add(why)
            yield None if pixels is None else (pixels, labels)


def default_workers(*, on_gpu: bool) -> int:
    """Processes that decode images where the configuration does not say: enough to feed a GPU, none on the CPU.

    On the CPU training itself needs the cores; beside a GPU all but one of this process's share are free.
    """
    if not on_gpu:
        return 0
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_WORKERS, hardware.cores() // processes - 1))


def _collate(items: list[tuple[Tensor | None, int, str]]) -> tuple[Tensor | None, Tensor, list[str]]:
    good = [(pixels, label) for pixels, label, _ in items if pixels is not None]
    reasons = [why for pixels, _, why in items if pixels is None]
    if not good:
        return None, torch.empty(0, dtype=torch.int64), reasons
    return torch.stack([pixels for pixels, _ in good]), torch.tensor([label for _, label in good]), reasons


def _seed_worker(_: int) -> None:
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def _timm_transform(spec: ImageSpec) -> Callable[[Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Callable[[Any], Any] = _timm_data.create_transform(
            input_size=(3, *spec.size), is_training=True, use_prefetcher=True, auto_augment="rand-m7-mstd0.5-inc1",
            interpolation=spec.interpolation, mean=spec.mean, std=spec.std, scale=(0.35, 1.0),
        )  # fmt: skip
    return made


def choose_augment(wanted: str, source: str, spec: ImageSpec) -> str:
    """What ``auto`` means for these images."""
    if wanted != "auto":
        return wanted
    if source == "digits":
        return "shift"
    return "crop" if max(spec.size) <= 64 else "timm"


def augment(pixels: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Augment uint8 ``[B, 3, H, W]``: each image moved by up to an eighth, ``crop`` also mirrored."""
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


def normaliser(spec: ImageSpec, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Function from pixels uint8 ``[B, 3, H, W]`` to the stem's input on ``device``."""
    mean = torch.tensor(spec.mean, device=device)[:, None, None] * 255
    scale = 1 / (torch.tensor(spec.std, device=device)[:, None, None] * 255)

    def normalise(pixels: Tensor) -> Tensor:
        return (pixels.to(device, non_blocking=True).float() - mean) * scale

    return normalise
