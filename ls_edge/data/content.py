"""Images by their content: equal pictures in a set, and those that a model was trained on.

The digest of an image is 48 bits of the SHA-256 of its file, whatever its name. A model records the digests of its
training images (:class:`KnownImages`): all of them or, of a large set, a sample, which are the smallest ones.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ls_edge.core.errors import DataError
from ls_edge.core.logs import OnWarning
from ls_edge.core.text import counted
from ls_edge.data.datasets import ImageRef, ImageSet

Digests = npt.NDArray[np.uint64]
MOST_DIGESTS = 4096
"""Number of digests that a model records, 33 KB as text; of sets with more images, they are a sample."""
_BYTES = 6


def digests_of(images: Iterable[ImageRef], on_image: Callable[[], None] = lambda: None) -> Digests:
    """Return the digest of each image; that of an image that cannot be read depends on its name."""

    def digest(image: ImageRef) -> int:
        try:
            found = image.read()
        except DataError:
            found = f"unreadable\0{image.name}".encode("utf-8", "surrogateescape")
        if not isinstance(found, bytes):
            pixels = np.ascontiguousarray(found)
            found = f"{pixels.shape}\0".encode() + pixels.tobytes()
        on_image()
        return int.from_bytes(hashlib.sha256(found).digest()[:_BYTES], "big")

    with ThreadPoolExecutor(2, thread_name_prefix="digest") as pool:
        return np.fromiter(pool.map(digest, images), np.uint64)


@dataclass(frozen=True)
class KnownImages:
    """The images that a model was trained on."""

    count: int
    """Number of different images."""
    digests: Digests
    """Smallest digests in ascending order, at most :data:`MOST_DIGESTS`."""

    @classmethod
    def of(cls, digests: Digests, *others: KnownImages) -> KnownImages:
        """Return the images with these digests, together with those of ``others``."""
        found = np.unique(np.concatenate([digests, *(other.digests for other in others)]))
        most = min((int(other.digests[-1]) for other in others if other.is_sample), default=1 << 8 * _BYTES)
        found = found[found <= most]
        return cls(round(len(found) * 2 ** (8 * _BYTES) / most), found[:MOST_DIGESTS])

    @classmethod
    def read(cls, text: str) -> KnownImages | None:
        """Return the images from :meth:`write`; None for any other text."""
        count, _, encoded = text.partition(":")
        try:
            raw = np.frombuffer(base64.b64decode(encoded, validate=True), np.uint8).reshape(-1, _BYTES)
        except (binascii.Error, ValueError):
            return None
        padded = np.zeros((len(raw), 8), np.uint8)
        padded[:, 8 - _BYTES :] = raw
        is_number = count.isdecimal() and len(count) < 20
        if not is_number or not min(1, int(count)) <= len(raw) <= int(count):
            return None
        return cls(int(count), padded.view(">u8").ravel().astype(np.uint64))

    def write(self) -> str:
        """Return the images as text."""
        raw = self.digests.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - _BYTES :]
        return f"{self.count}:{base64.b64encode(raw.tobytes()).decode()}"

    @property
    def is_sample(self) -> bool:
        """Whether some images are not recorded."""
        return self.count > len(self.digests)

    def contains(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Return whether each image is recorded."""
        return np.isin(digests, self.digests)

    def count_in(self, digests: Digests) -> int:
        """Return the number of different images with these digests that are known, estimated from a sample."""
        found = np.unique(digests)
        if not self.is_sample:
            return int(self.contains(found).sum())
        asked = found[found <= self.digests[-1]]
        return round(len(found) * float(self.contains(asked).mean())) if len(asked) else 0


@dataclass(frozen=True)
class Overlap:
    """Number of different images in a set, and of those that a model was trained on."""

    different: int
    known: int

    @classmethod
    def of(cls, images: ImageSet, trained_on: str, warn: OnWarning) -> Overlap:
        """Compare a set with a model's training images (:meth:`KnownImages.write`), and warn if it has some of them."""
        each = {image.name: image for image in images.images}
        known = KnownImages.read(trained_on)
        if known is None or not images.classes:
            return cls(len(each), 0)
        digests = digests_of(each.values())
        found = cls(len(np.unique(digests)), known.count_in(digests))
        if found.known:
            warn(
                f"the model was trained on {found.known:,} of the {counted(found.different, 'different image')} of "
                f"{images.source}, so its accuracy on them says little; use others"
            )
        return found
