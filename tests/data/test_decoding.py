"""Files that are too large are refused by their header, and unusual ones are decoded."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from ls_edge.core.errors import DataError
from ls_edge.data.decoding import decode

from .bombs import BOMBS, UNSUPPORTED, animation, jpeg_of_scans, png, save, tiff_of_strips, tiff_with_broken_tag


@pytest.mark.parametrize("name", BOMBS)
def test_a_refusal_is_one_line_with_the_name_and_the_reason(name):
    make, words = BOMBS[name]
    with pytest.raises(DataError, match=words) as caught:
        decode(make(), "a/b.img")
    assert str(caught.value).startswith("a/b.img ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_formats_are_not_opened(name):
    with pytest.raises(DataError, match=r"^cannot decode a/b\.img: its format is not supported; replace or remove it"):
        decode(UNSUPPORTED[name](), "a/b.img")


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
