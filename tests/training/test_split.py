"""Split of the training images: by content, seeded, and never on both sides."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.errors import DataError
from ls_edge.data.content import KnownImages, digests_of
from ls_edge.data.datasets import open_data
from ls_edge.training.split import split_images


def written(top, sizes, seed=0):
    """Write a class of each size, with different images, and return the set and its digests."""
    rng = np.random.default_rng(seed)
    for name, count in sizes.items():
        (top / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(top / name / f"{index:03}.png")
    return opened(top)


def opened(top):
    images = open_data(str(top), "train")
    return images, digests_of(images.images)


def test_a_split_is_seeded_stratified_and_whole():
    digits = open_data("digits", "train")
    digests = digests_of(digits.images)
    found = split_images(digits, digests, 0.1, 0)
    assert sorted(found.train + found.held) == list(range(len(digits)))
    assert split_images(digits, digests, 0.1, 0) == found
    assert set(split_images(digits, digests, 0.1, 1).held) != set(found.held)
    for label in range(10):
        whole = sum(image.label == label for image in digits.images)
        assert abs(sum(digits.images[row].label == label for row in found.held) - whole / 10) <= 1
    assert len({digits.images[row].label for row in found.held[:64]}) == 10  # the curves of --log are of these
    smaller, larger = (set(split_images(digits, digests, part, 0).held) for part in (0.05, 0.2))
    assert smaller < set(found.held) < larger


@pytest.mark.parametrize(
    ("sizes", "part", "train", "held"),
    [
        ({f"c{i:02}": 4 for i in range(20)}, 0.1, 72, 8),  # small classes give their share together
        ({"a": 1, "b": 2, "c": 1}, 0.1, 3, 1),  # and never their only image
        ({"a": 1, "b": 2, "c": 1}, 0.99, 3, 1),
        ({"a": 2, "b": 2}, 0.1, 3, 1),
    ],
)
def test_small_classes_keep_an_image_to_train_on(tmp_path, sizes, part, train, held):
    images, digests = written(tmp_path, sizes)
    found = split_images(images, digests, part, 0)
    assert (len(found.train), len(found.held)) == (train, held)
    assert {images.images[row].label for row in found.train} == set(range(len(sizes)))


def test_copies_in_two_classes_are_split_together_and_sets_that_cannot_be_split_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"one class only \(cat\)"):
        split_images(*written(tmp_path / "one", {"cat": 2}), 0.1, 0)
    written(tmp_path / "mixed", {"cat": 3, "dog": 1})
    for name in ("000", "001", "002"):  # all pictures of a class are also of another
        shutil.copy(tmp_path / "mixed" / "cat" / f"{name}.png", tmp_path / "mixed" / "dog")
    found = split_images(*opened(tmp_path / "mixed"), 0.1, 0)
    assert (len(found.train), len(found.held), found.copies) == (4, 2, 3)
    with pytest.raises(DataError, match="one different image for each class"):
        split_images(*written(tmp_path / "single", {"cat": 1, "dog": 1}), 0.1, 0)


def test_copies_and_links_stay_on_one_side_and_are_counted(tmp_path):
    written(tmp_path, {"a": 20, "b": 20, "c": 4})
    for name, pictures, copies in (("a", 20, 10), ("b", 20, 10), ("c", 4, 40)):  # c is oversampled by copies
        for index in range(copies):
            shutil.copy(tmp_path / name / f"{index % pictures:03}.png", tmp_path / name / f"copy {index}.png")
        os.symlink(tmp_path / name / "003.png", tmp_path / name / "link.png")
    images, digests = opened(tmp_path)
    for seed in range(5):
        found = split_images(images, digests, 0.3, seed)
        assert (found.copies, {images.images[row].label for row in found.held}) == (63, {0, 1, 2})
        assert not set(digests[found.train]) & set(digests[found.held])
        assert abs(len(found.held) - 0.3 * len(images)) <= 8


def test_the_split_goes_by_content_and_not_by_names(tmp_path):
    images, digests = written(tmp_path / "one", {"a": 30, "b": 30})
    held = set(digests[split_images(images, digests, 0.2, 0).held])
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for index in range(30):
        (tmp_path / "other" / "a" / f"{index:03}.png").rename(tmp_path / "other" / "a" / f"{index * 7 % 30}-new.png")
    other, other_digests = opened(tmp_path / "other")
    assert set(other_digests[split_images(other, other_digests, 0.2, 0).held]) == held


def test_images_of_the_start_do_not_validate_while_there_are_others(tmp_path):
    images, digests = written(tmp_path, {"a": 30, "b": 30})
    first = split_images(images, digests, 0.2, 0)
    start = KnownImages.of(digests[first.train])
    for part, seed in ((0.2, 1), (0.1, 2), (0.5, 3)):
        found = split_images(images, digests, part, seed, [start])
        assert set(found.held) <= set(first.held)
        assert found.known == 0
    sample = KnownImages(24_000, start.digests[:24])  # half of them
    assert split_images(images, digests, 0.5, 3, [sample]).known == pytest.approx(24, abs=10)  # 24 of 30
    everything = split_images(images, digests, 0.2, 1, [KnownImages.of(digests)])
    assert everything.known == len(everything.held) == 12


def test_known_images_are_written_and_read_and_of_many_a_sample_is_kept():
    rng = np.random.default_rng(0)
    every = rng.choice(2**48, 40_000, replace=False).astype(np.uint64)
    known = KnownImages.read(KnownImages.of(every[:20_000]).write())
    assert (known.count, known.is_sample, len(known.digests)) == (20_000, True, 4096)
    assert known.count_in(every[10_000:40_000]) == pytest.approx(10_000, rel=0.1)
    assert known.count_in(every[20_000:]) == 0
    both = KnownImages.of(every[20_000:30_000], known)
    assert both.count == pytest.approx(30_000, rel=0.1)
    assert both.count_in(every) == pytest.approx(30_000, rel=0.1)
    few = KnownImages.read(KnownImages.of(every[:7]).write())
    assert (few.count_in(every), few.count_in(np.repeat(every[:3], 5))) == (7, 3)
    assert not any(map(KnownImages.read, ("", "abc", "5:!", "x:AAAA", "5:", f"{'9' * 5000}:", "0:AAAAAAAA")))
