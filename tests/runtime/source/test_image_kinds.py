"""Every file of a corpus gives the same input and logits, whatever the kind of object and the kind of source."""

import io

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.protocol.payload import MAX_IMAGE
from ls_edge.runtime.source.image_encoding import ImageEncoder
from tests.data.corpus import corpus

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
LYING = ImageSpec((16, 16), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
UPRIGHT = msgspec.structs.replace(LYING, exif_orientation=True)
FILES = corpus()


def full(spec):
    return Preprocessor(spec)


def thin(spec):
    """What a peer makes of the image that a source without the bundle sends."""
    encode, decode = ImageEncoder(spec), Preprocessor(spec)
    return lambda *image: decode(encode(*image).content, "the image")


def loaded(content):
    picture = Image.open(io.BytesIO(content))
    picture.load()
    return picture


@pytest.mark.parametrize("spec", [LYING, UPRIGHT], ids=["lying", "upright"])
def test_every_file_gives_the_same_input_as_every_kind_of_object(tmp_path, spec):
    path = tmp_path / "image.bin"
    for name, content in FILES.items():
        path.write_bytes(content)
        first = full(spec)(content)
        with Image.open(path) as opened:
            assert np.array_equal(full(spec)(opened), first), f"{name}: a Pillow image of an open file"
            assert np.array_equal(full(spec)(loaded(content)), first), f"{name}: a Pillow image"
            assert np.array_equal(thin(spec)(loaded(content)), first), f"{name}: a Pillow image without a bundle"
            assert ImageEncoder(spec)(path).content == content
            assert name.startswith("WEBP") or ImageEncoder(spec)(opened).content == content


@pytest.mark.parametrize("name", [name for name in FILES if "RGB" in name and not name.startswith("GIF")])
def test_the_input_matches_the_upright_picture(name):
    with Image.open(io.BytesIO(FILES[name])) as opened:
        opened.load()
        wanted = ImageOps.exif_transpose(opened).convert("RGB")
    for read in (full(UPRIGHT), thin(UPRIGHT)):
        assert np.array_equal(read(FILES[name], name), full(UPRIGHT)(wanted))


@pytest.mark.parametrize("read", [full(LYING), thin(LYING)], ids=["full", "thin"])
class TestObjects:
    @pytest.mark.parametrize(
        "pixels", [PIXELS, PIXELS[::2, ::-1], np.asfortranarray(PIXELS), PIXELS[..., 0], PIXELS[..., :1]],
        ids=["rgb", "strided", "fortran", "gray", "one channel"],
    )  # fmt: skip
    def test_pixels_match_their_picture(self, read, pixels):
        picture = Image.fromarray(np.ascontiguousarray(pixels if pixels.shape[2:] != (1,) else pixels[..., 0]))
        assert np.array_equal(read(pixels), full(LYING)(picture))

    @pytest.mark.parametrize(
        "image", [3.0, None, np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4), np.uint8),
                  PIXELS.astype(np.int64), PIXELS.astype(np.uint16), [1, 2]]
    )  # fmt: skip
    def test_other_objects_are_a_usage_error(self, read, image):
        with pytest.raises(UsageError, match=r"^cam (must be pixels, a Pillow image|is an array .* \[H, W, 3\])"):
            read(image, "cam")

    @pytest.mark.parametrize(
        ("content", "words"),
        [(None, "cannot read .*: No such file"), (b"", "image.png is empty; give an encoded image")],
    )
    def test_files_that_cannot_be_read_are_a_data_error(self, read, tmp_path, content, words):
        path = tmp_path / "image.png"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read(path, "image.png")
        with pytest.raises(DataError, match=r"cannot read .*null byte"):
            read("a\0b", "image.png")

    def test_a_pillow_image_that_cannot_be_decoded_is_a_data_error(self, read):
        cut_off = Image.open(io.BytesIO(FILES["JPEG RGB"][:-200]))
        with pytest.raises(DataError, match=r"cannot decode (cam|the image): .*; replace or remove it"):
            read(cut_off, "cam")
        with pytest.raises(DataError, match="cannot decode cam: it is damaged"):
            read(Image.new("La", (4, 4)), "cam")

    def test_a_pillow_image_is_unchanged(self, read):
        given = Image.open(io.BytesIO(FILES["PNG P transparent"]))
        read(given)
        assert "transparency" in given.info


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_array_of_a_preprocessor_is_checked(bad):
    array = full(LYING)(PIXELS)
    assert full(LYING)(array) is array
    with pytest.raises(UsageError, match=r"photo has shape \(3, 8, 8\), the model takes \(3, 16, 16\)"):
        full(LYING)(np.zeros((3, 8, 8), np.float32), "photo")
    array[1, 2, 3] = bad
    with pytest.raises(DataError, match="photo contains NaN or infinity"):
        full(LYING)(array, "photo")


def test_images_too_long_for_a_message_are_a_data_error():
    with pytest.raises(DataError, match=rf"has {MAX_IMAGE + 1} bytes, from 1 to {MAX_IMAGE} can be sent"):
        thin(LYING)(bytes(MAX_IMAGE + 1))
