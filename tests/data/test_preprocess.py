"""Preprocessing on the board against timm's own transform, and what it does with files that are no images."""

import io
import struct

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from ls_edge.core.bundle import INTERPOLATIONS, ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.datasets import ImageRef, ImageSet, open_data
from ls_edge.data.decoding import decode, to_rgb
from ls_edge.data.preprocess import Preprocessor, iterate
from tests.data.bombs import save

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def spec(size=(48, 48), interpolation="bicubic", crop_pct=0.9, crop_mode=msgspec.UNSET):
    return ImageSpec(size, MEAN, STD, interpolation, crop_pct, crop_mode)


def picture(width, height, mode="RGB"):
    """Smooth colors with noise, so that interpolation and position both show."""
    rng = np.random.default_rng(width * 1000 + height)
    y, x = np.mgrid[:height, :width]
    channels = [x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)]
    pixels = np.stack(channels, axis=-1) * 0.7 + rng.integers(0, 77, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def timm_result(encoded, wanted):
    """Return the result of timm's evaluation transform for a file, in gray levels."""
    transforms = pytest.importorskip("timm.data").create_transform(
        input_size=(3, *wanted.size), is_training=False, mean=MEAN, std=STD,
        interpolation=wanted.interpolation, crop_pct=wanted.crop_pct, crop_mode=wanted.crop_mode or "center",
    )  # fmt: skip
    with Image.open(io.BytesIO(encoded)) as image:
        return levels(transforms(image.convert("RGB")).numpy())


def levels(normalized):
    return (normalized * np.asarray(STD)[:, None, None] + np.asarray(MEAN)[:, None, None]) * 255


def assert_like_timm(encoded, wanted):
    ours = Preprocessor(wanted)(encoded)
    assert ours.dtype == np.float32
    assert ours.shape == (3, *wanted.size)
    assert ours.flags.c_contiguous
    assert np.abs(levels(ours) - timm_result(encoded, wanted)).max() <= 1


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
@pytest.mark.parametrize(("width", "height"), [(97, 61), (61, 97), (31, 31), (17, 23), (120, 48), (53, 54)])
def test_equal_to_timm_in_every_interpolation_and_shape(interpolation, width, height):
    assert_like_timm(save(picture(width, height), "PNG"), spec(interpolation=interpolation))


def test_every_interpolation_is_in_the_golden_test():
    assert set(INTERPOLATIONS) == {"nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"}


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0, 1.3])
@pytest.mark.parametrize("size", [(48, 48), (32, 56), (57, 31)])
def test_equal_to_timm_in_every_crop(crop_pct, size):
    if size[0] != size[1] and pytest.importorskip("timm").__version__ == "1.0.17":
        pytest.skip("timm 1.0.17 scales for crops that are not square with bilinear interpolation, whatever is asked")
    for width, height in ((90, 67), (33, 80)):
        assert_like_timm(save(picture(width, height), "PNG"), spec(size=size, crop_pct=crop_pct))


