"""Sample deviations and corrected p-values."""

import numpy as np
import pytest

from ls_edge.evaluation.spread import deviation, holm, plus_minus, pooled


def test_deviations_have_n_minus_1_and_need_two_values():
    assert deviation([0.499, 0.265]) == pytest.approx(0.16546, abs=1e-5)
    assert deviation([0.5]) is None
    assert (plus_minus(None), plus_minus(0.165)) == ("", "± 0.165")
    groups = [np.array([0.1, 0.4, 0.2]), np.array([0.9, 0.7])]
    summaries = [(len(one), one.mean(), one.std(ddof=1)) for one in groups]
    assert pooled(summaries) == pytest.approx(np.concatenate(groups).std(ddof=1))
    assert pooled([(1, 0.5, None)]) is None
    assert pooled([(1, 0.499, None), (1, 0.265, None)]) == pytest.approx(deviation([0.499, 0.265]))


def test_holm_corrects_for_several_tests():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
