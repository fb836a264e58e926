"""Image files in folders and tars: links, members that lead out, damaged tars."""

import bz2
import gzip
import io
import lzma
import os
import pickle  # noqa: TID251 - torch's loader does this to readers; nothing is read from outside
import shutil
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
    names = ["cat/absolute.png", "cat/good.png"]  # tar unpacks an absolute name below the folder, too
    assert [(image.name, image.read()) for image in found.images] == [(name, b"good") for name in names]
    assert found.ignored == {
        "broken link": 1, "link out of the archive": 2, "not a regular file": 2
    }  # fmt: skip


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
        tree.images["cat/1.png"]()


def content(source):
    return {image.name: bytes(image.read()) for image in open_data(str(source), "eval").images}


@pytest.mark.parametrize("prefix", ["", "./", "d/", "/abs/d/"])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_links_of_a_tar_are_read_like_files(tmp_path, prefix, mode):
    """``ln cat/*.png subset/`` before ``tar`` must not lose a class."""
    top = write_folder(tmp_path / "d", {"cat/1.png": b"one", "cat/2.png": b"two"})
    (top / "subset").mkdir()
    os.link(top / "cat" / "1.png", top / "subset" / "hard.png")
    (top / "subset" / "soft.png").symlink_to("../cat/2.png")
    (top / "linked").symlink_to("cat")
    path = tmp_path / "d.tar"
    with tarfile.open(path, mode) as archive:
        for name in ("cat/1.png", "cat/2.png", "subset/hard.png", "subset/soft.png", "linked"):
            member = archive.gettarinfo(top / name, arcname="x/" + name)
            member.name = prefix + name
            member.linkname = member.linkname.replace("x/", prefix) if member.islnk() else member.linkname
            archive.addfile(member, io.BytesIO((top / name).read_bytes()) if member.isreg() else None)
    wanted = {
        "cat/1.png": b"one", "cat/2.png": b"two", "linked/1.png": b"one", "linked/2.png": b"two",
        "subset/hard.png": b"one", "subset/soft.png": b"two",
    }  # fmt: skip
    assert content(top) == content(path) == wanted
    names = [[image.name for image in open_data(str(source), "eval").images] for source in (top, path)]
    assert names[0] == names[1]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("inside", ["", "n01/"])
def test_a_tar_of_class_tars_is_imagenets_archive(tmp_path, wrapped, inside):
    classes = tmp_path / "classes"
    for name in ("n01", "n02"):
        write_tar(classes / f"{name}.tar", {f"{inside and name + '/'}{name}_1.JPEG": name.encode()})
    path = tmp_path / "train.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("n01.tar", "n02.tar"):
            archive.add(classes / name, arcname=f"wrapper/{name}" if wrapped else name)
    write_tar(tmp_path / "splits" / "img_val.tar", {"n01_1.JPEG": b"val"})
    shutil.copyfile(path, tmp_path / "splits" / "img_train.tar")
    for source in (path, classes, tmp_path / "splits"):
        found = open_data(str(source), "train")
        assert found.classes == ("n01", "n02")
        assert [image.read() for image in found.images] == [b"n01", b"n02"]
    (classes / "n03.tar").symlink_to("n01.tar")
    with pytest.raises(DataError, match="several names lead to the same tar; keep one of them"):
        open_data(str(classes), "train")


def test_a_compressed_tar_in_a_compressed_tar_is_refused(tmp_path):
    write_tar(tmp_path / "cat.tar.gz", {"1.png": b"x"}, "w:gz")
    with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "cat.tar.gz", arcname="cat.tar.gz")
    with pytest.raises(DataError, match="compress it once"):
        open_data(str(tmp_path / "all.tar.xz"), "train")


def test_a_stray_image_next_to_the_wrapper_is_counted(tmp_path):
    path = write_tar(tmp_path / "d.tar", {"d/cat/1.png": b"x", "d/dog/2.png": b"x", "cover.png": b"x"})
    found = open_data(str(path), "train")
    assert (found.classes, found.ignored) == (("cat", "dog"), {"not in a class folder": 1})


