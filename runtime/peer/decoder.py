"""Decoder of images into the input of the stem, on a separate thread.

The header of an image bounds the memory and the time that decoding takes (``ls_edge.data.decoding``). If a decoder
hangs anyway, the image counts as undecodable, and another thread continues with the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import PIL.Image

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import LsEdgeError
from ls_edge.data.preprocess import Preprocessor
from ls_edge.device.worker import Worker
from ls_edge.runtime.protocol.codecs.image import EncodedImage
from ls_edge.runtime.protocol.messages import TransferId
from ls_edge.runtime.routing.state.events import Decode, Decoded

DECODE_WITHIN_S = 60.0
"""Seconds after which the decoder of an image counts as hung. The slowest image found within the limits, a PNG of 67
million pixels, took 1.2 s on a core of an AMD EPYC; this allows for a core that is 50 times slower or busier."""
_NO_IMAGE = EncodedImage(b"\0")
"""Placeholder that returns to the source instead of an undecodable image."""


class Decoder:
    """Decoder of images, one at a time in order of arrival; used by the thread of the links."""

    def __init__(
        self, spec: ImageSpec, name: str, wake: Callable[[], None], is_held: Callable[[TransferId], bool]
    ) -> None:
        """Start the thread ``name``, which calls ``wake`` after each image; drop images that are no longer held."""
        self._preprocess = Preprocessor(spec)
        PIL.Image.init()  # load the decoders now, which would otherwise delay the first image
        self._name, self._wake, self._is_held = name, wake, is_held
        self._waiting: deque[Decode] = deque()
        self._running: tuple[Decode, float] | None = None
        self._worker: Worker[Decoded] = Worker(name, wake)

    def submit(self, decode: Decode) -> None:
        """Decode an image after those submitted before."""
        self._waiting = deque(one for one in self._waiting if self._is_held(one.transfer))
        self._waiting.append(decode)
        self._start()

    def results(self) -> list[Decoded]:
        """Return the images that were decoded, or failed to decode, since the last call."""
        found = self._worker.results()
        if self._running is not None and not found and time.monotonic() > self._running[1] + DECODE_WITHIN_S:
            why = f"the image was not decoded within {DECODE_WITHIN_S:g} s; save it again, as JPEG or PNG"
            found = [Decoded(self._running[0].transfer, _NO_IMAGE, round(DECODE_WITHIN_S * 1e6), why)]
            self._worker.close(0.0)
            self._worker = Worker(self._name, self._wake)
        if found:
            self._running = None
            self._start()
        return found

    @property
    def is_busy(self) -> bool:
        """Whether an image is being decoded, so that :meth:`results` has a time limit to check."""
        return self._running is not None

    def close(self) -> None:
        """Stop the thread after the current image."""
        self._worker.close()

    def _start(self) -> None:
        if self._running is None and self._waiting:
            decode = self._waiting.popleft()
            self._running = decode, time.monotonic()
            self._worker.submit(lambda: self._decode(decode))

    def _decode(self, decode: Decode) -> Decoded:
        started, why = time.perf_counter(), ""
        image: EncodedImage = decode.image
        try:
            image = image._replace(pixels=self._preprocess(image.content, "the image")[None])
        except LsEdgeError as error:
            image, why = _NO_IMAGE, str(error)
        except Exception as error:  # noqa: BLE001  a library may raise anything
            image, why = _NO_IMAGE, f"cannot decode the image: {error!r}"
        return Decoded(decode.transfer, image, round((time.perf_counter() - started) * 1e6), why)
