"""NaN and infinity are never an answer: their origin is named, and one odd image spoils no other."""

import hashlib
import shutil

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ls_edge.core.bundle import Bundle, bundle_id_of, write_manifest
from ls_edge.core.errors import DataError, ImageRejected, NotFinite
from tests.faults.engines import Faults, write


@pytest.fixture
def faulty(tiny_bundle, serve_peers, open_source, tmp_path):
    """Serve peers with faults and open a source: ``faulty(placement, {name: faults})``."""

    def start(placement, faults, bundle=tiny_bundle, **settings):
        source = open_source(serve_peers(placement, bundle, faulty=True), bundle, **settings)
        for name, wrong in faults.items():
            write(tmp_path / f"{name}.faults", wrong)
        return source

    return start


def test_the_only_holder_of_a_block_that_returns_nan_is_named(faulty, images):
    source = faulty({"a": [0, 1], "b": [2, 3], "c": [4, 5]}, {"b": Faults(not_finite=1.0)}, max_skips=0)
    for image in images(2):
        error = source.submit(image, budget_ms=1000).exception(20)
        assert isinstance(error, NotFinite), error
        assert "in the output of b;" in str(error)
        assert error.record.logits is None
        assert error.record.prediction is None


def test_another_holder_replaces_one_that_returns_nan(faulty, images, tiny_bundle, assert_replays, wait_until):
    source = faulty({"a": range(6), "b": range(6)}, {"a": Faults(not_finite=1.0)}, max_skips=0)
    wait_until(lambda: {view.state for view in source.snapshot.peers.values()} == {"alive"}, what="both peers")
    pictures = images(12)
    answers = [source.submit(image).result(20) for image in pictures]
    assert not any(answer.degraded for answer in answers)
    assert {holder for answer in answers for holder in answer.record.holders} == {"b"}
    assert_replays(tiny_bundle, pictures, answers)


def test_logits_with_nan_are_an_error_that_names_the_holders(faulty, images, tiny_bundle, tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(tiny_bundle, folder)
    opened = Bundle.open(folder)
    manifest, path = opened.manifest, folder / opened.manifest.parts.head.file
    head = onnx.load(path)
    weights = next(one for one in head.graph.initializer if one.data_type == onnx.TensorProto.FLOAT)
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32("nan"), weights.name))
    onnx.save(head, path)
    raw = path.read_bytes()
    changed = msgspec.structs.replace(manifest.parts.head, sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))
    parts = msgspec.structs.replace(manifest.parts, head=changed)
    bundle_id = bundle_id_of(opened.interface, manifest.precision, parts)
    write_manifest(folder, msgspec.structs.replace(manifest, parts=parts, bundle_id=bundle_id))
    source = faulty({"a": [0, 1, 2], "b": [3, 4, 5]}, {}, folder)
    with pytest.raises(NotFinite, match=r"the head returned NaN or infinity for the tokens of (a, b|b, a)") as raised:
        source.submit(images(1)[0]).result(20)
    assert raised.value.record.prediction is None
    assert raised.value.record.holders == {"a", "b"}


def test_an_image_that_is_not_finite_or_overflows_in_the_stem_is_named(faulty, images):
    source = faulty({"a": range(6)}, {})
    (image,) = images(1)
    spoiled = image.copy()
    spoiled[1, 2, 3] = float("-inf")
    with pytest.raises(DataError, match=r"cam/7\.png contains NaN or infinity"):
        source.submit(spoiled, name="cam/7.png")
    with pytest.raises(DataError, match="image contains NaN or infinity"):
        source.submit(spoiled)
    with pytest.raises(ImageRejected, match=r"the stem returned NaN or infinity for bright\.png"):
        source.submit(np.full((3, 16, 16), 3e38, np.float32), name="bright.png").result(20)
    assert source.submit(image).result(20).prediction in range(10)
