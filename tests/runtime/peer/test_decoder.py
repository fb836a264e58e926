"""A decoder handles one image after the other, and a hung or broken image does not stop it."""

import io
import threading

import numpy as np
import pytest
from PIL import Image
from PIL.ImageFile import ImageFile

from ls_edge.core.bundle import Bundle
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.peer import decoder as module
from ls_edge.runtime.peer.decoder import Decoder
from ls_edge.runtime.protocol.codecs.image import EncodedImage
from ls_edge.runtime.protocol.messages import TransferId
from ls_edge.runtime.routing.state.events import Decode


def photo(seed=0):
    encoded = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)).save(encoded, "PNG")
    return encoded.getvalue()


def decode(number, content):
    return Decode(TransferId(bytes([number] * 16), 1, 1), EncodedImage(content))


class Wanted:
    """Transfers that are held, and a decoder for them."""

    def __init__(self, spec):
        self.dropped, self.woken = set(), threading.Event()
        self.decoder = Decoder(spec, "test", self.woken.set, lambda transfer: transfer not in self.dropped)
        self.found = []

    def has(self, count):
        self.found += self.decoder.results()
        return len(self.found) == count

    def numbers(self):
        return [one.transfer.request[0] for one in self.found]


@pytest.fixture
def wanted(tiny_bundle):
    wanted = Wanted(Bundle.open(tiny_bundle).manifest.image)
    yield wanted
    wanted.decoder.close()


def test_images_are_decoded_in_order_as_the_preprocessor_does(wanted, tiny_bundle, wait_until):
    for number in range(3):
        wanted.decoder.submit(decode(number, photo(number)))
    assert wanted.decoder.is_busy
    wait_until(lambda: wanted.has(3), what="three images")
    assert wanted.woken.is_set()
    assert not wanted.decoder.is_busy
    preprocess = Preprocessor(Bundle.open(tiny_bundle).manifest.image)
    assert wanted.numbers() == [0, 1, 2]
    for number, one in enumerate(wanted.found):
        np.testing.assert_array_equal(one.tokens.pixels, preprocess(photo(number))[None])


def test_an_undecodable_image_has_a_reason_and_does_not_stop_the_next(wanted, wait_until):
    wanted.decoder.submit(decode(0, photo()[:60]))
    wanted.decoder.submit(decode(1, photo()))
    wait_until(lambda: wanted.has(2), what="both images")
    assert [bool(one.why) for one in wanted.found] == [True, False]
    assert wanted.found[0].tokens.pixels is None


def test_waiting_images_are_dropped_once_they_are_not_held(wanted, wait_until, monkeypatch):
    go, load = threading.Event(), ImageFile.load
    monkeypatch.setattr(ImageFile, "load", lambda picture: load(picture) if go.wait(20) else None)
    for number in range(3):
        wanted.decoder.submit(decode(number, photo()))
    wanted.dropped.add(decode(1, b"").transfer)
    wanted.decoder.submit(decode(3, photo()))
    go.set()
    wait_until(lambda: wanted.has(3), what="the other images")
    assert wanted.numbers() == [0, 2, 3]


def test_a_hung_decoder_is_abandoned_and_the_next_image_is_decoded(wanted, wait_until, monkeypatch):
    go, load, hung = threading.Event(), ImageFile.load, []

    def hang_once(picture):
        if not hung:
            hung.append(threading.current_thread())
            go.wait(20)
        return load(picture)

    monkeypatch.setattr(ImageFile, "load", hang_once)
    wanted.decoder.submit(decode(0, photo()))
    wait_until(lambda: hung, what="a decoder that hangs")
    monkeypatch.setattr(module, "DECODE_WITHIN_S", 0.0)
    wait_until(lambda: wanted.has(1), what="the end of its time")
    monkeypatch.undo()
    wanted.decoder.submit(decode(1, photo()))
    wait_until(lambda: wanted.has(2), what="the next image")
    go.set()
    hung[0].join(20)
    assert wanted.numbers() == [0, 1]
    assert "was not decoded within" in wanted.found[0].why
    assert not wanted.found[1].why
