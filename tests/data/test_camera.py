"""Frames of videos and of live sources: real files, and a real stream of JPEGs over HTTP."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data import camera as camera_module
from ls_edge.data import capture, frame_source
from ls_edge.data.camera import LiveFrames, VideoFile, frames
from ls_edge.data.datasets import open_data
from ls_edge.data.frame_source import FrameSource, visible_name
from ls_edge.data.preprocess import Preprocessor, iterate
from tests.data.cameras import Camera, File, Rtsp, jpeg

cv2 = pytest.importorskip("cv2")

SHADES = range(0, 240, 20)
SOUND = io.BytesIO()
with wave.open(SOUND, "wb") as sound:
    sound.setparams((1, 2, 8000, 8000, "NONE", ""))
    sound.writeframes(bytes(16_000))
WAV = SOUND.getvalue()
SPEC = ImageSpec((16, 16), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crop_pct=1.0)


@pytest.fixture
def clip(tmp_path):
    """A video of twelve frames, each with more blue than red, and brighter than the one before."""
    path = tmp_path / "10:30.avi"
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


@pytest.mark.parametrize("kind", [Camera, Rtsp])
def test_the_newest_frame_wins_and_the_end_has_the_number_of_frames(kind, wait_until):
    with kind(80, 0.02) as camera, LiveFrames(FrameSource.parse(camera.url)) as live:
        first = shade(live.read())
        wait_until(lambda: camera.sent >= first + 30, what="newer frames")
        assert shade(live.read()) > first + 15
        with pytest.raises(DataError, match="stopped after 80 frames; check its cable or network"):
            [live.read() for _ in range(100)]
        assert live.problem


def test_a_silent_source_is_noticed_and_its_old_frames_are_not_returned(monkeypatch, wait_until):
    monkeypatch.setattr(capture, "STALL_S", 1.0)
    with Camera(20, stalls=True) as camera, LiveFrames(FrameSource.parse(camera.url)) as live:
        wait_until(lambda: camera.sent == 20, what="all frames")
        assert not camera.stopped.wait(2.5)
        with pytest.raises(DataError, match="sent no frame for 1 s; check its cable or network"):
            live.read()
    monkeypatch.setattr(camera_module, "_SLACK_S", 0.0)
    with Camera(0, stalls=True) as camera, pytest.raises(DataError, match="cannot open"):
        LiveFrames(FrameSource.parse(camera.url))


def test_a_silent_source_can_be_interrupted_and_closed():
    def interrupt():
        camera.asked.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with Camera(0, stalls=True) as camera, ThreadPoolExecutor() as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            LiveFrames(FrameSource.parse(camera.url))
    with (
        Camera(20, stalls=True) as camera,
        Camera(20, stalls=True) as other,  # one camera sends all its frames to whoever asks first
        LiveFrames(FrameSource.parse(camera.url)) as live,
        LiveFrames(FrameSource.parse(other.url)) as killed,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(lambda: [live.read() for _ in range(21)])
        live.close()
        with pytest.raises(DataError, match="stopped after"):  # not silent for 30 seconds
            waiting.result()
        camera_module._end(killed._process)  # as the kernel does when it needs memory
        with pytest.raises(DataError, match="stopped after 0 frames"):
            killed.read()


def test_a_live_data_set_needs_a_number_of_images_and_ends_with_its_stream():
    with Camera(30) as camera:
        images = open_data(camera.url, "eval")
        with pytest.raises(UsageError, match="has no end; give the number of images"):
            images.take(None)
        skipped = []
        found = iterate(images.take(1000), Preprocessor(SPEC), lambda *a: skipped.append(a))
        done = [image.name for _, image, _ in found]
    assert done == [f"{camera.url}#{i}" for i in range(len(done))]
    assert (1 <= len(done) == images.live.taken <= 30, skipped) == (True, [])


def test_a_url_of_a_photo_is_a_photo():
    with File("image/jpeg", jpeg(100)) as server:
        (only,) = frames(server.url)
        assert shade(only) == pytest.approx(100, abs=3)
        images = open_data(server.url, "eval").take(3)
    assert [shade(image.read()) for image in images.images] == [shade(only)] * 3


@pytest.mark.parametrize("server", [lambda: File("audio/wav", WAV), lambda: Rtsp(0, media="audio 0 RTP/AVP 0")])
def test_a_source_of_sound_has_no_video(server):
    with server() as camera, pytest.raises(DataError, match="has no video; name a stream with one"):
        open_data(camera.url, "eval")


def test_a_wrong_password_is_not_a_source_of_sound():
    with File("text/html", b"", "401 Unauthorized") as camera, pytest.raises(DataError, match="user, and password"):
        open_data(camera.url, "eval")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("camera", "camera 0"), ("camera:3", "camera 3"), ("camera:/dev/v4l/by-id/x", "camera /dev/v4l/by-id/x"),
        ("/dev/v4l/by-id/usb-x", "camera /dev/v4l/by-id/usb-x"), ("rtsp://127.0.0.1:9/x", "rtsp://127.0.0.1:9/x"),
        ("RTSP://a:b@127.0.0.1:9/x?pwd=c", "RTSP://127.0.0.1:9/x?pwd=…; check the address, user, and password"),
        ("rtmp://a:b@c#d@127.0.0.1:9/x", "rtmp://127.0.0.1:9/…; check the address, user, and password; in a password, "
         "write @ as %40 and # as %23"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_opened_is_refused(given, shown):
    with pytest.raises(DataError, match=f"cannot open {re.escape(shown)}"):
        open_data(given, "eval")


def test_a_device_of_a_camera_may_have_any_name(tmp_path, monkeypatch):
    (tmp_path / "front").symlink_to("/dev/null")
    assert FrameSource.parse(str(tmp_path / "front")) is None
    monkeypatch.setattr(frame_source, "_VIDEO4LINUX", os.major(os.stat("/dev/null").st_rdev))
    assert FrameSource.parse(str(tmp_path / "front")).is_device


def test_similar_names_are_not_live():
    assert not any(map(FrameSource.parse, ("cameras", "camera:front", "camera.jpg", "rtsp.png", "ftp://a/b.jpg")))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("rtsp://admin:SECRET@cam/s", "rtsp://cam/s"),
        ("rtsp://admin:SE@C#RET@cam:554/s", "rtsp://cam:554/s"),
        ("rtsp://admin:SE/CRE?T@cam/s?user=x", "rtsp://cam/s?user=…"),
        ("http://cam/s?user=x@SECRET&pwd=SECRET#SECRET", "http://cam/s?user=…&pwd=…"),
        ("http://cam/s?SECRET", "http://cam/s?…"),
        ("rtsp://admin:SECRET", "rtsp://admin"),
        ("rtsp://cam/user=admin&password=SECRET&channel=1.sdp?real_stream", "rtsp://cam/?user=…&password=…&channel=…"),
        ("http://cam/s.jpg;password=SECRET#p=SECRET", "http://cam/s.jpg?password=…&p=…"),
        ("http://cam/s?U0VDUkVU==", "http://cam/s?…"),
        ("rtsp:admin:SECRET@cam/s", "…@cam/s"),
        ("camera:rtsp://admin:SECRET@cam/s", "rtsp://cam/s"),
        ("ftp:/u:12/SECRET@[::1]:80/x.jpg", "ftp:/[::1]:80/x.jpg"),
        ("http://cam/s%3Fpwd%3DSECRET", "http://cam/s?…"),
        ("rtsp://admin%3ASECRET%40cam/s", "rtsp://admin"),
        ("rtsp://cam:554/admin%3aSECRET/s", "rtsp://cam:554/admin?…"),
        ("rtsp://cam:554/admin:SECRET/s", "rtsp://cam:554/?…"),
        ("rtmp://u:SECRET@cam:1935/app/SECRET", "rtmp://cam:1935/app/…"),
        ("RTMPS://cam/app/SECRET/?user=x", "RTMPS://cam/app/…?user=…"),
        ("rtsps://cam:7441/SECRET0123456789?enableSrtp", "rtsps://cam:7441/…?…"),
        ("http://cam/SECRET-4f89-11d3-9a0c-03e82c33/s", "http://cam/…/s"),
        ("rtsp://cam/Streaming/Channels/101", "rtsp://cam/Streaming/Channels/101"),
        (":" * 4096, ":" * 4096),
        ("camera:1", "camera:1"),
        ("photos/a@b?c=d.jpg", "photos/a@b?c=d.jpg"),
    ],
)  # fmt: skip
def test_names_of_sources_hold_no_secrets(given, shown):
    assert visible_name(given) == shown
    assert "SECRET" not in repr(FrameSource.parse(given))


FORGETS = """
import sys
from ls_edge import frames
print(next(frames(sys.argv[1])).shape, flush=True)
"""


def test_a_script_that_forgets_a_slow_camera_ends():
    with Camera(9, 1.0) as camera:
        done = subprocess.run([sys.executable, "-c", FORGETS, camera.url], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"(480, 640, 3)\n", b"")
