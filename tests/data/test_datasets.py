"""Data sets: the embedded digits, splits in folders and tars, labels, and drawing."""

import os
import tarfile
import unicodedata
import zipfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from timm.data.readers.reader_image_folder import natural_key

from ls_edge.cli.output import note_account, print_json
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.content import digests_of
from ls_edge.data.datasets import (
    image_warnings,
    match_classes,
    natural_order,
    open_data,
    read_classes,
)
from ls_edge.data.image_inputs import expand_argument
from tests.data.folders import FILES, NAMES, write_folder, write_tar


def assert_all_there(found, part="all"):
    assert [image.name for image in found.images] == NAMES
    assert found.classes == ("cat", "dog")
    assert [image.label for image in found.images] == [0, 0, 1, 1]
    assert [image.read() for image in found.images] == [FILES[name] for name in NAMES]
    assert found.part == part


def renamed(part):
    return {f"{part}/{name}": content for name, content in FILES.items()}


# --- digits ---


def test_digits_are_those_of_scikit_learn():
    real = pytest.importorskip("sklearn.datasets").load_digits()
    found = {int(image.name[2:6]): image for part in ("train", "eval") for image in open_data("digits", part).images}
    assert sorted(found) == list(range(1797))
    for row, image in found.items():
        pixels = image.read()
        assert (pixels.dtype, pixels.shape) == (np.uint8, (8, 8, 3))
        assert np.array_equal(pixels, np.rint(real.images[row] * 255 / 16).astype(np.uint8)[:, :, None].repeat(3, 2))
        assert image.label == real.target[row]
        assert image.name == f"{image.label}/{row:04d}.png"


def test_digits_have_a_fixed_stratified_split():
    train, held_out = open_data("digits", "train"), open_data("digits", "eval")
    assert (len(train), len(held_out)) == (1438, 359)
    assert (train.part, held_out.part) == ("train", "val")
    assert not {image.name for image in train.images} & {image.name for image in held_out.images}
    counts = Counter(image.label for image in held_out.images)
    assert set(counts) == set(range(10))
    assert all(34 <= count <= 38 for count in counts.values())
    assert not set(digests_of(train.images)) & set(digests_of(held_out.images))


# --- folders and tars ---


@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_plain_folder_is_used_whole(tmp_path, part):
    assert_all_there(open_data(str(write_folder(tmp_path / "data")), part))


@pytest.mark.parametrize("part", ["train", "eval"])
@pytest.mark.parametrize("prefix", ["", "./", "some/where/"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("d.tar", "w"),
        ("d.tar.gz", "w:gz"),
        ("d.tgz", "w:gz"),
        ("d.tar.xz", "w:xz"),
        ("d.tar.bz2", "w:bz2"),
        ("data", "w:xz"),
    ],
)
def test_a_plain_tar_is_used_whole(tmp_path, part, prefix, name, mode):
    assert_all_there(open_data(str(write_tar(tmp_path / name, mode=mode, prefix=prefix)), part))


@pytest.mark.parametrize("held_out", ["val", "validation", "test", "Test"])
def test_splits_may_be_folders(tmp_path, held_out):
    write_folder(tmp_path, renamed(held_out))
    write_folder(tmp_path / "train", {"x/1.png": b"x", "y/1.png": b"y"})
    write_folder(tmp_path / "annotations", {"readme.txt": b""})
    assert_all_there(open_data(str(tmp_path), "eval"), "val")
    train = open_data(str(tmp_path), "train")
    assert (train.classes, train.part) == (("x", "y"), "train")


def test_val_is_used_before_test(tmp_path):
    for part in ("train", "val", "test"):
        write_folder(tmp_path / part, {f"{part}-class/1.png": b"x"})
    assert open_data(str(tmp_path), "eval").classes == ("val-class",)


@pytest.mark.parametrize("inside", ["", "test/"])
def test_splits_may_be_tars(tmp_path, inside):
    write_tar(tmp_path / "test.tar.xz", mode="w:xz", prefix=inside)
    write_tar(tmp_path / "train.tar", {"x/1.png": b"x", "y/1.png": b"y"})
    (tmp_path / "README.md").write_text("not a part")
    assert_all_there(open_data(str(tmp_path), "eval"), "val")
    assert open_data(str(tmp_path), "train").classes == ("x", "y")


