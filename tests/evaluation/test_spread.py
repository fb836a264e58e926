"""Sample deviations and paired tests, against textbook values and simulated seeds."""

import numpy as np
import pytest

from ls_edge.evaluation.spread import deviation, holm, paired, plus_minus, pooled, t_p, t_quantile


def test_deviations_have_n_minus_1_and_need_two_values():
    assert deviation([0.499, 0.265]) == pytest.approx(0.16546, abs=1e-5)
    assert deviation([0.5]) is None
    assert (plus_minus(None), plus_minus(0.165)) == ("", "± 0.165")
    groups = [np.array([0.1, 0.4, 0.2]), np.array([0.9, 0.7])]
    summaries = [(len(one), one.mean(), one.std(ddof=1)) for one in groups]
    assert pooled(summaries) == pytest.approx(np.concatenate(groups).std(ddof=1))
    assert pooled([(1, 0.5, None)]) is None
    assert pooled([(1, 0.499, None), (1, 0.265, None)]) == pytest.approx(deviation([0.499, 0.265]))


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_student_s_t_matches_the_tables(freedom, t):
    assert t_p(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert t_p(-t, freedom) == t_p(t, freedom)
    assert t_quantile(freedom) == pytest.approx(t, abs=1e-3)
    assert t_p(0, freedom) == pytest.approx(1)


def test_a_paired_test_removes_what_seeds_have_in_common():
    one, other = [0.90, 0.70, 0.81, 0.60], [0.88, 0.69, 0.79, 0.58]
    found = paired(one, other)
    assert found.difference == pytest.approx(0.0175)
    assert 0 < found.low < found.difference < found.high
    assert found.p == pytest.approx(0.0060, abs=1e-3)
    assert paired([0.5], [0.4]) is None
    assert paired([0.5, 0.6], [0.5, 0.6]).p == 1


def test_one_in_twenty_equal_methods_differs_and_one_in_twenty_families_after_correction():
    rng = np.random.default_rng(0)
    each, families = 0, 0
    for _ in range(400):
        ps = [paired(*rng.normal(size=(2, 5))).p for _ in range(6)]
        each += sum(p < 0.05 for p in ps)
        families += min(holm(ps)) < 0.05
    assert each / 2400 == pytest.approx(0.05, abs=0.015)
    assert families / 400 <= 0.08
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
