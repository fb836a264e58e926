import msgspec
import numpy as np
import pytest

from ls_edge.analysis.blocks import slot_outputs
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


def test_the_number_of_kept_outputs_is_bounded(monkeypatch):
    monkeypatch.setattr(slot_outputs, "MOST_IMAGES", 30)
    assert analyzed(Layers(), "norms", count=120).norms.images == 30


def test_a_fixed_order_has_nothing_to_compare():
    found = analyzed(Layers(), "norms", bands=Bands.fixed(4))
    assert found.finding("norms") == "Every block has a single slot."


def test_a_block_that_never_ran_in_its_own_slot_is_not_compared():
    found = analyzed(Layers(), "norms", count=120)
    elsewhere = [
        [None if slot == block else value for slot, value in enumerate(row)]
        for block, row in enumerate(found.norms.mean)
    ]
    found = msgspec.structs.replace(found, norms=msgspec.structs.replace(found.norms, mean=elsewhere))
    assert found.finding("norms").endswith("; no random order ran a block in its own slot.")