@pytest.mark.parametrize("prefix", ["", "set/"])
def test_splits_may_be_folders_in_one_tar(tmp_path, prefix):
    files = {**renamed("val"), "train/x/1.png": b"x"}
    path = write_tar(tmp_path / "d.tar.gz", files, "w:gz", prefix)
    assert_all_there(open_data(str(path), "eval"), "val")
    assert open_data(str(path), "train").classes == ("x",)


@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_single_split_only_wraps_the_classes(tmp_path, part):
    write_folder(tmp_path / "a", renamed("train"))
    assert_all_there(open_data(str(tmp_path / "a"), part))
    assert_all_there(open_data(str(write_tar(tmp_path / "b.tar", renamed("test"))), part))


@pytest.mark.parametrize(
    "names",
    [
        ("seg_train/seg_train", "seg_test/seg_test"), ("birds-val", "birds-train"), ("train_64px", "val_64px"),
        ("My Data Train", "My Data Test"), ("set/v2/train", "set/v2/test"),
    ],
)  # fmt: skip
def test_shared_words_and_wrapping_folders_do_not_hide_splits(tmp_path, names):
    train, test = sorted(names, key=lambda name: "rain" not in name)
    files = {f"{test}/{name}": content for name, content in renamed("").items()}
    write_folder(tmp_path / "a", {**files, f"{train}/x/1.png": b"x", f"{train}/y/1.png": b"y"})
    for source in (tmp_path / "a", tarred(tmp_path / "a")):
        assert_all_there(open_data(str(source), "eval"), "val")
        found = open_data(str(source), "train")
        assert (found.classes, found.part) == (("x", "y"), "train")


def test_a_wrapped_folder_is_the_same_as_its_tar(tmp_path):
    write_folder(tmp_path / "download", renamed("raw-img"))
    (tmp_path / "download" / "raw-img" / "README.md").write_text("x")
    folder, tar = (open_data(str(source), "eval") for source in (tmp_path / "download", tarred(tmp_path / "download")))
    assert_all_there(folder)
    assert (contents(folder), folder.ignored) == (contents(tar), tar.ignored)


def test_a_class_may_be_called_train(tmp_path):
    write_folder(tmp_path, {"train/1.png": b"x", "bus/1.png": b"x", "boat/1.png": b"x"})
    assert open_data(str(tmp_path), "eval").classes == ("boat", "bus", "train")


def contents(images):
    return dict(zip((image.name for image in images.images), digests_of(images.images).tolist(), strict=True))


def test_a_folder_and_its_tar_have_the_same_digests(tmp_path):
    folder = open_data(str(write_folder(tmp_path / "a")), "eval")
    tar = open_data(str(write_tar(tmp_path / "a.tar.xz", mode="w:xz")), "eval")
    assert contents(folder) == contents(tar) == contents(folder.take(50))
    assert len(set(contents(folder).values())) == len(folder)


def test_a_flat_folder_has_no_labels(tmp_path):
    write_folder(tmp_path, {"b.png": b"b", "a.jpg": b"a", "c.txt": b"no"})
    found = open_data(str(tmp_path), "eval")
    assert [(image.name, image.label) for image in found.images] == [("a.jpg", None), ("b.png", None)]
    assert found.classes == ()
    assert match_classes(found, ["cat"]).classes == ()
    with pytest.raises(DataError, match="has images but no class folders, which training needs"):
        open_data(str(tmp_path), "train")


def test_one_photo_is_a_set_without_labels(tmp_path):
    (tmp_path / "photo.JPG").write_bytes(b"a")
    found = open_data(str(tmp_path / "photo.JPG"), "eval")
    assert [(image.name, image.label, image.read()) for image in found.images] == [("photo.JPG", None, b"a")]
    with pytest.raises(DataError, match="which training needs"):
        open_data(str(tmp_path / "photo.JPG"), "train")


# --- what is no data ---


def failure(source, part="eval"):
    with pytest.raises(DataError) as caught:
        open_data(str(source), part)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_zip_is_refused_with_what_to_do(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("cat/1.png", b"x")
    assert "is a zip, which cannot be read in place; extract it" in failure(tmp_path / "a.zip")


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"7z\xbc\xaf\x27\x1c", "7z archive"), (b"Rar!\x1a\x07", "rar archive"), (b"\x28\xb5\x2f\xfd", "zstandard")],
)
def test_archives_that_cannot_be_read_are_named(tmp_path, start, kind):
    (tmp_path / "a.tar").write_bytes(start + bytes(600))
    assert f"{kind}, which cannot be read in place; extract it" in failure(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["images", "images.tar", "image.png"])
