"""A peer's decoder handles several images at the same time, and a broken one does not stop the others."""

import io
import threading

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.peer.decoder import Decoder
from ls_edge.runtime.protocol.messages import TransferId
from ls_edge.runtime.protocol.payload import EncodedImage
from ls_edge.runtime.routing.state.events import Decode


def photo(seed):
    encoded = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)).save(encoded, "PNG")
    return encoded.getvalue()


@pytest.mark.processes
def test_images_are_decoded_as_the_preprocessor_does_and_dropped_ones_are_not(tiny_bundle, wait_until):
    spec, woken, found = Bundle.open(tiny_bundle).manifest.image, threading.Event(), {}
    decoder = Decoder(spec, "test", woken.set, lambda transfer: transfer.request[0] != 3)
    for number, content in enumerate((photo(0), photo(1)[:60], photo(2), photo(3), photo(4))):
        decoder.submit(Decode(TransferId(bytes([number] * 16), 1, 1), EncodedImage(content)))

    def has_all():
        found.update({one.transfer.request[0]: one for one in decoder.results()})
        return len(found) == 4

    wait_until(has_all)
    decoder.close()
    assert woken.is_set()
    assert found.keys() == {0, 1, 2, 4}
    assert found[1].why.startswith("no image: cannot decode the image: ")
    assert found[1].tokens.pixels is None
    for number in (0, 2, 4):
        assert not found[number].why
        np.testing.assert_array_equal(found[number].tokens.pixels, Preprocessor(spec)(photo(number))[None])
