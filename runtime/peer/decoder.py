"""Decoding of images into the input of the stem, in processes of their own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError
from ls_edge.core.logs import LoggedCounts
from ls_edge.data.decoders import Decoders
from ls_edge.runtime.protocol.messages import ReturnReason, TransferId
from ls_edge.runtime.protocol.payload import EncodedImage
from ls_edge.runtime.routing.state.events import Decode, Decoded

AT_ONCE = 8
"""Number of images that are decoded at the same time: one that takes long does not delay the others."""
_NO_IMAGE = EncodedImage(b"\0")
"""Placeholder that returns to the source instead of an image that was not decoded."""


class Decoder:
    """Decoder of the images of a peer; used by the thread of the links."""

    def __init__(
        self, spec: ImageSpec, name: str, wake: Callable[[], None], is_held: Callable[[TransferId], bool]
    ) -> None:
        """Call ``wake`` after each image, on threads called ``name``; drop images that are no longer held."""
        self._spec, self._wake, self._is_held = spec, wake, is_held
        self._decoders = Decoders()
        self._threads = ThreadPoolExecutor(AT_ONCE, name)
        self._results: deque[Decoded] = deque()
        self._failures = LoggedCounts()
        self._threads.submit(self._decoders.start)

    def submit(self, decode: Decode) -> None:
        """Decode an image."""
        self._threads.submit(self._decode, decode)

    def results(self) -> list[Decoded]:
        """Return the images that were decoded, or failed to decode, since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """End the processes; images that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._decoders.close()

    def _decode(self, decode: Decode) -> None:
        if not self._is_held(decode.transfer):
            return
        started, why = time.perf_counter(), ""
        image: EncodedImage = decode.image
        try:
            pixels = self._decoders.decode(self._spec, image.content, "the image").pixels
            image = image._replace(pixels=pixels[None])
        except DataError as error:
            image, why = _NO_IMAGE, f"{ReturnReason.NO_IMAGE}: {error}"
        except Exception as error:  # noqa: BLE001  such as no descriptor: another peer may decode it
            image, why = _NO_IMAGE, f"cannot decode the image: {error!r}"
            self._failures.note("images", "an image was not decoded", why=repr(error))
        self._results.append(Decoded(decode.transfer, image, round((time.perf_counter() - started) * 1e6), why))
        self._wake()
