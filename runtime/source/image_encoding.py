"""Encoding of images for a source without a bundle, which needs neither an engine library nor an image decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.errors import DataError, UsageError
from ls_edge.runtime.protocol.codecs.image import MAX_IMAGE, EncodedImage


def encode_image(image: Any, name: str = "image", on_large: Callable[[], None] = lambda: None) -> EncodedImage:  # noqa: ARG001
    """Return an encoded image: the bytes of a file, or pixels uint8 ``[H, W, 3]`` or ``[H, W]`` as PPM or PGM.

    It has the arguments of a ``Preprocessor``, which decodes and may call ``on_large``. Raise :class:`DataError` for a
    file that cannot be read or is too long, and :class:`UsageError` for any other object.
    """
    if isinstance(image, EncodedImage):
        return image
    if isinstance(image, (str, Path)):
        try:
            content = Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {image}: {error.strerror}") from None
    elif isinstance(image, bytes):
        content = image
    else:
        pixels = np.asarray(image.convert("RGB")) if hasattr(image, "convert") else image
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,)):
            raise UsageError(
                f"{name or 'image'}: without a bundle, a source can only send files and pixels uint8 [H, W, 3]; give "
                "one of these, or open the source with the bundle"
            )
        kind, (height, width) = 5 + pixels.ndim // 3, pixels.shape[:2]
        content = b"P%d %d %d 255\n" % (kind, width, height) + pixels.tobytes()
    if not 0 < len(content) <= MAX_IMAGE:
        raise DataError(
            f"{name or 'image'} has {len(content)} bytes, from 1 to {MAX_IMAGE} can be sent; scale it down, or save it "
            "as JPEG"
        )
    return EncodedImage(content)
