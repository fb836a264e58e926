"""A source without a bundle sends the bytes of a file, or pixels as PPM or PGM."""

import io

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.errors import DataError, UsageError
from ls_edge.runtime.protocol.codecs.image import MAX_IMAGE, EncodedImage
from ls_edge.runtime.source.image_encoding import encode_image

PIXELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize("pixels", [PIXELS, PIXELS[..., 0], np.asfortranarray(PIXELS)], ids=["rgb", "gray", "strided"])
def test_encoded_pixels_decode_to_themselves(pixels):
    with Image.open(io.BytesIO(encode_image(pixels).content)) as decoded:
        np.testing.assert_array_equal(np.asarray(decoded), pixels)


def test_files_bytes_and_pillow_images_keep_their_content(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"content")
    assert encode_image(tmp_path / "photo.jpg") == encode_image(b"content") == EncodedImage(b"content")
    assert encode_image(Image.fromarray(PIXELS)) == encode_image(PIXELS)
    assert encode_image(EncodedImage(b"content")) == EncodedImage(b"content")


@pytest.mark.parametrize(
    "image", [PIXELS.astype(np.float32), np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), 3.0, None]
)
def test_other_objects_are_a_usage_error(image):
    with pytest.raises(UsageError, match=r"cam: .* can only send files and pixels uint8 \[H, W, 3\]"):
        encode_image(image, "cam")


@pytest.mark.parametrize("content", [b"", bytes(MAX_IMAGE + 1)], ids=["empty", "long"])
def test_images_of_an_impossible_length_are_a_data_error(content):
    with pytest.raises(DataError, match=rf"has {len(content)} bytes, from 1 to {MAX_IMAGE} can be sent"):
        encode_image(content)