def test_pipes_and_devices_are_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert "but a pipe or a device" in failure(tmp_path / name)
    assert "but a pipe or a device" in failure("/dev/null")


def test_an_empty_path_is_not_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "cat" / "1.png")
    monkeypatch.chdir(tmp_path)
    assert "'': no such folder" in failure("")
    (given,) = expand_argument("")
    assert "the path is empty" in str(given.error)


def test_folders_and_tars_without_images_are_refused(tmp_path):
    assert "no such folder or tar" in failure(tmp_path / "missing")
    assert "holds no images" in failure(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    assert "holds no images; expected class folders" in failure(tmp_path, "train")
    write_folder(tmp_path, {"cat/readme.txt": b"", "dog/.1.png": b"x"})
    assert "holds no images" in failure(tmp_path)
    assert "holds no images" in failure(write_tar(tmp_path / "empty.tar", {}))


@pytest.mark.parametrize("top", ["", "val"])
def test_class_folders_without_images_are_reported(tmp_path, top):
    write_folder(tmp_path / top)
    if top:
        write_folder(tmp_path / "train")
    assert image_warnings(open_data(str(tmp_path), "eval")) == []
    (tmp_path / top / "fox").mkdir()
    write_folder(tmp_path / top, {"owl/readme.txt": b""})
    found = open_data(str(tmp_path), "eval")
    assert (found.classes, found.empty_classes) == (("cat", "dog"), ("fox", "owl"))
    assert f"{tmp_path}: 'fox', 'owl' have no images" in image_warnings(found)[0]


def test_an_empty_split_is_named(tmp_path):
    write_folder(tmp_path, renamed("train"))
    (tmp_path / "val").mkdir()
    assert f"{tmp_path / 'val'} holds no images" in failure(tmp_path)


# --- labels and drawing ---


def test_classes_are_matched_by_name(tmp_path):
    found = open_data(str(write_folder(tmp_path)), "eval")
    model = ["ant", "dog", "bee", "cat"]
    assert found.labels_for(model) == [3, 3, 1, 1]
    matched = match_classes(found, model)
    assert matched.classes == tuple(model)
    assert [image.label for image in matched.images] == [3, 3, 1, 1]
    with pytest.raises(DataError, match="the model has no class 'dog'; its classes are 'cat'; name the class folders"):
        found.labels_for(["cat"])
    with pytest.raises(DataError, match=r"the model has no class 'cat', 'dog'; its classes are '0', .* and 5 more"):
        match_classes(found, [str(i) for i in range(10)])


def test_the_account_has_the_classes_of_the_images_and_not_all_of_the_model(tmp_path):
    found = match_classes(open_data(str(write_folder(tmp_path)), "eval"), ["owl", "dog", "cat"])
    assert found.account()["classes"] == ["dog", "cat"]
    assert found.take(1).account()["classes"] == [found.classes[found.take(1).images[0].label]]


def test_take_draws_evenly_from_all_classes_and_repeats():
    found = open_data("digits", "eval")
    counts = Counter(image.label for image in found.take(100).images)
    assert all(9 <= counts[label] <= 11 for label in range(10))
    everything = found.take(None)
    assert sorted(image.name for image in everything.images) == [image.name for image in found.images]
    assert found.take(50).images == everything.images[:50]
    twice = found.take(2 * 359 + 3).images
    assert twice[:359] == twice[359:718] == everything.images
    assert twice[718:] == everything.images[:3]
    for count in (0, -1):
        with pytest.raises(UsageError, match="leaves none; give at least 1"):
            found.take(count)


@pytest.mark.parametrize("size", range(1, 12))
def test_take_draws_each_image_of_a_small_set_once(tmp_path, size):
    write_folder(tmp_path, {f"a/{i}.png": b"x" for i in range(size)})
    found = open_data(str(tmp_path), "eval")
    assert len({image.name for image in found.take(size).images}) == size


@pytest.mark.parametrize(
    ("train", "held_out"),
    [("Training", "Testing"), ("train", "eval"), ("train", "dev"), ("TRAIN", "holdout"), ("train2017", "val2017"),
     ("images-train", "images-valid"), ("training set", "held-out"),
     ("train_images", "test_images")],
)  # fmt: skip
def test_usual_names_of_splits_are_not_classes(tmp_path, train, held_out):
    write_folder(tmp_path / "d" / train, {"glioma/1.png": b"x", "pituitary/2.png": b"x"})
    write_folder(tmp_path / "d" / held_out, {"glioma/3.png": b"x", "pituitary/4.png": b"x", "pituitary/5.png": b"x"})
    for data in (tmp_path / "d", tarred(tmp_path / "d")):
        found = {part: open_data(str(data), part) for part in ("train", "eval")}
        assert {part: (len(images), images.part) for part, images in found.items()} == {
            "train": (2, "train"), "eval": (3, "val")
        }  # fmt: skip
        assert {images.classes for images in found.values()} == {("glioma", "pituitary")}


@pytest.mark.parametrize("splits", [("fold0", "fold1", "fold2"), ("val", "test"), ("north", "south"), ("dev", "Test")])
@pytest.mark.parametrize("part", ["train", "eval"])
def test_folders_that_can_only_be_splits_are_refused(tmp_path, splits, part):
    for split in splits:
        write_folder(tmp_path / "d" / split, {"cat/1.png": b"x", "dog/2.png": b"x"})
    for data in (tmp_path / "d", tarred(tmp_path / "d")):
        with pytest.raises(
            DataError, match=r"look like splits, not classes .*'cat', 'dog'.*; give one of them"
        ) as error:
            open_data(str(data), part)
        assert "\n" not in str(error.value)


def test_shards_of_webdataset_are_not_classes(tmp_path):
    for shard in range(2):
        for split in ("", "train/", "val/"):
            write_tar(tmp_path / f"{split}shard-{shard}.tar", {f"{shard}1.jpg": b"x", f"{shard}1.cls": b"3"})
    for source in (tmp_path, tarred(tmp_path)):
        for part in ("train", "eval"):
            with pytest.raises(DataError, match=r"shard-0\.tar is a shard of WebDataset") as error:
                open_data(str(source), part)
            assert "\n" not in str(error.value)
    write_tar(tmp_path / "classes" / "cat.tar", {"1.jpg": b"x", "1.xml": b"x"})
    write_tar(tmp_path / "classes" / "dog.tar", {"1.jpg": b"x"})
    assert open_data(str(tmp_path / "classes"), "train").classes == ("cat", "dog")


def test_classes_with_one_folder_of_a_name_are_classes(tmp_path):
    """Tiny ImageNet has them."""
    write_folder(tmp_path, {"n01/images/1.png": b"x", "n02/images/2.png": b"x", "n03/images/3.png": b"x"})
    assert open_data(str(tmp_path), "train").classes == ("n01", "n02", "n03")


def test_ignored_files_are_counted_by_reason(tmp_path, capsys):
    top = write_folder(tmp_path / "d", {
        "cat/1.png": b"x", "cat/2.JFIF": b"x", "dog/3.jpe": b"x", "dog/4.heic": b"x", "dog/5.HEIC": b"x", "dog/6": b"x",
        "dog/7.png": b"", "stray.png": b"x", "@eaDir/8.png": b"x", "$RECYCLE.BIN/9.png": b"x", "lost+found/1.png": b"x",
    })  # fmt: skip
    (top / "dog" / "gone.png").symlink_to("nowhere.png")
    (top / "bird").symlink_to("nowhere")  # a class
    wanted = {
        ".heic": 2, "no extension": 1, "empty": 1, "not in a class folder": 1, "broken link": 2, "in @eaDir": 1,
        "in $RECYCLE.BIN": 1, "in lost+found": 1,
    }  # fmt: skip
    for data in (top, tarred(top)):
        account = open_data(str(data), "eval").account()
        assert account["ignored"] == wanted
        assert (account["images"], account["classes"]) == (3, ["cat", "dog"])
    note_account(open_data(str(top), "eval").take(9).account(["cat/1.png", "dog/3.jpe", "cat/1.png"]))
    out, err = capsys.readouterr()
    assert err == (
        f"{top}: 1 image, 2 classes (cat, dog); 12 files ignored: .heic 2, broken link 2, empty 1, "
        "in $RECYCLE.BIN 1, in @eaDir 1, in lost+found 1, no extension 1, not in a class folder 1, unreadable 2\n"
    )
    assert out == ""


def test_images_outside_both_splits_are_counted(tmp_path):
    write_folder(tmp_path / "d", {
        "train_1/cat/1.png": b"x", "train_1/dog/1.png": b"x", "train_2/cat/2.png": b"x", "val/cat/3.png": b"x",
        "test/cat/4.png": b"x", "others/cat/5.png": b"x", "others/notes.txt": b"x", "cover.jpg": b"x",
        "../cover.jpg": b"x",
    })  # fmt: skip
    for data, stray in ((tmp_path / "d", 1), (tarred(tmp_path / "d"), 1), (tmp_path, 2)):
        for part, images in (("train", 2), ("eval", 1)):
            account = open_data(str(data), part).account()
            assert account["images"] == images
            assert account["ignored"] == {"in train_2": 1, "in test": 1, "in others": 1, "not in a class folder": stray}


def test_folders_whose_names_are_not_utf8_are_counted_in_json(tmp_path):
    write_folder(
        tmp_path, {**renamed("val"), "train/cat/1.png": b"x", "o\udcff/1.png": b"x", "val/.h\udcff/1.png": b"x"}
    )
    print_json(open_data(str(tmp_path), "eval").account())


def test_a_tar_whose_first_class_looks_like_an_image_is_a_tar(tmp_path):
    """A Windows bitmap begins with ``BM``."""
    found = open_data(str(write_tar(tmp_path / "cars.tar", {"BMW/1.png": b"x", "VW/1.png": b"x"})), "eval")
    assert found.classes == ("BMW", "VW")


def test_an_image_is_recognized_by_its_content_where_its_name_is_given(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "photo", "PNG")
    found = open_data(str(tmp_path / "photo"), "eval")
    assert found.images[0].read() == (tmp_path / "photo").read_bytes()


def test_a_name_is_matched_in_any_unicode_form_and_one_that_is_not_utf8_is_not_trained_on(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    write_folder(tmp_path / "mac", {f"{decomposed}/1.png": b"x", "tee/2.png": b"x"})
    write_folder(tmp_path / "linux", {f"{composed}/1.png": b"x", "tee/2.png": b"x"})
    mac, linux = (open_data(str(tmp_path / name), "train") for name in ("mac", "linux"))
    assert mac.classes == linux.classes == (composed, "tee")
    assert list(contents(mac).values()) == list(contents(linux).values())
    assert mac.labels_for((decomposed, "tee")) == [0, 1]
    os.mkdir(os.fsencode(tmp_path / "linux") + b"/caf\xe9")
    (tmp_path / "linux" / os.fsdecode(b"caf\xe9") / "3.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"the class folder 'caf.*' is not UTF-8; rename it"):
        open_data(str(tmp_path / "linux"), "train")


def test_natural_order_is_timms(tmp_path):
    names = ["1", "2", "10", "a", "B", "c20", "C3", "x1y2", "x1y10"]
    write_folder(tmp_path, {f"{name}/{name}.png": b"x" for name in names})
    found = open_data(str(tmp_path), "train")
    images = match_classes(found, natural_order(found.classes))
    assert list(images.classes) == sorted(names, key=natural_key)
    assert all(image.name.startswith(f"{images.classes[image.label]}/") for image in images.images)


def test_a_list_of_classes_has_a_name_a_line(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_bytes("\ufeffdog\r\n\r\n cafe\u0301 \r\n1e3".encode())
    assert read_classes(path) == ("dog", "caf\u00e9", "1e3")
    for content, reason in ((b"a\nb\na\n", "lists 'a' twice"), (b" \n", "lists no class"), (b"caf\xe9", "not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=reason):
            read_classes(path)
    with pytest.raises(DataError, match=r"cannot read the class names in .*none.txt: No such file"):
        read_classes(tmp_path / "none.txt")


def test_a_local_folder_called_like_a_keyword_is_mentioned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert image_warnings(open_data("digits", "eval")) == []
    write_folder(tmp_path / "digits", {"cat/1.png": b"x"})
    assert image_warnings(open_data("digits", "eval")) == [
        "digits is not the file or folder of that name; write ./digits for that"
    ]
    assert open_data("./digits", "eval").classes == ("cat",)


def tarred(top):
    """Write a tar of a folder next to it, with the folder as wrapper."""
    path = top.parent / f"{top.name}.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(top, arcname=top.name)
    return path
