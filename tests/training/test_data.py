"""Images of a training: pixels as on boards, epochs that depend on seed and number alone, undecodable images."""

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
from ls_edge.training.data import Batches, choose_augment, default_workers, draw_shift, normalizer, shift_images
from ls_edge.training.distributed import DistributedContext
from tests.data.folders import write_every_mode, write_images

SPEC = ImageSpec(size=(16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_pct=0.9)


class Share(DistributedContext):
    """One of several processes, without the others."""

    def sum(self, values):
        return values


def batches(
    images, *, kind="none", config=None, size=4, on_skipped=pytest.fail, seed=0, spec=SPEC, rank=None, pin=False
):
    config = TrainConfig(data=config or DataConfig(), batch_size=size, seed=seed)
    context = DistributedContext() if rank is None else Share(rank, 2)
    return Batches(images, spec, config, augment=kind, on_skipped=on_skipped, context=context, pin=pin)


def images_of(folder, *arguments):
    return open_data(str(write_images(folder, *arguments)), "train").images


def same(ones, others):
    """Whether two sequences of batches have the same bytes."""
    return all(
        torch.equal(one.pixels, other.pixels) and torch.equal(one.labels, other.labels) and one.places == other.places
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("cache_mb", [512, 0])
def test_pixels_match_the_preprocessing_on_boards(tmp_path, cache_mb):
    images = images_of(tmp_path)
    found = batches(images, config=DataConfig(cache_mb=cache_mb), size=5)
    assert (found._pixels is not None) == (cache_mb > 0)
    assert (len(found), found.steps()) == (12, 2)
    pixels, labels = (torch.cat(parts) for parts in list(zip(*found.fixed(), strict=True))[:2])
    assert labels.tolist() == [image.label for image in images]
    expected = np.stack([Preprocessor(SPEC)(image.read()) for image in images])
    np.testing.assert_allclose(normalizer(SPEC, torch.device("cpu"))(pixels).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("cache_mb", [512, 0])
def test_training_and_boards_see_the_same_pixels_whatever_the_file(tmp_path, cache_mb, upright):
    spec = msgspec.structs.replace(SPEC, exif_orientation=upright)
    images = open_data(str(write_every_mode(tmp_path)), "train").images
    found = batches(images, config=DataConfig(cache_mb=cache_mb), size=5, spec=spec)
    pixels = torch.cat([batch.pixels for batch in found.fixed()]).numpy()
    board = Preprocessor(spec)
    for image, seen in zip(images, pixels, strict=True):
        cropped = np.asarray(board.crop(decode(image.read(), exif_orientation=upright)))
        assert np.array_equal(seen, cropped.transpose(2, 0, 1)), image.name
        assert seen.min() < 40, image.name
        assert 100 < seen.mean() < 155, image.name  # a clipped image is white
    timms = batches(images, kind="timm", config=DataConfig(cache_mb=cache_mb), size=len(images), spec=spec)
    (augmented, *_), = timms.epoch(1)  # fmt: skip
    assert augmented.float().mean((1, 2, 3)).max() < 230


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["crop", "timm"])
def test_epochs_depend_on_seed_and_number_alone(tmp_path, kind):
    """Not on where images are decoded, on what was drawn before, or on the number of processes."""
    images = images_of(tmp_path)

    def run(seed=0, epoch=1, cache_mb=512, workers=0, rank=None):
        config = DataConfig(cache_mb=cache_mb, workers=workers)
        return list(batches(images, kind=kind, config=config, seed=seed, rank=rank).epoch(epoch))

    first = run()
    torch.rand(5)
    assert same(first, run())
    assert same(first, run(cache_mb=0))
    assert same(first, run(cache_mb=0, workers=1))
    assert not same(first, run(epoch=2))
    assert not same(first, run(seed=1))
    for whole, one, other in zip(first, run(rank=0), run(rank=1, cache_mb=0), strict=True):
        assert torch.equal(whole.pixels, torch.cat((one.pixels, other.pixels)))
        assert whole.places == one.places + other.places == (0, 1, 2, 3)
    fixed = [torch.cat([batch.labels for batch in batches(images, rank=rank).fixed()]).tolist() for rank in (0, 1)]
    assert sorted(fixed[0] + fixed[1]) == sorted(image.label for image in images)


@pytest.mark.parametrize("cache_mb", [512, 0])
def test_an_image_that_cannot_be_decoded_is_named_counted_and_leaves_a_gap(tmp_path, cache_mb):
    images = images_of(tmp_path)
    (tmp_path / "cat" / "2.png").write_bytes(b"no image")
    told = set()
    config = DataConfig(cache_mb=cache_mb)
    found = batches(images, config=config, on_skipped=told.add)
    assert found.left_out() == {"cat/2.png"}  # also before a batch has it
    for _ in range(2):
        assert torch.cat([batch.labels for batch in found.fixed()]).tolist() == [0] * 5 + [1] * 6
    assert (len(found), len(told)) == (12, 1)
    assert "cat/2.png" in told.pop()
    places = [batch.places for batch in found.epoch(1)]
    assert sorted(map(len, places)) == [3, 4, 4]
    assert all(set(each) <= {0, 1, 2, 3} for each in places)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"no image")
    if cache_mb:
        with pytest.raises(DataError, match="none of 12 images"):
            batches(images, config=config, on_skipped=told.add)
    else:
        assert [len(batch.labels) for batch in batches(images, config=config, on_skipped=told.add).epoch(1)] == [0] * 3


def test_shift_moves_and_crop_mirrors():
    pixels = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)
    pixels[:, :, 8, 5] = 200
    generator = torch.Generator().manual_seed(0)
    shifted = shift_images(pixels, *draw_shift("shift", 64, 16, 16, generator))
    places = {tuple(row[1:]) for row in shifted[:, 0].nonzero().tolist()}
    assert places == {(8 + down, 5 + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    cropped = shift_images(pixels, *draw_shift("crop", 64, 16, 16, generator))
    assert set(cropped[:, 0].nonzero()[:, 2].tolist()) == {3, 4, 5, 6, 7} | {8, 9, 10, 11, 12}
    corner = shift_images(
        torch.full((64, 3, 16, 16), 9, dtype=torch.uint8), *draw_shift("shift", 64, 16, 16, generator)
    )
    assert set(corner.unique().tolist()) == {0, 9}  # what moves in is black
    assert draw_shift("none", 64, 16, 16, generator) is None


def test_auto_augmentation_depends_on_source_and_size():
    large = ImageSpec(size=(224, 224), mean=SPEC.mean, std=SPEC.std)
    asked = [
        ("auto", "digits", SPEC),
        ("auto", "a folder", SPEC),
        ("auto", "a folder", large),
        ("none", "digits", SPEC),
    ]
    assert [choose_augment(*each) for each in asked] == ["shift", "crop", "timm", "none"]


def test_batches_for_a_gpu_are_pinned_after_augmentation(tmp_path, monkeypatch):
    pinned = set()

    def pin(tensor):
        pinned.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    made = batches(images_of(tmp_path), kind="crop", config=DataConfig(workers=0), pin=True)
    for found in (made.epoch(0), made.fixed()):
        for pixels, labels, _ in found:
            assert {pixels.data_ptr(), labels.data_ptr()} <= pinned


def test_the_default_number_of_workers_is_for_a_gpu_only(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 16)
    assert (default_workers(on_gpu=False), default_workers(on_gpu=True)) == (0, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers(on_gpu=True) == 3
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    assert default_workers(on_gpu=True) == 1
