"""Pipeline: the same logits as plain onnxruntime and as PyTorch in any order and arrangement; replay of traces."""

import random

import numpy as np
import onnxruntime
import pytest
import torch

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.core.records import RequestRecord
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import relative_error
from ls_edge.training.runs.checkpoint import load_run
from tests.arrangements import arrangement_of
from tests.traces import replay

IMAGES = np.random.default_rng(3).standard_normal((3, 3, 16, 16), dtype=np.float32)


@pytest.fixture(scope="module")
def pipeline(tiny_bundle):
    with Pipeline.open(Bundle.open(tiny_bundle), threads=1, provider="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def view(tiny_bundle):
    return load_run(tiny_bundle.parent / "run").view


def close(ours, theirs, bar):
    assert np.abs(ours - theirs).max() <= bar * np.abs(theirs).max()


def test_an_order_computes_the_same_as_plain_sessions(pipeline, view):
    order = random.Random(4).sample(range(6), 6)
    bundle = pipeline.bundle

    def run(part, **inputs):
        return onnxruntime.InferenceSession(bundle.read(part)).run(None, inputs)[0]

    tokens = run("stem", images=IMAGES)
    for block in order:
        tokens = run(f"block {block}", tokens=tokens)
    logits = run("head", tokens=tokens)
    close(pipeline.forward(IMAGES, order), logits, 1e-5)
    with torch.no_grad():
        close(pipeline.forward(IMAGES, order), view(torch.from_numpy(IMAGES), order).numpy(), 1e-5)
    assert np.abs(pipeline.forward(IMAGES) - logits).max() > 0.01


@pytest.mark.parametrize(
    "arrangement", [None, [], [3], [5, 0], [0, 1, 2, 3, 4, 5], [[[0, 1], [2]], [[5], [4], [3]]], [[[4]], [[1, 2], [0]]]]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_arrangement_computes_the_same_as_pytorch(pipeline, view, arrangement, batch):
    images = IMAGES[:batch]
    asked = None if arrangement is None else arrangement_of(arrangement)
    with torch.no_grad():
        expected = view(torch.from_numpy(images), asked).numpy()
    close(pipeline.forward(images, asked), expected, 1e-5)


def test_profile_times_each_part(pipeline):
    logits, seconds = pipeline.profile(IMAGES)
    np.testing.assert_array_equal(logits, pipeline.forward(IMAGES))
    assert len(seconds) == 8
    assert min(seconds) > 0


def test_unknown_blocks_and_other_shapes_are_refused(pipeline):
    with pytest.raises(UsageError, match="the bundle has no block 6; it has blocks 0 to 5"):
        pipeline.forward(IMAGES, [0, 6])
    with pytest.raises(UsageError, match="no block -1"):
        pipeline.block(-1, pipeline.stem(IMAGES))
    with pytest.raises(EngineError, match=r"images is float32 \[3, 3, 16, 15\]"):
        pipeline.forward(IMAGES[..., :15])
    with pytest.raises(EngineError, match="B at least 1"):
        pipeline.forward(IMAGES[:0])


def record(number, logits, waves=()):
    return RequestRecord(
        id=number, image=str(number), label=None, prediction=0, latency_us=1000, degraded=False, error=None,
        skipped=(), attempts=1, logits=logits, waves=waves,
    )  # fmt: skip


def test_replay_finds_answers_that_another_arrangement_computed(pipeline):
    def answer(number, arrangement):
        return tuple(pipeline.forward(IMAGES[number][None], arrangement_of(arrangement))[0].tolist())

    records = [
        record(0, answer(0, [1, 0]), waves=((((1, "a"), (0, "b")),),)),
        record(1, answer(1, [0, 1]), waves=((((1, "a"), (0, "b")),),)),
        record(2, answer(2, [[[0], [1]]]), waves=((((0, "a"),), ((1, "b"),)),)),
        record(3, None),
        record(4, (float("nan"),) * 10),
    ]
    errors = {found.id: found.error for found in replay(pipeline, records, lambda r: IMAGES[r.id % 3])}
    assert errors.keys() == {0, 1, 2, 4}
    assert errors[0] < 1e-6
    assert errors[1] > 1e-2
    assert errors[2] < 1e-6
    assert errors[4] == float("inf")
    with pytest.raises(EngineError, match="2 logits"):
        list(replay(pipeline, [record(0, (0.0, 1.0))], lambda r: IMAGES[r.id]))


@pytest.mark.parametrize(
    ("values", "reference", "expected"),
    [
        ([1.0, 5.0], [2.0, -4.0], 9 / 4),
        ([[0.5, 0.25]], [[0.5, 0.5]], 0.5),
        ([100.0, 201.0], [100.0, 200.0], 1 / 200),
        ([3.0], [3.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], 1e30),
        ([np.nan, 1.0], [1.0, 1.0], np.inf),
    ],
)
def test_a_relative_error_is_the_difference_over_the_largest_reference(values, reference, expected):
    assert relative_error(np.array(values), np.array(reference)) == pytest.approx(expected)
