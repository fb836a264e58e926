"""Encoding of images for a source without a bundle, which needs neither an engine library nor an image decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError
from ls_edge.data.any_image import read_any
from ls_edge.runtime.protocol.payload import MAX_IMAGE, EncodedImage


class ImageEncoder:
    """Callable that turns an image into an encoded one, as a ``Preprocessor`` is called."""

    def __init__(self, spec: ImageSpec) -> None:
        self._exif_orientation = spec.exif_orientation is True

    def __call__(self, image: Any, name: str = "image") -> EncodedImage:
        """Return the bytes of a file; pixels and Pillow images, decoded as everywhere, become PPM or PGM.

        Raise :class:`DataError` for an image that cannot be read or is too long, and :class:`UsageError` for other
        objects.
        """
        if isinstance(image, EncodedImage):
            return image
        name = name or "image"
        content = read_any(image, name)
        if not isinstance(content, (bytes, np.ndarray)):
            from ls_edge.data.decoding import decode  # Pillow is installed if the image is a Pillow image

            content = np.asarray(decode(content, name, exif_orientation=self._exif_orientation, keep_gray=True))
        if isinstance(content, np.ndarray):
            kind, (height, width) = 5 + content.ndim // 3, content.shape[:2]
            content = b"P%d %d %d 255\n" % (kind, width, height) + content.tobytes()
        if not 0 < len(content) <= MAX_IMAGE:
            raise DataError(
                f"{name} has {len(content)} bytes, from 1 to {MAX_IMAGE} can be sent; scale it down, or save it as JPEG"
            )
        return EncodedImage(content)
