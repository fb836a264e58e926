import math

import numpy as np
import pytest

from ls_edge.analysis.blocks.similarity import cka_matrix
from tests.analysis.models import Residual, analyzed, drawn, plan_of


def alignment(x, y):
    """Compute the alignment as its authors define it, with a centering matrix."""
    n = len(x)
    centering = np.eye(n) - 1 / n

    def hsic(one, other):
        return np.trace(one @ one.T @ centering @ other @ other.T @ centering) / (n - 1) ** 2

    return hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))


def test_alignment_ignores_rotation_scale_and_shift():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 7)), rng.standard_normal((40, 11)) + 3
    rotation, _ = np.linalg.qr(rng.standard_normal((7, 7)))
    found = np.array(cka_matrix([x, x @ rotation, 5 * x, x - 2, y]))
    assert found[:4, :4] == pytest.approx(1.0)
    assert found[0, 4] == found[4, 0] == pytest.approx(alignment(x, y))
    assert 0 < found[0, 4] < 1
    mixing = rng.standard_normal((7, 7))
    assert cka_matrix([x, x @ mixing])[0][1] == pytest.approx(alignment(x, x @ mixing))
    assert cka_matrix([x, x @ mixing])[0][1] < 0.99


def test_alignment_with_equal_vectors_is_none():
    x = np.random.default_rng(0).standard_normal((10, 3))
    assert cka_matrix([np.full((10, 3), 0.1), x])[0] == [None, None]
    assert cka_matrix([np.full((10, 3), 0.1), x])[1] == [None, pytest.approx(1.0)]


def test_steps_are_compared_by_their_pooled_tokens():
    model = Residual()
    images, _ = drawn(model, 20)
    found = analyzed(model, "similarity").similarity
    pooled = [images.mean(axis=1), *(after.mean(axis=1) for *_, after in model.run(images, range(5))[0])]
    assert found.steps == ["stem", "0", "1", "2", "3", "4"]
    for one, row in enumerate(found.cka):
        assert row == [pytest.approx(alignment(pooled[one], other), abs=1e-5) for other in pooled]


def test_cosines_compare_additions_in_random_and_in_trained_order():
    model = Residual()
    images, _ = drawn(model, 20)
    found = analyzed(model, "similarity", orders=12).similarity
    usual = {block: after - before for block, _, before, after in model.run(images, range(5))[0]}
    cosines = {block: [] for block in range(5)}
    for order in plan_of(model, ["similarity"], orders=12).random():
        for block, _, before, after in model.run(images, order)[0]:
            added = after - before
            norms = np.linalg.norm(added, axis=2) * np.linalg.norm(usual[block], axis=2)
            cosines[block].append((added * usual[block]).sum(2) / norms)
    assert found.cosine == [pytest.approx(np.mean(cosines[block]), abs=1e-5) for block in range(5)]


def test_a_block_that_adds_nothing_changes_no_token_and_has_no_cosine():
    found = analyzed(Residual(zeroed=[2]), "similarity").similarity
    assert found.cka[2][3] == pytest.approx(1.0)
    assert found.cosine[2] is None
