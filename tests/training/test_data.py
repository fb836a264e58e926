import msgspec
import numpy as np
import pytest
import torch

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError
from ls_edge.data.datasets import open_data
from ls_edge.data.decoding import decode
from ls_edge.data.preprocess import Preprocessor
from ls_edge.device import hardware
from ls_edge.training.config import DataConfig, TrainConfig
from ls_edge.training.data import Batches, augment, choose_augment, default_workers, normalizer, split
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.precision import seed_epoch
from tests.data.folders import write_every_mode, write_images

SPEC = ImageSpec(size=(16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_pct=0.9)


def batches(images, *, kind="none", config=None, size=4, on_skipped=pytest.fail, seed=0, spec=SPEC):
    config = TrainConfig(data=config or DataConfig(), batch_size=size, seed=seed)
    return Batches(images, spec, config, augment=kind, on_skipped=on_skipped)


def test_split_is_seeded_stratified_and_whole():
    digits = open_data("digits", "train")
    train, held = split(digits, 0.1, 0)
    assert sorted(train + held) == list(range(len(digits)))
    assert split(digits, 0.1, 0) == (train, held)
    assert split(digits, 0.1, 1) != (train, held)
    for label in range(10):
        whole = sum(image.label == label for image in digits.images)
        assert sum(digits.images[row].label == label for row in held) == round(whole / 10)
    assert len({digits.images[row].label for row in held[:64]}) == 10  # the curves of --log are of these


def test_a_split_of_few_images_has_at_least_one_for_validation(tmp_path):
    train, held = split(open_data(str(write_images(tmp_path / "two", 2)), "train"), 0.1, 0)
    assert (len(train), len(held)) == (3, 1)
    with pytest.raises(DataError, match=r"one class only \(cat\)"):
        split(open_data(str(write_images(tmp_path / "one", 2, classes=("cat",))), "train"), 0.1, 0)


def test_classes_of_few_images_give_their_share_together_and_never_their_only_one(tmp_path):
    classes = [f"c{i:02}" for i in range(20)]
    images = open_data(str(write_images(tmp_path / "few", 4, classes=classes)), "train")
    train, held = split(images, 0.1, 0)
    assert (len(train), len(held)) == (72, 8)
    assert len({images.images[index].label for index in held}) == 8
    assert split(images, 0.1, 0) == (train, held)
    rare = tmp_path / "rare"
    write_images(rare, 1, classes=("a", "c"))
    write_images(rare, 2, classes=("b",))
    images = open_data(str(rare), "train")
    train, held = split(images, 0.1, 0)
    assert [images.images[index].label for index in held] == [1]
    assert {images.images[index].label for index in train} == {0, 1, 2}
    assert (len(split(images, 0.99, 0)[0]), len(split(images, 0.99, 0)[1])) == (3, 1)


@pytest.mark.parametrize("cache_mb", [512, 0])
def test_pixels_match_the_preprocessing_on_boards(tmp_path, cache_mb):
    images = open_data(str(write_images(tmp_path)), "train").images
    found = batches(images, config=DataConfig(cache_mb=cache_mb), size=5)
    assert (found._pixels is not None) == (cache_mb > 0)
    assert (len(found), found.steps()) == (12, 2)
    pixels, labels = (torch.cat(parts) for parts in zip(*found.fixed(), strict=True))
    assert labels.tolist() == [image.label for image in images]
    expected = np.stack([Preprocessor(SPEC)(image.read()) for image in images])
    np.testing.assert_allclose(normalizer(SPEC, torch.device("cpu"))(pixels).numpy(), expected, atol=1e-5)


def test_processes_divide_the_images_of_the_evaluation(tmp_path):
    images = open_data(str(write_images(tmp_path)), "train").images
    config = TrainConfig(batch_size=2)
    labels = []
    for rank in range(2):
        part = Batches(
            images, SPEC, config, augment="none", on_skipped=pytest.fail, context=DistributedContext(rank, 2)
        )
        labels.append(torch.cat([labels for _, labels in part.fixed()]).tolist())
    assert [len(part) for part in labels] == [6, 6]
    assert sorted(labels[0] + labels[1]) == sorted(image.label for image in images)


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("cache_mb", [512, 0])
def test_training_and_boards_see_the_same_pixels_whatever_the_file(tmp_path, cache_mb, upright):
    spec = msgspec.structs.replace(SPEC, exif_orientation=upright)
    images = open_data(str(write_every_mode(tmp_path)), "train").images
    found = batches(images, config=DataConfig(cache_mb=cache_mb), size=5, spec=spec)
    pixels = torch.cat([pixels for pixels, _ in found.fixed()]).numpy()
    board = Preprocessor(spec)
    for image, seen in zip(images, pixels, strict=True):
        cropped = np.asarray(board.crop(decode(image.read(), exif_orientation=upright)))
        assert np.array_equal(seen, cropped.transpose(2, 0, 1)), image.name
        assert seen.min() < 40, image.name
        assert 100 < seen.mean() < 155, image.name  # a clipped image is white
    timms = batches(images, kind="timm", config=DataConfig(cache_mb=cache_mb), size=len(images), spec=spec)
    seed_epoch(0, 1)
    (augmented, _), = timms.epoch(1)  # fmt: skip
    assert augmented.float().mean((1, 2, 3)).max() < 230


@pytest.mark.parametrize("cache_mb", [512, 0])
@pytest.mark.parametrize("kind", ["none", "shift", "crop"])
def test_epochs_depend_on_seed_and_number_alone(tmp_path, cache_mb, kind):
    images = open_data(str(write_images(tmp_path)), "train").images
    config = DataConfig(cache_mb=cache_mb)

    def run(seed, epoch):
        pixels, labels = zip(*batches(images, kind=kind, config=config, seed=seed).epoch(epoch), strict=True)
        return torch.cat(pixels), torch.cat(labels)

    first = run(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, run(0, 1), strict=True))
    assert not torch.equal(first[0], run(0, 2)[0])
    assert not torch.equal(first[0], run(1, 1)[0])
    assert len(first[1]) == 12


