"""NaN and infinity are never an answer: whoever made them is named, and one odd image spoils nothing else."""

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
from ls_edge.core.peers_file import load_peers
from ls_edge.engines.executor import Executor
from ls_edge.engines.opening import open_block_engines
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.peer.executor import run_blocks
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.protocol.messages import TransferId
from ls_edge.runtime.routing.state.events import Compute, Computed, ComputeFailed
from ls_edge.runtime.source.source import Settings, Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults, inject, write
from tests.traces import read_trace

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(1, 17, 32), (3, 5), (1,)], ids=str)
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype, shape):
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal(shape).astype(dtype)
    assert is_finite(tokens)
    for bad in BAD:
        for at in rng.integers(0, tokens.size, 20):
            spoilt = tokens.copy()
            spoilt.flat[at] = bad
            assert not is_finite(spoilt)
            assert not is_finite(np.repeat(spoilt, 2, axis=-1)[..., ::2])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_and_tiny_values_are_finite(dtype):
    limits = np.finfo(dtype)
    values = [limits.max, limits.min, limits.smallest_subnormal, limits.tiny, -0.0, 0.0]
    assert is_finite(np.full((1, 197, 192), limits.max, dtype))
    assert is_finite(np.array(values, dtype))
    assert is_finite(np.empty((0, 3), dtype))


@pytest.fixture
def engines(tiny_bundle):
    opened = open_block_engines(Bundle.open(tiny_bundle), range(6), threads=1, max_batch=3)
    yield opened
    for engine in opened.values():
        engine.close()


def compute(blocks, rows):
    transfers = tuple(TransferId(bytes([i] * 16), 1, 1) for i in range(len(rows)))
    return Compute(blocks, transfers, tuple(rows), tuple(0 for _ in rows))


def tokens_of(bundle, seed):
    spec = Bundle.open(bundle).manifest.tokens
    return np.random.default_rng(seed).standard_normal((1, spec.count, spec.dim)).astype(np.float32)


def test_a_batch_gives_outputs_for_all_images_but_the_odd_one(engines, tiny_bundle):
    rows = [tokens_of(tiny_bundle, seed) for seed in range(3)]
    fine = run_blocks(Executor(engines), compute((2, 3), rows))
    assert isinstance(fine, Computed)
    rows[1][0, 0, 0] = np.nan
    odd = compute((2, 3), rows)
    failed = run_blocks(Executor(engines), odd)
    assert isinstance(failed, ComputeFailed)
    assert failed.not_finite
    assert (failed.block, failed.transfers) == (2, (odd.transfers[1],))
    assert failed.rest.transfers == (odd.transfers[0], odd.transfers[2])
    assert failed.rest.blocks == (2, 3)
    np.testing.assert_allclose(failed.rest.outputs, [fine.outputs[0], fine.outputs[2]], rtol=1e-5)
    alone = run_blocks(Executor(engines), compute((2,), rows[1:2]))
    assert (alone.not_finite, alone.rest) == (True, None)


class Spoiling:
    """An engine that puts a NaN or infinity into what it returns."""

    def __init__(self, engine, bad):
        self._engine, self._bad = engine, bad

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, inputs):
        result = self._engine.run(inputs)
        result[-1].flat[-1] = self._bad
        return result


@pytest.mark.parametrize("bad", BAD)
def test_the_block_that_began_it_is_named(engines, tiny_bundle, bad):
    spoilt = {**engines, 4: Spoiling(engines[4], bad)}
    failed = run_blocks(Executor(spoilt), compute((1, 4, 5), [tokens_of(tiny_bundle, 0)]))
    assert (failed.block, failed.not_finite, failed.rest) == (4, True, None)


@pytest.fixture
def faulty(tiny_bundle, write_peers, serve, tmp_path):
    """Serve peers with faults and open a source: ``faulty(placement, {name: faults})``."""
    opened = []

    def start(placement, faults, bundle=tiny_bundle, **settings):
        file, bundle = load_peers(write_peers(placement)), Bundle.open(bundle)
        for name in placement:
            path = tmp_path / f"{name}.faults"
            serve(inject(Peer(file, name, bundle), path))
        opened.append(Source(file, bundle, Settings(**settings)))
        assert opened[-1].wait_ready() == ()
        for name, wrong in faults.items():
            write(tmp_path / f"{name}.faults", wrong)
        return opened[-1]

    yield start
    for source in opened:
        source.close()