def members(path, entries, pack=bytes):
    """Write a tar of two images and these members: name, type, link and fields of the header."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind, link, headers in [("cat/1.png", tarfile.REGTYPE, "", {}), *entries]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.pax_headers = kind, link, headers
            member.size = 0 if link else 1
            archive.addfile(member, io.BytesIO(b"x"))
    path.write_bytes(pack(stream.getvalue()))
    return path


def sparse(size, pieces):
    return {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "cat/2.png", "GNU.sparse.size": f"{size}",
        "GNU.sparse.map": pieces,
    }  # fmt: skip


LINK, FILE = tarfile.SYMTYPE, tarfile.REGTYPE


@pytest.mark.parametrize(
    ("entries", "count", "ignored"),
    [
        ([(f"l{i}", LINK, f"l{i - 1}/../l{i - 1}" if i else "cat", {}) for i in range(41)], 42, {}),
        ([(f"cat/{i}.png", LINK, f"{i + 1}.png", {}) for i in range(2, 2000)], 1, {"broken link": 1998}),
        ([("cat/2.png", LINK, "x/../" * 100_000 + "1.png", {})], 1, {"broken link": 1}),
        ([("a/" * 5000 + "2.png", FILE, "", {})], 1, {"name too long": 1}),
        ([("x" * 5000 + "/2.png", FILE, "", {})], 1, {"name too long": 1}),
        ([("cat/x", FILE, "", sparse(1 << 40, f"0,1,{(1 << 40) - 1},0"))], 1, {"not a regular file": 1}),
        ([("cat/x", FILE, "", sparse(1 << 20, "0,1"))], 1, {"not a regular file": 1}),
        ([("9" * 60 + "/2.png", FILE, "", {})], 2, {}),
    ],
)
def test_odd_members_of_a_tar_are_ignored(tmp_path, entries, count, ignored):
    found = open_data(str(members(tmp_path / "d.tar", entries)), "eval")
    assert (len(found), found.ignored) == (count, ignored)
    assert all(len(image.read()) == 1 for image in found.images)


CROSSED = [(f"d{i}/{name}", LINK, f"../d{i + 1}", {}) for i in range(40) for name in "ab"] + [
    ("d40/x.png", FILE, "", {})
]


@pytest.mark.parametrize(
    ("entries", "pack", "what"),
    [
        (CROSSED, bytes, "links lead to more than 100000 files and folders again; remove them"),
        ([("9" * 5000 + "/2.png", FILE, "", {})], bytes, "a header of 5120 bytes that cannot be used"),
        ([("x" * (1 << 20) + ".png", FILE, "", {})], bytes, "a header of .* bytes that cannot be used"),
        ([("cat/2.png", FILE, "", {"size": "-1"})], bytes, "broken or cut off at byte"),
        ([("cat/2.png", FILE, "", {"size": "-1024"})], bytes, "a size below 0 before byte"),
        ([("cat/2.png", FILE, "", {"size": f"{1 << 60}"})], bytes, "is neither a folder nor a whole tar|cannot read"),
        ([("cat/2.png", FILE, "", {"size": "9" * 60})], bytes, "is neither a folder nor a whole tar"),
        ([], lambda raw: gzip.compress(raw + bytes(1 << 20)), "unpacked, it has more than 32 times its size"),
        ([], lambda raw: bz2.compress(raw + bytes(1 << 20)), "unpacked, it has more than 32 times its size"),
        ([], lambda raw: lzma.compress(raw + bytes(1 << 20)), "unpacked, it has more than 32 times its size"),
    ],
)
def test_tars_that_would_have_no_end_are_refused(tmp_path, entries, pack, what):
    with pytest.raises(DataError, match=what) as caught:
        open_data(str(members(tmp_path / "d.tar", entries, pack)), "eval")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_folders_with_holes_depth_and_crossed_links_end(tmp_path):
    top = write_folder(tmp_path / "d")
    with (top / "cat" / "hole.png").open("wb") as stream:
        stream.truncate(1 << 40)
    top.joinpath("cat", *["a"] * 60).mkdir(parents=True)
    ignored = open_data(str(top), "eval").ignored
    assert (ignored["larger than 256 MiB"], ignored["name too long"]) == (1, 1)
    for first in range(8):
        (top / f"e{first}").mkdir()
        for second in range(9):
            (top / f"e{first}" / f"l{second}").symlink_to(f"../e{second}")
    with pytest.raises(DataError, match="links lead to more than 100000 files and folders again"):
        open_data(str(top), "eval")
