"""NaN and infinity are never an answer: their origin is named, and one odd image spoils no other."""

import hashlib
import json
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ls_edge.core.bundle import Bundle, bundle_id_of, write_manifest
from ls_edge.core.errors import DataError, NotFinite
from ls_edge.engines.pipeline import Pipeline
from tests.faults.engines import Faults, write
from tests.traces import read_trace

BAD = [float("nan"), float("inf"), float("-inf")]


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


def bundle_whose_head_fails(bundle, folder, threshold):
    """A copy whose head returns NaN for logits of which the first one is above ``threshold``."""
    shutil.copytree(bundle, folder)
    manifest = Bundle.open(folder).manifest
    model = onnx.load(folder / manifest.parts.head.file)
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["finite" if name == output.name else name for name in node.output]
    constants = {"first": np.int64([0]), "threshold": np.float32([threshold]), "zero": np.float32([0.0])}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    model.graph.node.extend([
        helper.make_node("Gather", ["finite", "first"], ["first_logit"], axis=1),
        helper.make_node("Sub", ["threshold", "first_logit"], ["distance"]),
        helper.make_node("Sqrt", ["distance"], ["root"]),
        helper.make_node("Mul", ["root", "zero"], ["zero_or_nan"]),
        helper.make_node("Add", ["finite", "zero_or_nan"], [output.name]),
    ])  # fmt: skip
    raw = model.SerializeToString()
    (folder / manifest.parts.head.file).write_bytes(raw)
    head = msgspec.structs.replace(manifest.parts.head, sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))
    parts = msgspec.structs.replace(manifest.parts, head=head)
    bundle_id = bundle_id_of(Bundle.open(folder).interface, manifest.precision, parts)
    write_manifest(folder, msgspec.structs.replace(manifest, parts=parts, bundle_id=bundle_id))
    return folder


def test_logits_with_nan_are_an_error_that_names_the_holders(faulty, images, tiny_bundle, tmp_path):
    with Pipeline.open(Bundle.open(tiny_bundle), threads=1) as pipeline:
        fine, spoiled = sorted(images(2), key=lambda image: pipeline.forward(image[np.newaxis])[0, 0])
        threshold = np.mean([pipeline.forward(image[np.newaxis])[0, 0] for image in (fine, spoiled)])
    bundle = bundle_whose_head_fails(tiny_bundle, tmp_path / "odd", threshold)
    source = faulty({"a": [0, 1, 2], "b": [3, 4, 5]}, {}, bundle)
    with pytest.raises(NotFinite, match=r"the head returned NaN or infinity for the tokens of (a, b|b, a)") as raised:
        source.submit(spoiled).result(20)
    assert raised.value.record.prediction is None
    assert raised.value.record.holders == {"a", "b"}
    assert source.submit(fine).result(20).prediction in range(10)


@pytest.mark.parametrize("bad", BAD)
def test_an_image_with_nan_or_infinity_is_refused_by_name(faulty, images, bad):
    source = faulty({"a": range(6)}, {})
    (image,) = images(1)
    spoiled = image.copy()
    spoiled[1, 2, 3] = bad
    with pytest.raises(DataError, match=r"cam/7\.png contains NaN or infinity"):
        source.submit(spoiled, name="cam/7.png")
    with pytest.raises(DataError, match="image contains NaN or infinity"):
        source.submit(spoiled)
    assert source.submit(image).result(20).prediction in range(10)


def test_an_image_that_overflows_in_the_stem_is_an_error_that_names_it(faulty, images):
    source = faulty({"a": range(6)}, {})
    with pytest.raises(NotFinite, match=r"the stem returned NaN or infinity for bright\.png"):
        source.submit(np.full((3, 16, 16), 3e38, np.float32), name="bright.png").result(20)
    (image,) = images(1)
    assert source.submit(image).result(20).prediction in range(10)


def test_a_run_through_a_peer_with_nan_ends_with_errors_and_a_readable_trace(start_peers, tmp_path, tiny_bundle):
    peers, trace = start_peers({"a": range(3), "b": range(3, 6)}), tmp_path / "t.jsonl"
    peers.set_faults("b", Faults(not_finite=1.0))
    done = subprocess.run(
        [sys.executable, "-m", "ls_edge", "run", "--peers", str(peers.path), "--bundle", str(tiny_bundle),
         "--data", "digits", "--limit", "3", "--max-skips", "0", "--budget-ms", "1000", "--trace", str(trace),
         "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["answered"], summary["failed"], summary["top1"]) == (0, 3, None)
    assert summary["errors"].get("NotFinite", 0) >= 1
    records = list(read_trace(trace))
    assert len(records) == 3
    assert all(record.error and record.logits is None for record in records)
