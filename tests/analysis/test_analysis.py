"""Analyses against plain computations of the same values."""

import math

import msgspec
import numpy as np
import pytest

from ls_edge.analysis import KINDS, analyze, check_kinds
from ls_edge.analysis.blocks import token_additions
from ls_edge.analysis.blocks.similarity import cka_matrix
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError, UsageError

BLOCKS, DIM, TOKENS, CLASSES = 5, 6, 4, 3
BASIC = ("importance", "contribution", "similarity", "agreement")


class Residual:
    """Block i adds ``tanh(x W_i + slot)``; a block of zeros adds nothing."""

    def __init__(self, seed=0, zeroed=(), blocks=BLOCKS):
        rng = np.random.default_rng(seed)
        self.num_blocks = blocks
        self.weights = rng.standard_normal((blocks, DIM, DIM)).astype(np.float32)
        self.weights[list(zeroed)] = 0
        self.classifier = rng.standard_normal((DIM, CLASSES)).astype(np.float32)
        self.ran = set()

    def stem(self, images):
        return images

    def block(self, index, tokens, slot):
        return tokens + np.tanh(tokens @ self.weights[index]) * np.float32(1 + slot)

    def head(self, tokens):
        return tokens.mean(axis=1) @ self.classifier

    def array_of(self, tokens):
        return tokens

    def outputs(self, images, order):
        """Tokens before and after each block of an order, and the logits; run one by one."""
        steps, tokens = [], images
        for slot, block in enumerate(order):
            after = self.block(block, tokens, slot)
            steps.append((block, slot, tokens.astype(np.float64), after.astype(np.float64)))
            tokens = after
        self.ran.add(tuple(order))
        return steps, self.head(tokens).astype(np.float64)


def drawn(count, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, TOKENS, DIM)).astype(np.float32), rng.integers(0, CLASSES, count)


def batches(images, labels, size):
    return [(images[at : at + size], labels[at : at + size]) for at in range(0, len(images), size)]


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def plan_of(bands=None, kinds=BASIC, orders=12, seed=0, **fields):
    return AnalysisPlan(AnalysisSettings(what=kinds, orders=orders, seed=seed, **fields), bands or Bands(BLOCKS))


def centered_alignment(x, y):
    """Compute the alignment as its authors define it, with a centering matrix."""
    n = len(x)
    centering = np.eye(n) - 1 / n

    def hsic(one, other):
        return np.trace(one @ one.T @ centering @ other @ other.T @ centering) / (n - 1) ** 2

    return hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))


def test_alignment_does_not_see_rotation_scale_and_shift():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 7)), rng.standard_normal((40, 11)) + 3
    rotation, _ = np.linalg.qr(rng.standard_normal((7, 7)))
    found = np.array(cka_matrix([x, x @ rotation, 5 * x, x - 2, y]))
    assert found[:4, :4] == pytest.approx(1.0)
    assert found[0, 4] == found[4, 0] == pytest.approx(centered_alignment(x, y))
    assert 0 < found[0, 4] < 1
    mixing = rng.standard_normal((7, 7))
    assert cka_matrix([x, x @ mixing])[0][1] == pytest.approx(centered_alignment(x, x @ mixing))
    assert cka_matrix([x, x @ mixing])[0][1] < 0.99


def test_alignment_with_what_is_equal_for_all_images_is_none():
    x = np.random.default_rng(0).standard_normal((10, 3))
    assert cka_matrix([np.full((10, 3), 0.1), x])[0] == [None, None]
    assert cka_matrix([np.full((10, 3), 0.1), x])[1] == [None, pytest.approx(1.0)]


