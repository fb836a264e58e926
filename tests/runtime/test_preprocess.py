"""Preprocessing on the board against timm's own transform, and what it does with files that are no images."""

import io

import numpy as np
import pytest
from PIL import Image

from ls_edge.bundle import ImageSpec
from ls_edge.datasets import ImageRef, ImageSet, open_data
from ls_edge.errors import BundleError, DataError
from ls_edge.runtime.preprocess import INTERPOLATIONS, MAX_PIXELS, Preprocessor, decode, iterate

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def spec(size=(48, 48), interpolation="bicubic", crop_pct=0.9):
    return ImageSpec(size=size, mean=MEAN, std=STD, interpolation=interpolation, crop_pct=crop_pct)


def picture(width, height, mode="RGB"):
    """Smooth colours with noise, so that interpolation and position both show."""
    rng = np.random.default_rng(width * 1000 + height)
    y, x = np.mgrid[:height, :width]
    channels = [x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)]
    pixels = np.stack(channels, axis=-1) * 0.7 + rng.integers(0, 77, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def encode(image, format_, **options):
    stream = io.BytesIO()
    image.save(stream, format_, **options)
    return stream.getvalue()


def timm_result(encoded, wanted):
    """What timm's own evaluation transform makes of the file, in grey levels."""
    transforms = pytest.importorskip("timm.data").create_transform(
        input_size=(3, *wanted.size), is_training=False, mean=MEAN, std=STD,
        interpolation=wanted.interpolation, crop_pct=wanted.crop_pct,
    )  # fmt: skip
    with Image.open(io.BytesIO(encoded)) as image:
        return levels(transforms(image.convert("RGB")).numpy())


def levels(normalised):
    return (normalised * np.asarray(STD)[:, None, None] + np.asarray(MEAN)[:, None, None]) * 255


def assert_like_timm(encoded, wanted):
    ours = Preprocessor(wanted)(encoded)
    assert ours.dtype == np.float32
    assert ours.shape == (3, *wanted.size)
    assert ours.flags.c_contiguous
    assert np.abs(levels(ours) - timm_result(encoded, wanted)).max() <= 1


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"])
@pytest.mark.parametrize(("width", "height"), [(97, 61), (61, 97), (31, 31), (17, 23), (120, 48), (53, 54)])
def test_equal_to_timm_in_every_interpolation_and_shape(interpolation, width, height):
    assert_like_timm(encode(picture(width, height), "PNG"), spec(interpolation=interpolation))


def test_every_interpolation_is_in_the_golden_test():
    assert set(INTERPOLATIONS) == {"nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"}


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0, 1.3])
@pytest.mark.parametrize("size", [(48, 48), (32, 56), (57, 31)])
def test_equal_to_timm_in_every_crop(crop_pct, size):
    for width, height in ((90, 67), (33, 80)):
        assert_like_timm(encode(picture(width, height), "PNG"), spec(size=size, crop_pct=crop_pct))


@pytest.mark.parametrize(
    ("mode", "format_"),
    [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"),
     ("RGBA", "PNG"), ("1", "PNG"), ("I;16", "PNG"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("P", "GIF"), ("RGB", "BMP"),
     ("RGB", "TIFF"), ("RGB", "PPM")],
)  # fmt: skip
def test_equal_to_timm_in_every_mode_and_format(mode, format_):
    assert_like_timm(encode(picture(71, 55, mode), format_), spec())


def test_palette_with_transparency():
    image = picture(40, 40, "P")
    encoded = encode(image, "PNG", transparency=bytes(range(256)))
    assert np.array_equal(np.asarray(decode(encoded)), np.asarray(image.convert("RGB")))


def test_pixels_give_the_same_as_their_file():
    image = picture(64, 40)
    preprocess = Preprocessor(spec())
    assert np.array_equal(preprocess(np.asarray(image)), preprocess(encode(image, "PNG")))
    grey = np.asarray(image.convert("L"))
    assert np.array_equal(preprocess(grey), preprocess(np.stack([grey] * 3, axis=-1)))


def test_the_other_order_of_axes_is_seen():
    """The golden test has to be able to fail."""
    encoded = encode(picture(97, 61), "PNG")
    ours = levels(Preprocessor(spec())(encoded))
    assert np.abs(ours.transpose(0, 2, 1) - timm_result(encoded, spec())).max() > 10


def test_corrupt_images_are_named():
    good = encode(picture(50, 50), "JPEG")
    for bad in (b"", b"no image at all", good[: len(good) // 2], encode(picture(50, 50), "PNG")[:200]):
        with pytest.raises(DataError, match=r"^cat/7\.jpg is no image that can be read"):
            decode(bad, "cat/7.jpg")


def test_arrays_that_are_no_pixels():
    for array in (np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(DataError, match="give pixels as uint8"):
            decode(array)


def test_bombs_are_refused():
    side = int(MAX_PIXELS**0.5)
    with pytest.raises(DataError, match="the most is"):
        decode(encode(Image.new("1", (side + 1, side + 1)), "PNG"))
    with pytest.raises(DataError, match="the most is"):
        decode(encode(Image.new("1", (side * 3, side)), "PNG"))
    with pytest.raises(DataError, match="so long and narrow"):
        Preprocessor(spec(size=(224, 224)))(encode(Image.new("L", (60_000, 1)), "PNG"))


def test_a_spec_that_makes_no_sense():
    with pytest.raises(BundleError, match="'cubic'; known are"):
        Preprocessor(spec(interpolation="cubic"))
    for bad in (spec(crop_pct=0.0), spec(size=(0, 8)), ImageSpec(size=(8, 8), mean=MEAN, std=(1.0, 0.0, 1.0))):
        with pytest.raises(BundleError, match="above 0"):
            Preprocessor(bad)


def image_set(*contents):
    refs = tuple(ImageRef(f"a/{i}.png", 0, lambda c=content: c) for i, content in enumerate(contents))
    return ImageSet("some/folder", "all", ("a",), refs)


def test_iterate_keeps_the_order_and_tells_what_it_skips():
    images = [encode(picture(10 + i, 20), "PNG") for i in range(20)]
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
    assert skipped[0][1].startswith("a/3.png is no image")
    assert len(times) == 18
    assert min(times) >= 0


def test_iterate_raises_where_nothing_can_be_used():
    with pytest.raises(DataError, match=r"some/folder: none of 2 images can be used; the first: a/0\.png is no image"):
        list(iterate(image_set(b"x", b"y"), Preprocessor(spec())))


def test_iterate_can_be_left_early():
    stream = iterate(open_data("digits", "eval"), Preprocessor(spec(size=(32, 32))))
    assert next(stream)[2].shape == (3, 32, 32)
    stream.close()  # the fixture for leaks sees threads that stay


def test_iterate_passes_on_errors_that_nobody_foresaw():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(iterate(ImageSet("s", "all", (), (ImageRef("x.png", None, fail),)), Preprocessor(spec())))