@pytest.mark.parametrize("crop_mode", ["squash", "border"])
@pytest.mark.parametrize(("size", "crop_pct"), [((48, 48), 0.9), ((48, 48), 1.0), ((32, 56), 0.95), ((48, 48), 1.2)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_equal_to_timm_in_every_crop_mode(crop_mode, size, crop_pct, mode):
    wanted = spec(size, crop_pct=crop_pct, crop_mode=crop_mode)
    for width, height in ((90, 67), (33, 80), (48, 48)):
        assert_like_timm(save(picture(width, height, mode), "PNG"), wanted)


@pytest.mark.parametrize("size", [(1, 200), (200, 1)])
def test_a_line_of_pixels_remains_a_line_in_the_border(size):
    """It would be scaled to less than half a pixel, where timm fails."""
    pixels = Preprocessor(spec((32, 32), crop_mode="border"))(picture(*size))
    assert len({channels.tobytes() for channels in pixels.reshape(3, -1).T}) > 2


@pytest.mark.parametrize(
    ("mode", "format_"),
    [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"),
     ("RGBA", "PNG"), ("1", "PNG"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("P", "GIF"), ("RGB", "BMP"),
     ("RGB", "TIFF"), ("RGB", "PPM")],
)  # fmt: skip
def test_equal_to_timm_in_every_mode_and_format(mode, format_):
    assert_like_timm(save(picture(71, 55, mode), format_), spec())


def test_transparency_of_a_palette_is_dropped():
    image = picture(40, 40, "P")
    encoded = save(image, "PNG", transparency=bytes(range(256)))
    assert np.array_equal(np.asarray(decode(encoded)), np.asarray(image.convert("RGB")))


RAMP = np.linspace(0, 65535, 40 * 30).astype(np.uint16).reshape(30, 40)
"""All levels of a 16-bit image, which a conversion that clips at 255 makes white."""


def raw_image(mode, values):
    return Image.frombytes(mode, values.shape[::-1], values.tobytes())


def wide_files():
    """The ramp in every file of more than 8 bits that is read, and the levels that it has to become."""
    levels16 = np.rint(RAMP / 257)
    floats = (RAMP / 65535).astype(np.float32)
    twelve = tiff_12_bit(RAMP >> 4)
    return {
        "png": (save(raw_image("I;16", RAMP), "PNG"), levels16),
        "tiff": (save(raw_image("I;16", RAMP), "TIFF"), levels16),
        "big-endian tiff": (save(raw_image("I;16B", RAMP.astype(">u2")), "TIFF"), levels16),
        "white-is-zero tiff": (save(raw_image("I;16", RAMP), "TIFF", tiffinfo={262: 0}), 255 - levels16),
        "pgm": (b"P5 40 30 65535\n" + RAMP.astype(">u2").tobytes(), levels16),
        "pgm of 10 bits": (b"P5 40 30 1023\n" + (RAMP >> 6).astype(">u2").tobytes(), np.rint((RAMP >> 6) / 1023 * 255)),
        "12-bit tiff": (twelve, np.rint((RAMP >> 4) / 4095 * 255)),
        "float tiff": (save(Image.fromarray(floats), "TIFF"), np.rint(floats * 255)),
    }


def tiff_12_bit(values):
    """A TIFF with two pixels in three bytes, which Pillow reads and does not write."""
    pairs = values.reshape(-1, 2).astype(np.uint32)
    packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], axis=-1)
    raw = packed.astype(np.uint8).tobytes()
    height, width = values.shape
    tags = [
        (256, width),
        (257, height),
        (258, 12),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, 1),
        (278, height),
        (279, len(raw)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag == 279 else 3, 1, value) for tag, value in tags)
    folder = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return struct.pack("<2sHI", b"II", 42, 8 + len(raw)) + raw + folder


