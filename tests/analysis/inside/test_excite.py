import pytest

from ls_edge.analysis.inside import excite
from tests.analysis.runs import MIXER, VIT, images_for, measured, opened


@pytest.mark.parametrize(("name", "arguments"), [("vit_digits", VIT), ("mixer_cifar", MIXER)])
def test_ascent_raises_the_value_and_repeats(name, arguments, monkeypatch):
    monkeypatch.setattr(excite, "STEPS", 60)
    run = opened(name, arguments)
    found = measured(run, "excite")
    assert all(after > before for before, after in zip(found.noise, found.reached, strict=True))
    assert measured(run, "excite") == found


def test_one_image_is_enough(monkeypatch):
    """No channel varies, and there is no warning about it."""
    monkeypatch.setattr(excite, "STEPS", 2)
    run = opened("vit_digits", VIT)
    assert measured(run, "excite", images_for(run, 1)).channels
