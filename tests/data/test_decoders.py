"""Images of others are decoded by processes that may be killed, hang, or need too much, one image after the other."""

import contextlib
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import BudgetExceeded, DataError
from ls_edge.data import decoders as module
from ls_edge.data.decoder_process import LARGE_BYTES, SMALL_BYTES
from ls_edge.data.decoders import Decoders
from ls_edge.data.preprocess import Preprocessor
from tests.data import bombs

pytestmark = [pytest.mark.processes, pytest.mark.leaks_ok("decoders wait for the next test")]
SPEC = ImageSpec((16, 16), (0.5,) * 3, (0.5,) * 3)
PHOTO = bombs.save(bombs.Image.effect_noise((64, 48), 64).convert("RGB"), "JPEG")


@pytest.fixture(scope="module")
def decoders():
    with Decoders() as one:
        yield one


def peak_of(process):
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) << 10


def is_gone(process):
    """Whether a process has ended, or another one has its number."""
    try:
        return "decoder_process" not in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return True


def test_pixels_are_those_of_this_process(decoders):
    for image in (PHOTO, bombs.png(8, 8, 8, 2), bombs.animation("WEBP", 32)):
        decoded = decoders.decode(SPEC, image)
        np.testing.assert_array_equal(decoded.pixels, Preprocessor(SPEC)(image))
        assert not decoded.is_turned
    with pytest.raises(DataError, match=r"^cannot decode x: its format is not supported; replace or remove it$"):
        decoders.decode(SPEC, b"no image", "x")


@pytest.mark.parametrize(("orientation", "is_turned"), [(1, False), (6, True), (9, False)])
def test_orientation_that_is_not_applied_is_known(decoders, orientation, is_turned):
    exif = bombs.Image.Exif()
    exif[0x0112] = orientation
    image = bombs.save(bombs.Image.new("RGB", (8, 4)), "JPEG", exif=exif)
    assert decoders.decode(SPEC, image).is_turned == decoders.decode(None, image).is_turned == is_turned
    upright = ImageSpec((16, 16), (0.5,) * 3, (0.5,) * 3, exif_orientation=True)
    assert not decoders.decode(upright, image).is_turned


@pytest.mark.release
@pytest.mark.parametrize("name", bombs.COSTLY)
def test_costly_images_end_soon_and_cost_no_more_than_allowed(decoders, name):
    image, over = bombs.COSTLY[name](), threading.Event()
    before = peak_of(os.getpid())
    decoders.start()
    (decoder,) = decoders._idle[-1:]
    peaks = [peak_of(decoder._process)]

    def watch():
        while not over.wait(0.005):
            try:
                peaks.append(peak_of(decoder._process))
            except (OSError, TypeError):
                return

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with contextlib.suppress(DataError):
            decoders.decode(SPEC, image)
    finally:
        over.set()
        watching.join()
    assert max(peaks) < 3 * len(image) + 64 * 2**20 + (LARGE_BYTES if decoder.is_slow else SMALL_BYTES)
    assert peak_of(os.getpid()) - before < 4 * len(image) + 2**22
    assert decoders.decode(SPEC, PHOTO).pixels.shape == (3, 16, 16)


@pytest.mark.release
@pytest.mark.parametrize("image", [bombs.png(8192, 8192, 8, 2), bombs.flat(5000, "WEBP", quality=1, method=0)])
def test_large_images_of_legal_size_are_decoded(decoders, image):
    slow = []
    assert decoders.decode(SPEC, image, on_slow=lambda: slow.append(True)).pixels.shape == (3, 16, 16)
    assert slow == [True]


def test_a_large_file_is_decoded_after_a_small_one(decoders):
    for image in (PHOTO, bombs.flat(5400, "BMP")):
        assert decoders.decode(SPEC, image).pixels.shape == (3, 16, 16)


def test_large_images_wait_for_memory_and_small_ones_do_not(decoders):
    large = bombs.png(4096, 4096, 8, 2)
    decoders._reserve(LARGE_BYTES)
    with pytest.raises(BudgetExceeded, match="the budget ended before the image was decoded"):
        decoders.decode(SPEC, large, end=time.monotonic() + 0.2)
    decoders.decode(SPEC, PHOTO)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decoders.decode, SPEC, large)
        decoders._reserve(-LARGE_BYTES)
        assert waiting.result(60).pixels.shape == (3, 16, 16)


def test_a_decoder_that_hangs_or_is_killed_is_replaced(decoders, monkeypatch, wait_until):
    decoders.start()
    (hung,) = decoders._idle[-1:]
    os.kill(hung._process, signal.SIGSTOP)
    monkeypatch.setattr(module, "WITHIN_S", 0.5)
    slow = []
    with pytest.raises(DataError, match=r"^cannot decode image: it takes too much memory or time; save it again"):
        decoders.decode(SPEC, PHOTO, on_slow=lambda: slow.append(True))
    assert slow == [True]
    monkeypatch.undo()
    monkeypatch.setattr(module, "SLOW_S", 60.0)  # a slow one is not kept
    decoders.decode(SPEC, PHOTO)
    (killed,) = decoders._idle[-1:]
    assert killed is not hung
    os.kill(killed._process, signal.SIGKILL)  # as the kernel does when it needs memory
    wait_until(lambda: not killed.is_alive)
    decoders.decode(SPEC, PHOTO)
    decoders._factory.process.kill()
    decoders._factory.process.wait()
    decoders._idle.pop().kill()
    decoders.decode(SPEC, PHOTO)


def test_processes_end_with_the_decoders_and_ignore_signals_of_the_terminal(wait_until, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 60.0)  # a slow one is not kept
    with Decoders() as decoders:
        decoders.start()
        busy, idle = decoders._factory.fork(), decoders._idle[0]
        processes = [decoders._factory.process.pid, busy._process, idle._process]
        for process in processes:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(process, number)
        decoders.decode(SPEC, PHOTO)
        assert not any(map(is_gone, processes))
    wait_until(lambda: all(map(is_gone, processes)))
    busy.kill()
