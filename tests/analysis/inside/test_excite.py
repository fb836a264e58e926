import pytest

from ls_edge.analysis.inside import excite
from tests.analysis.runs import MIXER, VIT, measured, opened


@pytest.mark.parametrize(("name", "arguments"), [("vit_digits", VIT), ("mixer_cifar", MIXER)])
def test_ascent_raises_the_value_and_repeats(name, arguments, monkeypatch):
    monkeypatch.setattr(excite, "STEPS", 60)
    run = opened(name, arguments)
    found = measured(run, "excite")
    assert all(after > before for before, after in zip(found.noise, found.reached, strict=True))
    assert measured(run, "excite") == found