def test_the_only_holder_of_a_block_that_makes_nan_is_named(faulty, images):
    source = faulty({"a": [0, 1], "b": [2, 3], "c": [4, 5]}, {"b": Faults(not_finite=1.0)}, max_skips=0)
    for image in images(2):
        error = source.submit(image, budget_ms=1000).exception(20)
        assert isinstance(error, NotFinite)
        assert "b" in str(error).partition("in what")[2].partition("computed")[0].replace(",", " ").split()
        assert error.record.logits is None
        assert error.record.prediction is None


def test_another_holder_answers_for_one_that_makes_nan(faulty, images, tiny_bundle, assert_replays, wait_until):
    source = faulty({"a": range(6), "b": range(6)}, {"a": Faults(not_finite=1.0)}, max_skips=0)
    wait_until(lambda: {view.state for view in source.snapshot.peers.values()} == {"alive"}, what="both peers")
    pictures = images(12)
    answers = [source.submit(image).result(20) for image in pictures]
    assert not any(answer.degraded for answer in answers)
    assert {holder for answer in answers for holder in answer.record.holders} == {"b"}
    assert_replays(tiny_bundle, pictures, answers)


def bundle_whose_head_fails(bundle, folder, threshold):
    """A copy whose head makes NaN of the logits where the first one is above ``threshold``, and else leaves them."""
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


def test_logits_that_are_not_finite_are_an_error_that_names_the_holders(faulty, images, tiny_bundle, tmp_path):
    with Pipeline.open(Bundle.open(tiny_bundle), threads=1) as pipeline:
        fine, spoilt = sorted(images(2), key=lambda image: pipeline.forward(image[np.newaxis])[0, 0])
        threshold = np.mean([pipeline.forward(image[np.newaxis])[0, 0] for image in (fine, spoilt)])
    bundle = bundle_whose_head_fails(tiny_bundle, tmp_path / "odd", threshold)
    source = faulty({"a": [0, 1, 2], "b": [3, 4, 5]}, {}, bundle)
    with pytest.raises(NotFinite, match=r"the head returned NaN or infinity for the tokens of (a, b|b, a)") as raised:
        source.submit(spoilt).result(20)
    assert raised.value.record.prediction is None
    assert raised.value.record.holders == {"a", "b"}
    assert source.submit(fine).result(20).prediction in range(10)


@pytest.mark.parametrize("bad", BAD)
def test_an_image_that_is_not_finite_is_refused_by_name(faulty, images, bad):
    source = faulty({"a": range(6)}, {})
    (image,) = images(1)
    spoilt = image.copy()
    spoilt[1, 2, 3] = bad
    with pytest.raises(DataError, match=r"cam/7\.png contains NaN or infinity"):
        source.submit(spoilt, name="cam/7.png")
    with pytest.raises(DataError, match="image contains NaN or infinity"):
        source.submit(spoilt)
    assert source.submit(image).result(20).prediction in range(10)


def test_an_image_that_overflows_in_the_stem_is_an_error_of_its_own(faulty, images):
    source = faulty({"a": range(6)}, {})
    with pytest.raises(NotFinite, match=r"the stem returned NaN or infinity for bright\.png"):
        source.submit(np.full((3, 16, 16), 3e38, np.float32), name="bright.png").result(20)
    (image,) = images(1)
    assert source.submit(image).result(20).prediction in range(10)


def test_a_run_through_such_a_peer_ends_with_errors_and_a_trace_that_is_read_again(tmp_path, tiny_bundle):
    with FaultyCluster(tmp_path, tiny_bundle, {"a": range(3), "b": range(3, 6)}) as peers:
        peers.wait_warm()
        peers.set_faults("b", Faults(not_finite=1.0))
        trace = tmp_path / "t.jsonl"
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
