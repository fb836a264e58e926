"""Training images: decoding, batches, and augmentation, all determined by the seed and the epoch.

Batches are uint8 ``[B, 3, H, W]`` and are normalized on the model's device. Small sets are decoded once and kept in
memory; larger sets, and sets with timm's augmentation, are decoded in every epoch, optionally by worker processes.
The result is the same. Validation images get the same preprocessing as on a board (``ls_edge.data.preprocess``).
Images that cannot be decoded are reported, skipped, and counted.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import timm.data
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError
from ls_edge.data.datasets import ImageRef
from ls_edge.data.decoding import decode
from ls_edge.data.preprocess import Preprocessor
from ls_edge.device import hardware
from ls_edge.training.config import TrainConfig
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.precision import seeded

_timm_data: Any = timm.data
MAX_WORKERS = 8
"""Default maximum of decoding processes; more would only wait for the disk or the GPU."""


class Batch(NamedTuple):
    """The part of a batch that one process trains on, without images that cannot be decoded."""

    pixels: Tensor
    """uint8 ``[B, 3, H, W]``"""
    labels: Tensor
    """int64 ``[B]``"""
    places: tuple[int, ...]
    """Place of each image in the batch of all processes, including undecodable images; empty if there is no image."""


class ImageDataset(Dataset[tuple[np.ndarray | None, str]]):
    """Images of a set as uint8 ``[3, H, W]``, or the reason if decoding failed.

    An item is the index of an image and a seed, from which a random ``transform`` draws: neither the process that
    decodes an image nor the images before it matter.
    """

    def __init__(self, images: Sequence[ImageRef], spec: ImageSpec, transform: Callable[[Any], Any] | None) -> None:
        self.images = images
        self.preprocess = Preprocessor(spec)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray | None, str]:
        row, seed = item
        image = self.images[row]
        try:
            picture = decode(image.read(), image.name, exif_orientation=self.preprocess.spec.exif_orientation is True)
            if self.transform is None:
                return np.array(self.preprocess.crop(picture, image.name)).transpose(2, 0, 1), ""
        except DataError as error:
            return None, str(error)
        with seeded(seed):
            return np.asarray(self.transform(picture)), ""


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
        self._size = spec.size
        self._pixels: Tensor | None = None
        self._labels = torch.tensor([-1 if image.label is None else image.label for image in images])
        self._bad, self._seen = torch.zeros(2, len(images), dtype=torch.bool)
        if augment != "timm" and len(images) * 3 * spec.size[0] * spec.size[1] <= config.data.cache_mb << 20:
            self._keep(on_decoded)

    def __len__(self) -> int:
        return len(self._labels)

    def left_out(self) -> set[str]:
        """Return the names of the images that cannot be decoded; all processes must call this method.

        Images that were in no batch yet are decoded for it.
        """
        if self._pixels is None:
            for row in (self._context.sum(self._seen.int()) == 0).nonzero().flatten().tolist():
                pixels, why = self._set[row, 0]
                if pixels is None:
                    self._skip(row, why)
        bad = self._context.sum(self._bad.int()).nonzero().flatten().tolist()
        return {self._set.images[row].name for row in bad}

    def steps(self) -> int:
        """Return the number of batches per epoch; images beyond the last full batch are left out."""
        return len(self) // self.config.batch_size

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this process's share of the shuffled and augmented batches."""
        size, rank = self.config.batch_size, self._context.rank
        local = self._context.local_batch_size(size)
        generator = torch.Generator().manual_seed((self.config.seed << 20) ^ epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        share = range(rank * local, (rank + 1) * local)
        rows = [[order[step * size + place] for place in share] for step in range(self.steps())]
        for step, pixels, good in self._load(rows, epoch):
            shift = draw_shift(self._augment, size, *self._size, generator)  # of all processes
            places = tuple(share[index] for index in good)
            labels = self._labels[[rows[step][index] for index in good]]
            if shift is not None:
                pixels = shift_images(pixels, *(one[list(places)] for one in shift))
            yield self._pinned(pixels, labels, places)

    def fixed(self) -> Iterator[Batch]:
        """Yield all images in the order of the set without augmentation; several processes divide the batches."""
        size = self.config.batch_size
        rows = [list(range(start, min(start + size, len(self)))) for start in range(0, len(self), size)]
        rows = rows[self._context.rank :: self._context.world_size]
        for step, pixels, good in self._load(rows, 0):
            if good:
                yield self._pinned(pixels, self._labels[[rows[step][index] for index in good]], tuple(good))

    def all_unreadable(self) -> DataError:
        """Return the error for a set in which no image can be decoded."""
        images = self._set.images
        return DataError(
            f"none of {len(images)} images can be decoded (the first is {images[0].name}); check the files"
        )

    def _pinned(self, pixels: Tensor, labels: Tensor, places: tuple[int, ...]) -> Batch:
        return Batch(pixels.pin_memory(), labels.pin_memory(), places) if self._pin else Batch(pixels, labels, places)

    def _skip(self, row: int, why: str) -> None:
        self._bad[row] = True
        self._on_skipped(why)

    def _keep(self, on_decoded: Callable[[], None]) -> None:
        self._pixels = torch.zeros(len(self), 3, *self._size, dtype=torch.uint8)
        with ThreadPoolExecutor(2, thread_name_prefix="decode") as pool:
            items = ((row, 0) for row in range(len(self)))
            for row, (pixels, why) in enumerate(pool.map(self._set.__getitem__, items)):
                on_decoded()
                if pixels is None:
                    self._skip(row, why)
                else:
                    self._pixels[row] = torch.from_numpy(np.ascontiguousarray(pixels))
        if self._bad.all():
            raise self.all_unreadable()

    def _load(self, batches: list[list[int]], epoch: int) -> Iterator[tuple[int, Tensor, list[int]]]:
        """Yield the number of each batch, the pixels of its usable images, and their places in it."""
        if self._pixels is not None:
            for step, rows in enumerate(batches):
                good = [index for index, row in enumerate(rows) if not self._bad[row]]
                yield step, self._pixels[[rows[index] for index in good]], good
            return
        seed = random.Random((self.config.seed << 32) ^ epoch).getrandbits(32)
        loader: DataLoader[Any] = DataLoader(
            self._set,
            batch_sampler=[[(row, seed ^ (row * 0x9E3779B1) & 0xFFFFFFFF) for row in rows] for rows in batches],
            num_workers=self.workers(),
            generator=torch.Generator(),  # the global one is for the model
            collate_fn=list,  # arrays travel through pipes; tensors would need shared memory
            prefetch_factor=4 if self.workers() else None,
        )
        for step, items in enumerate(loader):
            self._seen[batches[step]] = True
            for row, (pixels, why) in zip(batches[step], items, strict=True):
                if pixels is None:
                    self._skip(row, why)
            good = [index for index, (pixels, _) in enumerate(items) if pixels is not None]
            found = np.zeros((len(good), 3, *self._size), np.uint8)  # one layout, whoever decoded
            for row, index in enumerate(good):
                found[row] = items[index][0]
            yield step, torch.from_numpy(found), good

    def workers(self) -> int:
        """Return the number of decoding processes."""
        workers = self.config.data.workers
        if multiprocessing.current_process().daemon:  # it may not start processes
            return 0
        return default_workers(on_gpu=self._pin) if workers is None else workers


def default_workers(*, on_gpu: bool) -> int:
    """Return the default number of decoding processes: enough to feed a GPU, none on the CPU.

    On the CPU, training itself needs the cores; with a GPU, all but one core of this process's share are free.
    """
    if not on_gpu:
        return 0
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_WORKERS, hardware.cores() // processes - 1))


def _timm_transform(spec: ImageSpec) -> Callable[[Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Callable[[Any], Any] = _timm_data.create_transform(
            input_size=(3, *spec.size),
            is_training=True,
            use_prefetcher=True,
            auto_augment="rand-m7-mstd0.5-inc1",
            # Pillow rotates with these three only.
            interpolation=spec.interpolation if spec.interpolation in ("nearest", "bilinear") else "bicubic",
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


def draw_shift(
    kind: str, count: int, height: int, width: int, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """Return the source row and column of each pixel row ``[B, H]`` and column ``[B, W]``, or None without a shift.

    ``shift`` moves images by up to a sixteenth; ``crop`` moves them by up to an eighth and also mirrors them. Indices
    from the image's size on, and negative ones, are black.
    """
    if kind not in ("shift", "crop"):
        return None
    reach = max(1, min(height, width) // (8 if kind == "crop" else 16))
    down = torch.randint(-reach, reach + 1, (count, 1), generator=generator) + torch.arange(height)
    right = torch.randint(-reach, reach + 1, (count, 1), generator=generator) + torch.arange(width)
    if kind == "crop":
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        right = torch.where(mirrored, right.flip(1), right)
    return down, right


def shift_images(pixels: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Move images uint8 ``[B, 3, H, W]`` as :func:`draw_shift` says."""
    height, width = pixels.shape[2:]
    images = torch.arange(len(pixels))[:, None, None]
    rows, columns = down.clamp(0, height - 1)[:, :, None], right.clamp(0, width - 1)[:, None, :]
    moved = pixels.permute(0, 2, 3, 1)[images, rows, columns]
    inside = ((down >= 0) & (down < height))[:, :, None] & ((right >= 0) & (right < width))[:, None, :]
    return (moved * inside[..., None]).permute(0, 3, 1, 2).contiguous()


def normalizer(spec: ImageSpec, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that converts pixels uint8 ``[B, 3, H, W]`` to the stem's input on ``device``."""
    mean = torch.tensor(spec.mean, device=device)[:, None, None] * 255
    scale = 1 / (torch.tensor(spec.std, device=device)[:, None, None] * 255)
    return lambda pixels: (pixels.to(device, non_blocking=True).float() - mean) * scale
