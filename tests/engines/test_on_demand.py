"""Parts that are opened when they are used: the same answers, in less memory."""

import numpy as np
import pytest

from ls_edge.device import hardware
from ls_edge.engines.on_demand import KEPT_BYTES, OnDemand
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import noise_images


@pytest.mark.parametrize("free_gib", [100.0, 1.0])  # half of which may be taken
def test_the_oldest_values_stay_and_the_newest_makes_room(monkeypatch, free_gib):
    monkeypatch.setattr(hardware, "memory_gib", lambda: (100.0, free_gib))
    size, opened = min(KEPT_BYTES, free_gib * 2**29) // 2, []
    parts = OnDemand(lambda part: opened.append(part) or f"part {part}", lambda _part: size)
    for _ in range(2):
        assert [parts[part] for part in range(4)] == [f"part {part}" for part in range(4)]
    assert opened == [0, 1, 2, 3, 1, 2, 3]
    assert list(parts) == [0, 3]


def test_blocks_with_one_owner_share_a_value():
    parts = OnDemand(str, lambda _part: 1, owners=(0, 0, 2))
    assert [parts[part] for part in (0, 1, 2, 65535)] == ["0", "0", "2", "65535"]


def test_a_value_that_is_too_large_is_opened_alone():
    parts = OnDemand(str, lambda part: part * KEPT_BYTES)
    assert [parts[part] for part in (0, 2)] == ["0", "2"]
    assert len(parts) == 1


def test_a_chain_on_demand_gives_the_same_answers(bundle):
    images = noise_images(bundle, 2)
    with Pipeline.on_demand(bundle) as chain, Pipeline.open(bundle, threads=1, provider="cpu") as whole:
        np.testing.assert_array_equal(chain.forward(images, (5, 0, 3)), whole.forward(images, (5, 0, 3)))
        np.testing.assert_array_equal(chain.block(2, chain.stem(images), 4), whole.block(2, whole.stem(images), 4))