def test_figures_are_those_of_orders_run_one_by_one():
    model, (images, labels) = Residual(), drawn(20)
    plan = plan_of()
    found = analyze(model, batches(images, labels, 8), plan)
    trained_steps, trained = model.outputs(images, plan.trained)

    def loss(logits):
        return -np.log(softmax(logits)[np.arange(20), labels]).mean()

    assert found.importance.trained.loss == pytest.approx(loss(trained), rel=1e-5)
    assert found.importance.trained.top1 == np.mean(trained.argmax(1) == labels)
    for block, one in enumerate(found.importance.blocks):
        _, without = model.outputs(images, [b for b in plan.trained if b != block])
        assert one.importance == pytest.approx(loss(without) - loss(trained), abs=1e-5)
        assert one.left_out.top1 == np.mean(without.argmax(1) == labels)
        order = [b for b in plan.trained if b != block]
        order.insert(one.moved_to, block)
        _, moved = model.outputs(images, order)
        assert one.moved.loss == pytest.approx(loss(moved), rel=1e-5)
    assert [one.moved_to for one in found.importance.blocks] == [4, 4, 4, 0, 0]

    ratios = {}
    cosines = {block: [] for block in range(BLOCKS)}
    for order in plan.random():
        steps, _ = model.outputs(images, order)
        for block, slot, before, after in steps:
            added = after - before
            ratio = np.linalg.norm(added, axis=2) / np.linalg.norm(before, axis=2)
            ratios.setdefault((block, slot), []).append(ratio)
            usual = next(a - b for one, _, b, a in trained_steps if one == block)
            cosine = (added * usual).sum(2) / (np.linalg.norm(added, axis=2) * np.linalg.norm(usual, axis=2))
            cosines[block].append(cosine)
    for block in range(BLOCKS):
        _, slot, before, after = trained_steps[block]
        usual = np.linalg.norm(after - before, axis=2) / np.linalg.norm(before, axis=2)
        assert found.contribution.trained[block] == pytest.approx(usual.mean(), rel=1e-5)
        assert found.similarity.cosine[block] == pytest.approx(np.mean(cosines[block]), abs=1e-5)
        for slot in range(BLOCKS):
            mean = np.mean(ratios[block, slot]) if (block, slot) in ratios else None
            assert found.contribution.random[block][slot] == (mean if mean is None else pytest.approx(mean, rel=1e-5))

    pooled = [images.mean(axis=1), *(after.mean(axis=1) for *_, after in trained_steps)]
    for one, row in enumerate(found.similarity.cka):
        for other, value in enumerate(row):
            assert value == pytest.approx(centered_alignment(pooled[one], pooled[other]), abs=1e-5)
    assert found.similarity.steps == ["stem", "0", "1", "2", "3", "4"]

    groups = {0: plan.random(), **plan.left_out()}
    assert sorted(groups) == [0, 1, 2, 4]
    for one in (found.agreement.random, *found.agreement.left_out):
        logits = [model.outputs(images, order)[1] for order in groups[one.left_out]]
        same = np.array([each.argmax(1) == trained.argmax(1) for each in logits])
        assert one.same_class == pytest.approx(same.mean())
        assert one.all_same_class == pytest.approx(same.all(axis=0).mean())
        away = [np.abs(softmax(each) - softmax(trained)).sum(1).mean() / 2 for each in logits]
        assert one.total_variation == pytest.approx(np.mean(away), abs=1e-6)
        assert one.orders == len(logits)
    assert found.images == 20
    assert set(found.reasons) == set(KINDS) - set(BASIC)


def test_a_block_that_adds_nothing():
    class Slotless(Residual):
        def block(self, index, tokens, slot):
            return super().block(index, tokens, 0)

    found = analyze(Slotless(zeroed=[2]), [drawn(12)], plan_of())
    assert found.contribution.trained[2] == 0
    assert {value for value in found.contribution.random[2] if value is not None} == {0}
    assert found.importance.blocks[2].importance == 0
    assert found.importance.blocks[2].left_out == found.importance.blocks[2].moved == found.importance.trained
    assert found.similarity.cka[2][3] == pytest.approx(1.0)
    assert found.similarity.cosine[2] is None
    others = [one.importance for one in found.importance.blocks if one.block != 2]
    assert all(others)


