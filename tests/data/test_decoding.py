"""Files that would take much memory or time are refused by their header."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.errors import BudgetExceeded, DataError
from ls_edge.data.decoding import MAX_DECODED_BYTES, MAX_PIXELS, decode

from .bombs import BOMBS, UNSUPPORTED, animation, flat, jpeg_of_scans, png, save, tiff_of_strips, tiff_with_broken_tag

_CHILD = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import bombs
from ls_edge.core.errors import BudgetExceeded, DataError
from ls_edge.data.decoding import decode
from ls_edge.data.preprocess import Preprocessor
from ls_edge.core.bundle import ImageSpec

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

found, call = {}, eval(sys.argv[3])
for name, make in eval(sys.argv[2], {"bombs": bombs}).items():
    file = make()
    call(bombs.save(bombs.Image.new("RGB", (8, 8)), "PNG"))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        call(file, "x")
    except DataError as error:
        found[name] = [peak() - before, str(error)]
    else:
        found[name] = [peak() - before, ""]
print(json.dumps(found))
"""


def in_a_child(files, call="decode"):
    """Peak memory and error of decoding each file, and standard error; ``files`` and ``call`` are expressions."""
    words = [sys.executable, "-c", _CHILD, str(Path(__file__).parent), files, call]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_bombs_are_refused_before_they_take_memory():
    found, _ = in_a_child("{name: make for name, (make, _) in bombs.BOMBS.items()}")
    assert found.keys() == BOMBS.keys()
    assert max(growth for growth, _ in found.values()) < 32 << 20, found
    assert all(error for _, error in found.values())


@pytest.mark.parametrize("name", BOMBS)
def test_a_refusal_is_one_line_with_the_name_and_the_reason(name):
    make, words = BOMBS[name]
    with pytest.raises(DataError, match=words) as caught:
        decode(make(), "a/b.img")
    assert str(caught.value).startswith("a/b.img ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": b"Exif\0\0" + b"\xff\xd9\xff\xda" * 200}])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_video_behind_a_motion_photo_is_not_part_of_its_scans(options):
    photo = save(Image.effect_noise((200, 100), 90).convert("RGB"), "JPEG", **options)
    video = np.random.default_rng(0).bytes(8 << 20)
    assert video.count(b"\xff\xda") > 100
    assert np.array_equal(np.asarray(decode(photo + video)), np.asarray(decode(photo)))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_formats_are_not_opened(name):
    with pytest.raises(DataError, match=r"^cannot decode a/b\.img: its format is not supported; replace or remove it"):
        decode(UNSUPPORTED[name](), "a/b.img")


@pytest.mark.release
def test_accepted_images_stay_within_the_memory_limit():
    side = int(MAX_PIXELS**0.5)
    found, _ = in_a_child(
        f"{{'rgb': lambda: bombs.png({side}, {side}, 8, 2), 'gray': lambda: bombs.png({side}, {side}, 8, 0),"
        "'16 bits': lambda: bombs.png(5000, 5000, 16, 0),"
        f"'jpeg': lambda: bombs.save(bombs.Image.new('RGB', ({side}, {side})), 'JPEG'),"
        "'webp': lambda: bombs.save(bombs.Image.new('RGB', (5000, 5000)), 'WEBP', quality=1, method=0)}"
    )
    assert all(not error for _, error in found.values()), found
    assert max(growth for growth, _ in found.values()) < MAX_DECODED_BYTES + (32 << 20), found


def test_large_gray_images_become_rgb_after_they_are_scaled():
    side = int(MAX_PIXELS**0.5)
    files = f"{{'PNG': lambda: bombs.png({side}, {side}, 8, 0)}}"
    found, _ = in_a_child(files, "Preprocessor(ImageSpec((16, 16), (0.5,) * 3, (0.5,) * 3, 'bicubic', 1.0))")
    ((growth, error),) = found.values()
    assert (error, growth < MAX_PIXELS + (32 << 20)) == ("", True), found


def test_large_jpegs_are_decoded_at_half_their_size():
    image = decode(jpeg_of_scans(2048, 0))
    assert image.size == (2048, 2048)
    colors = Image.linear_gradient("L").resize((6000, 4000)).convert("RGB")
    assert decode(save(colors, "JPEG")).size == (3000, 2000)
    assert decode(save(colors.resize((4000, 4000)), "JPEG")).size == (4000, 4000)


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_its_first_frame(format_):
    assert decode(animation(format_, 32)).size == (32, 32)


def test_tiffs_of_many_strips_and_unusual_ppms_are_decoded():
    assert decode(tiff_of_strips(64)).size == (64, 64)
    assert decode(b"P2 3 1 9\n0 9 3").getpixel((1, 0)) == (255, 255, 255)
    assert decode(png(16_384, 16, 1, 0)).size == (16_384, 16)


@pytest.mark.parametrize(
    "image",
    [
        b"P6 4 4x 255\n" + bytes(48),
        b"P6 4 " + b"1" * 20 + b" 255\n" + bytes(48),
    ],
)
def test_errors_have_no_words_of_python(image):
    with pytest.raises(DataError, match=r"^cannot decode image: it is damaged; replace or remove it$"):
        decode(image)


def test_damaged_files_print_nothing():
    found, printed = in_a_child("{str(n): lambda n=n: bombs.tiff_with_broken_tag(n) for n in range(50)}")
    assert len(found) == 50
    assert not any(error for _, error in found.values())
    assert printed == ""


def test_warnings_of_decoders_are_not_kept():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import bombs; from ls_edge.data.decoding import decode\n"
        "for n in range(50): decode(bombs.tiff_with_broken_tag(n))\n"
        "from PIL import TiffImagePlugin as p; print(len(getattr(p, '__warningregistry__', ())))"
    )
    words = [sys.executable, "-c", code, str(Path(__file__).parent)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() in ("0", "1")


def test_pillow_reads_the_broken_tag():
    """The test of the log has to be able to fail."""
    pytest.importorskip("PIL", minversion="13.0", reason="an older Pillow does not read this tag")
    with pytest.raises(DataError, match="cannot decode image: it is damaged"):
        decode(tiff_with_broken_tag(0))


def test_large_and_slow_images_call_on_large():
    waited = []

    def waits(image):
        waited.clear()
        decode(image, on_large=lambda: waited.append(True))
        return bool(waited)

    assert not waits(png(2048, 2048, 8, 2))
    assert not waits(flat(2048, "JPEG"))
    assert waits(png(4096, 4096, 8, 2))
    assert waits(jpeg_of_scans(1024, 60))
    assert waits(b"P2 3 1 9\n0 9 3")
    assert waits(b"P6 300 300 254\n" + bytes(270_000))  # one read for each pixel


def test_on_large_may_refuse_the_image():
    def refuse():
        raise BudgetExceeded("no time")

    with pytest.raises(BudgetExceeded, match="no time"):
        decode(png(4096, 4096, 8, 2), on_large=refuse)
