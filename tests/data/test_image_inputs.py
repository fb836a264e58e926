"""Images named on a command line: files, folders, standard input, and errors instead of images."""

import io
from types import SimpleNamespace

import pytest

from ls_edge.core.errors import DataError
from ls_edge.data import any_image
from ls_edge.data.image_inputs import expand_argument, read_images
from tests.data.folders import NAMES, write_folder


def read(*arguments):
    return dict(read_images(item for given in arguments for item in expand_argument(str(given))))


def test_a_folder_is_expanded_to_its_images_in_order(tmp_path):
    write_folder(tmp_path)
    assert list(read(tmp_path)) == [str(tmp_path / name) for name in NAMES]
    assert read(tmp_path / "cat" / "1.png") == {str(tmp_path / "cat" / "1.png"): b"cat one"}


@pytest.mark.parametrize(
    ("stream", "what"),
    [
        (SimpleNamespace(buffer=io.BytesIO(b"an image")), "b'an image'"),
        (None, "standard input is empty; give"),
    ],
)
def test_standard_input_is_read_whole(monkeypatch, stream, what):
    monkeypatch.setattr("sys.stdin", stream)
    assert str(read("-")["-"]).startswith(what)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere.png", None, "no such file or folder; check the path"),
        ("empty.png", b"", "is empty; give an encoded image, such as a JPEG"),
    ],
)
def test_an_input_that_cannot_be_read_is_an_error_in_its_place(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    write_folder(tmp_path / "more", {"a.png": b"a"})
    found = read(tmp_path / name, tmp_path / "more")
    assert isinstance(found[str(tmp_path / name)], DataError)
    assert words in str(found[str(tmp_path / name)])
    assert found[str(tmp_path / "more" / "a.png")] == b"a"


def test_the_first_image_of_a_folder_says_what_is_left_out(tmp_path):
    write_folder(tmp_path / "photos", {"a.png": b"a", "b.heic": b"b", "c.heic": b"c", "d.png": b""})
    (first,) = expand_argument(str(tmp_path / "photos"))
    assert first.note == f"{tmp_path / 'photos'}: 1 image; 3 files ignored: .heic 2, empty 1"
    (tmp_path / "photos" / "z.png").write_bytes(b"z")
    assert [item.note for item in expand_argument(str(tmp_path / "photos"))][1:] == [""]


def test_a_folder_without_images_is_an_error(tmp_path):
    (error,) = read(tmp_path).values()
    assert "the folder has no images; their names must end in" in str(error)


def test_a_file_above_the_limit_is_refused(tmp_path):
    with (tmp_path / "large.png").open("wb") as stream:
        stream.truncate(any_image.MAX_BYTES + 1)  # a hole: it takes no room on the disk
    (error,) = read(tmp_path / "large.png").values()
    assert "has more than 256 MiB, the limit; scale it down" in str(error)