def test_the_size_of_a_batch_makes_no_difference_and_runs_repeat():
    images, labels = drawn(24)
    one, two, again = (
        msgspec.to_builtins(analyze(Residual(), batches(images, labels, size), plan_of())) for size in (24, 5, 5)
    )
    assert two == again
    assert flat(one) == pytest.approx(flat(two), rel=1e-5, abs=1e-6)
    other = analyze(Residual(), batches(images, labels, 24), plan_of(seed=1))
    assert other.agreement != analyze(Residual(), batches(images, labels, 24), plan_of()).agreement


def flat(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in flat(each)]
    return [value] if isinstance(value, (int, float)) else []


def test_blocks_stay_in_their_bands():
    bands = Bands.from_json("0/1-3/4")

    class Watched(Residual):
        def stem(self, images):
            return images, ()

        def block(self, index, tokens, slot):
            array, path = tokens
            assert slot == len(path)
            self.ran.add((*path, index))
            return super().block(index, array, slot), (*path, index)

        def head(self, tokens):
            return super().head(tokens[0])

        def array_of(self, tokens):
            return tokens[0]

    model = Watched()
    found = analyze(model, [drawn(6)], plan_of(bands))
    assert len(model.ran) > 20
    assert all(list(path) == sorted(path, key=bands.band_of) for path in model.ran)
    assert [one.moved_to for one in found.importance.blocks] == [None, 3, 3, 1, None]
    assert found.importance.blocks[0].moved is None
    assert found.contribution.random[0][1:] == [None] * 4
    assert found.contribution.random[0][0] == pytest.approx(found.contribution.trained[0])
    fixed = analyze(Residual(), [drawn(6)], plan_of(Bands.fixed(BLOCKS)))
    assert fixed.agreement.random.same_class == 1
    assert fixed.agreement.random.total_variation == 0
    assert fixed.similarity.cosine == [pytest.approx(1.0)] * BLOCKS


def test_a_model_of_one_block():
    found = analyze(Residual(blocks=1), [drawn(6)], plan_of(Bands(1)))
    assert found.agreement.left_out == []
    assert found.importance.blocks[0].moved is None
    assert found.importance.blocks[0].left_out != found.importance.trained


def test_only_what_is_asked_for_runs_and_the_rest_has_a_reason():
    found = analyze(Residual(), [drawn(6)], plan_of(kinds=("contribution",)))
    assert found.importance is found.similarity is found.agreement is found.attention is None
    assert found.contribution is not None
    assert found.reasons == dict.fromkeys(set(KINDS) - {"contribution"}, "not asked for")


def test_similarity_is_of_a_bounded_number_of_images(monkeypatch):
    monkeypatch.setattr(token_additions, "MOST_CKA_IMAGES", 10)
    images, labels = drawn(24)
    many = analyze(Residual(), batches(images, labels, 4), plan_of()).similarity
    few = analyze(Residual(), batches(images[:10], labels[:10], 10), plan_of()).similarity
    assert many.cka_images == few.cka_images == 10
    assert flat(many.cka) == pytest.approx(flat(few.cka))


def test_the_first_token_instead_of_the_mean():
    images, labels = drawn(16)
    found = analyze(Residual(), [(images, labels)], plan_of(pool="first")).similarity
    after = Residual().block(0, images, 0)
    assert found.cka[0][1] == pytest.approx(centered_alignment(images[:, 0], after[:, 0]), abs=1e-5)
    assert found.pool == "first"


def test_kinds():
    assert check_kinds(list(KINDS)) == tuple(KINDS)
    assert check_kinds(["agreement", "importance"]) == ("importance", "agreement")
    with pytest.raises(UsageError, match="'x' is not a kind of analysis; use importance, "):
        check_kinds(["importance", "x"])
    with pytest.raises(DataError, match="no images"):
        analyze(Residual(), [], plan_of())
