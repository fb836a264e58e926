import pytest

from tests.analysis.models import Layers, analyzed

pytest.importorskip("sklearn")


def test_a_probe_reads_slots_that_leave_a_mark_and_guesses_shuffled_ones():
    found = analyzed(Layers(mark=6.0), "probe", count=240)
    assert min(found.probe.accuracy) > 0.9
    assert found.probe.shuffled == pytest.approx([0.25] * 4, abs=0.12)
    assert found.probe.chance == [0.25] * 4
    assert found.finding("probe").startswith("A linear probe reads the slot of ")


def test_too_few_images_are_a_reason():
    found = analyzed(Layers(), "probe", count=8)
    assert found.probe is None
    assert "too few images" in found.reasons["probe"]
