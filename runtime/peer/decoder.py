"""Images of requests to the stem's input, on a thread of their own.

The header of an image bounds the memory and the time that decoding takes (``ls_edge.data.decoding``). Should a decoder
hang nevertheless, the image counts as one that cannot be decoded, and another thread goes on with the next.
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
"""Seconds for one image, after which its decoder counts as hung. The slowest image within the limits that was found, a
PNG of 67 million pixels, took 1.2 s of a core of an AMD EPYC; this allows for one that is 50 times slower or busier."""
_NO_IMAGE = EncodedImage(b"\0")
"""What goes home in the place of an image that cannot be decoded."""


class Decoder:
    """Decodes one image at a time, in the order of their arrival; used by the thread of the links."""

    def __init__(
        self, spec: ImageSpec, name: str, wake: Callable[[], None], is_held: Callable[[TransferId], bool]
    ) -> None:
        """Call ``wake`` after each image, and drop those that are not held any more; ``name`` is that of the thread."""
        self._preprocess = Preprocessor(spec)
        PIL.Image.init()  # loads the decoders, which would otherwise delay the first image
        self._name, self._wake, self._is_held = name, wake, is_held
        self._waiting: deque[Decode] = deque()
        self._running: tuple[Decode, float] | None = None
        self._worker: Worker[Decoded] = Worker(name, wake)

    def submit(self, decode: Decode) -> None:
        """Decode an image when those before are done."""
        self._waiting = deque(one for one in self._waiting if self._is_held(one.transfer))
        self._waiting.append(decode)
        self._start()

    def results(self) -> list[Decoded]:
        """Return the images that were decoded, or cannot be, since the last call."""
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
        """Whether an image is being decoded, which has to end in time."""
        return self._running is not None

    def close(self) -> None:
        """End the thread after its present image."""
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
