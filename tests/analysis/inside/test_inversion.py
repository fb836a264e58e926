import pytest

from ls_edge.analysis.inside import inversion
from tests.analysis.runs import MIXER, VIT, measured, opened


@pytest.mark.parametrize(("name", "arguments"), [("vit_digits", VIT), ("mixer_cifar", MIXER)])
def test_descent_lowers_the_distance_and_repeats(name, arguments, monkeypatch):
    monkeypatch.setattr(inversion, "STEPS", 150)
    run = opened(name, arguments)
    found = measured(run, "inversion")
    assert min(found.factors) > 5
    assert measured(run, "inversion") == found
    assert f"factor of {found.factors[0]:,.0f} after block 0" in inversion.INVERSION.finding(found)
