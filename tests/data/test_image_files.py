"""Image files in folders and tars: links, members that lead out, damaged tars."""

import io
import pickle  # noqa: TID251 - torch's loader does this to readers; nothing is read from outside
import tarfile

import numpy as np
import pytest

from ls_edge.core.errors import DataError
from ls_edge.data.datasets import open_data
from ls_edge.data.image_files import read_folder, read_tar
from tests.data.folders import write_folder, write_tar


def test_links_in_a_folder_are_followed_but_not_in_circles(tmp_path):
    write_folder(tmp_path / "elsewhere", {"1.png": b"linked"})
    write_folder(tmp_path / "data", {"cat/1.png": b"x"})
    (tmp_path / "data" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "cat" / "up").symlink_to(tmp_path / "data")
    names = [image.name for image in open_data(str(tmp_path / "data"), "eval").images]
    assert {"cat/1.png", "dog/1.png"} <= set(names) or {"cat/1.png", "cat/up/dog/1.png"} <= set(names)
    assert len(names) == 2


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_links_devices_and_members_that_lead_out_of_a_tar_are_ignored(tmp_path, mode):
    path = tmp_path / "d.tar"
    with tarfile.open(path, mode) as archive:
        for name, kind in (
            ("cat/link.png", tarfile.SYMTYPE), ("cat/hard.png", tarfile.LNKTYPE), ("cat/device.png", tarfile.CHRTYPE),
            ("cat/pipe.png", tarfile.FIFOTYPE),
        ):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        for name in ("/cat/absolute.png", "cat/../../up.png", "cat/good.png"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"good"))
    found = open_data(str(path), "eval")
    assert [(image.name, image.read()) for image in found.images] == [("cat/good.png", b"good")]


def test_readers_can_be_sent_to_other_processes(tmp_path):
    sets = [
        open_data(str(write_folder(tmp_path / "a")), "eval"), open_data(str(write_tar(tmp_path / "a.tar")), "eval"),
        open_data(str(write_tar(tmp_path / "a.tar.gz", mode="w:gz")), "eval"), open_data("digits", "eval"),
    ]  # fmt: skip
    for found in sets:
        image = found.images[2]
        assert np.array_equal(pickle.loads(pickle.dumps(image.read))(), image.read())


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_file_that_is_not_a_tar_is_refused(tmp_path, content):
    path = tmp_path / "text.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} is neither a folder nor a whole tar"):
        read_tar(path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_truncated_tar_is_refused(tmp_path, mode, share):
    rng = np.random.default_rng(0)
    path = write_tar(tmp_path / "d.tar", {f"cat/{i}.png": rng.bytes(3000) for i in range(20)}, mode)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(DataError, match=f"{path} is neither a folder nor a whole tar"):
        read_tar(path)


def test_a_file_that_was_removed_is_named(tmp_path):
    tree = read_folder(write_folder(tmp_path))
    (tmp_path / "cat" / "1.png").unlink()
    with pytest.raises(DataError, match=r"cannot read .*cat/1\.png: No such file"):
        tree["cat/1.png"]()
