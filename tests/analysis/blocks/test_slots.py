import numpy as np
import pytest

from ls_edge.core.bands import Bands
from tests.analysis.models import Layers, analyzed, drawn


def test_accuracies_match_images_run_one_by_one():
    model = Layers(mark=0.3)
    images, labels = drawn(model, 120)
    right = {}
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        order = Bands(4).random_order(0, number)
        _, logits = model.run(image[None], order)
        for slot, block in enumerate(order):
            right.setdefault((block, slot), []).append(logits.argmax() == label)
    found = analyzed(model, "slots", count=120).slots
    for block in range(4):
        assert found.accuracy[block] == [pytest.approx(np.mean(right[block, slot])) for slot in range(4)]
        assert found.images[block] == [len(right[block, slot]) for slot in range(4)]