def test_workers_decode_the_same_pixels(tmp_path):
    images = open_data(str(write_images(tmp_path)), "train").images
    alone = list(batches(images, config=DataConfig(cache_mb=0)).epoch(1))
    helped = list(batches(images, config=DataConfig(cache_mb=0, workers=1)).epoch(1))
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True) for a, b in zip(a, b, strict=True))


@pytest.mark.parametrize("cache_mb", [512, 0])
def test_an_image_that_cannot_be_decoded_is_named_and_left_out(tmp_path, cache_mb):
    root = write_images(tmp_path)
    (root / "cat" / "2.png").write_bytes(b"no image")
    told = set()
    found = batches(open_data(str(root), "train").images, config=DataConfig(cache_mb=cache_mb), on_skipped=told.add)
    for _ in range(2):
        labels = torch.cat([labels for _, labels in found.fixed()])
        assert labels.tolist() == [0] * 5 + [1] * 6
    assert len(told) == 1
    assert "cat/2.png" in told.pop()
    for path in root.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="none of 12 images"):
        list(batches(open_data(str(root), "train").images, config=DataConfig(cache_mb=cache_mb),
                     on_skipped=told.add).fixed())  # fmt: skip


def test_shift_moves_and_crop_mirrors():
    pixels = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)
    pixels[:, :, 8, 5] = 200
    generator = torch.Generator().manual_seed(0)
    shifted = augment(pixels, "shift", generator)
    places = {tuple(row[1:]) for row in shifted[:, 0].nonzero().tolist()}
    assert places == {(8 + down, 5 + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    columns = set(augment(pixels, "crop", generator)[:, 0].nonzero()[:, 2].tolist())
    assert columns == {3, 4, 5, 6, 7} | {8, 9, 10, 11, 12}
    assert augment(pixels, "none", generator) is pixels


def test_auto_augmentation_depends_on_source_and_size():
    large = ImageSpec(size=(224, 224), mean=SPEC.mean, std=SPEC.std)
    assert choose_augment("auto", "digits", SPEC) == "shift"
    assert choose_augment("auto", "a folder", SPEC) == "crop"
    assert choose_augment("auto", "a folder", large) == "timm"
    assert choose_augment("none", "digits", SPEC) == "none"


@pytest.mark.parametrize("cache_mb", [0, 512])
def test_batches_for_a_gpu_are_pinned_after_augmentation(tmp_path, monkeypatch, cache_mb):
    pinned = set()

    def pin(tensor):
        pinned.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    images = open_data(str(write_images(tmp_path)), "train").images
    made = Batches(
        images,
        SPEC,
        TrainConfig(data=DataConfig(cache_mb=cache_mb, workers=0), batch_size=4),
        augment="crop",
        on_skipped=pytest.fail,
        pin=True,
    )
    assert (made._pixels is not None) == (cache_mb > 0)
    for found in (made.epoch(0), made.fixed()):
        for pixels, labels in found:
            assert {pixels.data_ptr(), labels.data_ptr()} <= pinned


def test_the_default_number_of_workers_is_for_a_gpu_only(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 16)
    assert (default_workers(on_gpu=False), default_workers(on_gpu=True)) == (0, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers(on_gpu=True) == 3
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    assert default_workers(on_gpu=True) == 1
