"""Frames of videos and of live sources: real files, and a real stream of JPEGs over HTTP."""

import io
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.camera import LiveFrames, VideoFile, frames, is_live
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor, iterate

cv2 = pytest.importorskip("cv2")

SHADES = range(0, 240, 20)
SPEC = ImageSpec((16, 16), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crop_pct=1.0)


@pytest.fixture
def clip(tmp_path):
    """A video of twelve frames, each with more blue than red, and brighter than the one before."""
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for shade in SHADES:
        writer.write(np.full((48, 64, 3), (shade, shade // 2, 0), np.uint8))  # blue, green, red
    writer.release()
    return str(path)


def shade(frame):
    return frame[:, :, 2].mean()


def test_a_video_yields_every_frame_in_rgb(clip):
    found = list(frames(clip))
    assert [shade(frame) for frame in found] == pytest.approx(SHADES, abs=4)
    assert all(frame.shape == (48, 64, 3) and frame.dtype == np.uint8 for frame in found)
    assert found[-1][:, :, 0].mean() < 5


def test_a_missing_video_is_named(tmp_path):
    with pytest.raises(DataError, match=r"clip\.mp4: no such file; check the path"):
        next(frames(str(tmp_path / "clip.mp4")))


def test_frames_of_a_video_may_be_read_in_any_order(clip):
    video = VideoFile(clip)
    assert video.count == 12
    for index in (3, 2, 4, 11, 0, 0, 7):
        assert shade(video.read(index)) == pytest.approx(SHADES[index], abs=4), index
        assert len(video._recent) <= 8  # a reader that jumps must not fill the memory
    with pytest.raises(DataError, match="ends before frame 12"):
        video.read(12)


def test_a_video_is_a_data_set_without_labels_in_its_order(clip):
    images = open_data(clip, "eval")
    assert (len(images), images.classes) == (12, ())
    assert [image.name for image in images.take(3).images] == [f"{clip}#{i}" for i in range(3)]
    arrays = [array for _, _, array in iterate(images.take(None), Preprocessor(SPEC))]
    assert [127.5 * (array[2].mean() + 1) for array in arrays] == pytest.approx(SHADES, abs=4)
    assert len(images.take(14)) == 14
    with pytest.raises(DataError, match="training needs"):
        open_data(clip, "train")


@pytest.mark.parametrize("written", [3, 40])
def test_every_frame_is_used_whatever_the_header_says(clip, written):
    content = bytearray(Path(clip).read_bytes())
    for name, offset in ((b"avih", 24), (b"strh", 40)):
        at = content.index(name) + offset
        assert content[at : at + 4] == (12).to_bytes(4, "little")
        content[at : at + 4] = written.to_bytes(4, "little")
    Path(clip).write_bytes(content)
    assert int(cv2.VideoCapture(clip).get(cv2.CAP_PROP_FRAME_COUNT)) == written
    assert [shade(frame) for frame in frames(clip)] == pytest.approx(SHADES, abs=4)
    video = VideoFile(clip)
    for index in (11, 2, 10, 0, 9):
        assert shade(video.read(index)) == pytest.approx(SHADES[index], abs=4), index
    images = open_data(clip, "eval")
    arrays = [array for _, _, array in iterate(images.take(None), Preprocessor(SPEC))]
    assert [127.5 * (array[2].mean() + 1) for array in arrays] == pytest.approx(SHADES, abs=4)


class Stream:
    """A camera that sends JPEGs over HTTP, a new shade every few milliseconds, and ends after the last one."""

    def __init__(self, count):
        self.sent = 0
        self.count = count
        stream, self.stopped = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
                self.end_headers()
                while stream.sent < stream.count and not stream.stopped.wait(0.01):
                    encoded = io.BytesIO()
                    Image.new("RGB", (64, 48), (0, 0, stream.sent)).save(encoded, "JPEG", quality=95)
                    body = encoded.getvalue()
                    head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                    try:
                        self.wfile.write(head + body + b"\r\n")
                    except OSError:
                        return
                    stream.sent += 1

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/video"

    def close(self):
        self.stopped.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def stream():
    started = []

    def start(count):
        started.append(Stream(count))
        return started[-1]

    yield start
    for one in started:
        one.close()


class Silent:
    """A server that sends ``first`` to one connection and then nothing, until it is left or for ten seconds."""

    def __init__(self, first, *, then=lambda: None):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/video"
        self.waited = []
        self._first, self._then = first, then
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self):
        with self._listener, self._listener.accept()[0] as connection:
            connection.sendall(self._first)
            self._then()
            self.waited.append(self._left.wait(10))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._left.set()
        self._thread.join()


def test_opening_a_silent_stream_can_be_interrupted():
    """OpenCV alone waits for 30 s, without looking at signals."""

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with Silent(b"", then=interrupt) as server, pytest.raises(KeyboardInterrupt):
        LiveFrames(server.url)
    assert server.waited == [True]


def test_closing_a_silent_stream_wakes_its_readers():
    class StoppedError(Exception):
        pass

    def stop():
        if done:
            raise StoppedError

    encoded = io.BytesIO()
    Image.new("RGB", (64, 48)).save(encoded, "JPEG")
    head = f"Content-Type: image/jpeg\r\nContent-Length: {len(encoded.getvalue())}\r\n\r\n".encode()
    frame = b"--frame\r\n" + head + encoded.getvalue() + b"\r\n"
    first = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=frame\r\n\r\n" + 20 * frame
    done = []
    with Silent(first) as server, pytest.raises(StoppedError):
        done.extend(iterate(open_data(server.url, "eval").take(100), Preprocessor(SPEC), on_wait=stop))
    assert server.waited == [True]


def test_the_newest_frame_wins(stream, wait_until):
    camera = stream(200)
    live = LiveFrames(camera.url)
    try:
        first = shade(live.read())
        wait_until(lambda: camera.sent >= first + 60, what="newer frames")
        assert shade(live.read()) > first + 30
    finally:
        live.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frames of")]


def test_a_stream_ends_with_the_number_of_its_frames(stream):
    camera = stream(8)
    found = []
    with pytest.raises(DataError, match=r"stopped after 8 frames; check its cable or network"):
        found.extend(frame for frame in frames(camera.url))
    assert 1 <= len(found) <= 8
    assert shade(found[-1]) == pytest.approx(7, abs=3)


def test_a_live_data_set_needs_a_number_of_images_and_ends_with_its_stream(stream):
    camera = stream(30)
    images = open_data(camera.url, "eval")
    with pytest.raises(UsageError, match="has no end; give the number of images"):
        images.take(None)
    skipped = []
    done = [image.name for _, image, _ in iterate(images.take(1000), Preprocessor(SPEC), lambda *a: skipped.append(a))]
    assert done == [f"{camera.url}#{i}" for i in range(len(done))]
    assert 1 <= len(done) <= 30
    assert len(skipped) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frames of")]


@pytest.mark.parametrize("given", ["camera", "camera:3", "rtsp://127.0.0.1:9/x"])
def test_a_source_that_cannot_be_opened_is_refused(given):
    assert is_live(given)
    with pytest.raises(DataError, match="cannot open"):
        open_data(given, "eval")


def test_similar_names_are_not_live():
    assert not any(map(is_live, ("cameras", "camera:front", "camera.jpg", "rtsp.png")))