@pytest.mark.parametrize("kind", sorted(wide_files()))
def test_images_of_more_than_8_bits_keep_their_range(kind):
    encoded, wanted = wide_files()[kind]
    rgb = np.asarray(decode(encoded))
    assert rgb.shape == (30, 40, 3)
    assert np.abs(rgb - wanted[:, :, None]).max() <= 1
    assert len(np.unique(rgb)) >= 254


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_pillow_images_of_every_mode_become_rgb(mode):
    source = picture(31, 23)
    made = source.convert("P").convert("PA") if mode == "PA" else source
    made = made.convert("RGBA").convert(mode) if mode == "RGBa" else made.convert(mode)
    rgb = to_rgb(made.copy())
    assert (rgb.mode, rgb.size) == ("RGB", (31, 23))
    if mode in ("RGB", "RGBA", "RGBa", "RGBX", "CMYK"):
        assert np.array_equal(np.asarray(rgb), np.asarray(source))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Image.fromarray(np.full((4, 4), 90, np.float32)), "float pixels from 90 to 90, but white is 1; save it with"),
        (Image.fromarray(np.full((4, 4), -0.5, np.float32)), "float pixels from -0.5 to -0.5"),
        (Image.fromarray(np.full((4, 4), np.nan, np.float32)), "float pixels from nan"),
        (
            Image.fromarray(np.full((4, 4), 70000, np.int32)),
            "32-bit or signed integer pixels from 70000 to 70000 and an unknown",
        ),
    ],
)
def test_pixels_with_an_unknown_white_level_are_refused_in_one_line(image, words):
    for given in (image, save(image, "TIFF")):
        with pytest.raises(DataError, match=f"^cat/1.tif has .*{words}") as caught:
            decode(given, "cat/1.tif")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_photos_are_turned_upright_if_the_spec_says_so(format_, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    quality = {"quality": 100} if format_ != "PNG" else {}
    encoded = save(picture(40, 24), format_, exif=exif.tobytes(), **quality)
    lying = Preprocessor(spec(size=(20, 20)))(encoded)
    assert np.array_equal(lying, Preprocessor(spec(size=(20, 20)))(save(picture(40, 24), format_, **quality)))
    with Image.open(io.BytesIO(encoded)) as opened:
        wanted = ImageOps.exif_transpose(opened).convert("RGB")
    upright = decode(encoded, exif_orientation=True)
    assert np.array_equal(np.asarray(upright), np.asarray(wanted))
    turned = Preprocessor(msgspec.structs.replace(spec(size=(20, 20)), exif_orientation=True))(encoded)
    assert np.array_equal(turned, lying) == (orientation not in range(2, 9))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_photo_with_broken_exif_is_unchanged():
    encoded = save(picture(40, 24), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff nonsense")
    assert np.array_equal(np.asarray(decode(encoded, exif_orientation=True)), np.asarray(decode(encoded)))


def test_pixels_give_the_same_as_their_file():
    image = picture(64, 40)
    preprocess = Preprocessor(spec())
    assert np.array_equal(preprocess(np.asarray(image)), preprocess(save(image, "PNG")))
    gray = np.asarray(image.convert("L"))
    assert np.array_equal(preprocess(gray), preprocess(np.stack([gray] * 3, axis=-1)))


def test_swapped_axes_differ_from_timm():
    """The golden test has to be able to fail."""
    encoded = save(picture(97, 61), "PNG")
    ours = levels(Preprocessor(spec())(encoded))
    assert np.abs(ours.transpose(0, 2, 1) - timm_result(encoded, spec())).max() > 10


def test_corrupt_images_are_named():
    good = save(picture(50, 50), "JPEG")
    for bad in (b"", b"no image at all", good[: len(good) // 2], save(picture(50, 50), "PNG")[:200]):
        with pytest.raises(DataError, match=r"^cannot decode cat/7\.jpg: "):
            decode(bad, "cat/7.jpg")


def test_arrays_that_are_not_pixels_are_refused():
    for array in (np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(UsageError, match="give pixels as uint8"):
            decode(array)


def test_long_and_narrow_images_are_refused():
    with pytest.raises(DataError, match="image has 16000 x 1 pixels and becomes 3968000 x 248 when its shorter side"):
        Preprocessor(spec(size=(224, 224)))(save(Image.new("L", (16_000, 1)), "PNG"))


def image_set(*contents):
    refs = tuple(ImageRef(f"a/{i}.png", 0, lambda c=content: c) for i, content in enumerate(contents))
    return ImageSet("some/folder", "all", ("a",), refs)


def test_iterate_keeps_the_order_and_reports_skipped_images():
    images = [save(picture(10 + i, 20), "PNG") for i in range(20)]
    images[3] = images[11] = b"broken"
    preprocess = Preprocessor(spec())
    skipped, times = [], []
    found = list(
        iterate(
            image_set(*images), preprocess, lambda ref, error: skipped.append((ref.name, str(error))),
            on_time=times.append, threads=3, ahead=4,
        )
    )  # fmt: skip
    assert [index for index, _, _ in found] == [i for i in range(20) if i not in (3, 11)]
    for index, ref, array in found:
        assert ref.name == f"a/{index}.png"
        assert np.array_equal(array, preprocess(images[index]))
    assert [name for name, _ in skipped] == ["a/3.png", "a/11.png"]
    assert skipped[0][1].startswith("cannot decode a/3.png: ")
    assert len(times) == 18
    assert min(times) >= 0


def test_iterate_raises_if_no_image_can_be_used():
    with pytest.raises(
        DataError, match=r"some/folder: none of 2 images can be used; the first: cannot decode a/0\.png: "
    ):
        list(iterate(image_set(b"x", b"y"), Preprocessor(spec())))


def test_iterate_can_be_closed_early():
    stream = iterate(open_data("digits", "eval"), Preprocessor(spec(size=(32, 32))))
    assert next(stream)[2].shape == (3, 32, 32)
    stream.close()  # the fixture for leaks sees threads that stay


def test_iterate_passes_on_unexpected_errors():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(iterate(ImageSet("s", "all", (), (ImageRef("x.png", None, fail),)), Preprocessor(spec())))
