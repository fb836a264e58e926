"""Pictures of arrays: PNG files in data URIs, tiles, and scales."""

import base64
import io

import numpy as np
from PIL import Image

from ls_edge.report.pictures import LEAST_SIDE, around_gray, picture, shades, tiles


def pixels(uri):
    head, _, body = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def test_values_become_pixels_of_a_whole_size_and_nan_is_transparent():
    found = pixels(picture(np.array([[0.0, 0.5, np.nan], [1.0, 2.0, -1.0]])))
    times = LEAST_SIDE // 3
    assert found.shape == (2 * times, 3 * times, 4)
    assert found[::times, ::times, 0].tolist() == [[0, 128, 0], [255, 255, 0]]
    assert found[::times, ::times, 3].tolist() == [[255, 255, 0], [255, 255, 255]]


def test_tiles_are_separated_by_transparent_gaps():
    sheet = tiles([np.full((2, 3), number) for number in range(3)], columns=2)
    assert sheet.shape == (5, 7)
    assert (sheet[0, 0], sheet[0, 4], sheet[3, 0]) == (0, 1, 2)
    assert np.isnan(sheet[2]).all()
    assert np.isnan(sheet[:, 3]).all()
    assert np.isnan(sheet[3:, 4:]).all()


def test_scales_span_black_to_white_and_keep_zero_gray():
    assert shades(np.array([2.0, 3.0, 6.0])).tolist() == [0, 0.25, 1]
    assert around_gray(np.array([-4.0, 0.0, 2.0])).tolist() == [0, 0.5, 0.75]
    assert not shades(np.zeros(2)).any()
    assert (around_gray(np.zeros(2)) == 0.5).all()
