import numpy as np
import pytest

from ls_edge.analysis.blocks.norms import BINS
from ls_edge.core.bands import Bands
from tests.analysis.models import Layers, analyzed, drawn


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_norms_match_images_run_one_by_one(pool):
    model = Layers(mark=0.3)
    images, _ = drawn(model, 120)
    norms = {}
    for number, image in enumerate(images):
        steps, _ = model.run(image[None], Bands(4).random_order(0, number))
        for block, slot, before, after in steps:
            added = (after - before)[0]
            vector = added.mean(axis=0) if pool == "mean" else added[0]
            norms.setdefault(block, []).append((slot, np.linalg.norm(vector)))
    found = analyzed(model, "norms", count=120, pool=pool).norms
    for block in range(4):
        largest = max(norm for _, norm in norms[block])
        for slot in range(4):
            values = [norm / largest for at, norm in norms[block] if at == slot]
            assert found.mean[block][slot] == pytest.approx(np.mean(values))
            shares = np.histogram(values, BINS, (0, 1))[0] / len(values)
            assert found.shares[block][slot] == pytest.approx(shares)


def test_a_fixed_order_has_nothing_to_compare():
    found = analyzed(Layers(), "norms", bands=Bands.ladder(4)[0])
    assert found.finding("norms") == "Every block has a single slot."
