"""Findings are tests: with random labels few claim an effect, and a large effect is found with its size."""

import numpy as np
import pytest

from ls_edge.analysis.blocks.importance import BlockImportance, Changes, Importance, Score
from ls_edge.analysis.blocks.probe import PROBE, Probe
from ls_edge.analysis.blocks.slots import SLOTS, SlotAccuracy

TRIES = 300
MOST = TRIES * 0.05 + 2 * (TRIES * 0.05 * 0.95) ** 0.5
BLOCKS = 8


def claims(text):
    return not text.startswith("Cannot tell")


def slots_of(rng, images, shares):
    """Return slot accuracies of images in random orders; ``shares`` are the true accuracies, by block and slot."""
    counts = rng.multinomial(images, [1 / BLOCKS] * BLOCKS, size=BLOCKS)
    right = rng.binomial(counts, shares)
    return SlotAccuracy((right / np.maximum(counts, 1)).tolist(), counts.tolist())


def importance_of(rng, images, costs):
    """Return the importance of blocks that change a fifth of the answers, and cost this accuracy."""
    blocks = []
    for block, cost in enumerate(costs):
        both = [
            Changes(rng.binomial(images, 0.1 + cost / 2), rng.binomial(images, 0.1 - cost / 2), images)
            for _ in range(2)
        ]
        blocks.append(BlockImportance(block, 0.0, Score(0.5, 1.0), 0, Score(0.5, 1.0), *both))
    return Importance(Score(0.5, 1.0), blocks)


@pytest.mark.parametrize("images", [150, 359, 2000])
def test_chance_is_seldom_called_an_effect(images):
    rng = np.random.default_rng(images)
    found = {
        "slots": [SLOTS.finding(slots_of(rng, images, 0.1)) for _ in range(TRIES)],
        "costs": [importance_of(rng, images, [0] * BLOCKS).costs for _ in range(TRIES)],
        "moves": [importance_of(rng, images, [0] * BLOCKS).moves for _ in range(TRIES)],
        "probe": [
            PROBE.finding(Probe(*(rng.binomial(images, 1 / 8, (2, 8)) / images).tolist(), [1 / 8] * 8, images))
            for _ in range(TRIES)
        ],
    }
    counts = {name: sum(claims(text[0].upper() + text[1:]) for text in texts) for name, texts in found.items()}
    assert all(count <= MOST for count in counts.values()), counts


def test_a_large_effect_is_found_with_an_interval_that_holds_it():
    rng = np.random.default_rng(0)
    shares = np.full((BLOCKS, BLOCKS), 0.8)
    shares[3, 7] = 0.274
    text = SLOTS.finding(slots_of(rng, 359, shares))
    assert text.startswith("The slot of block 3 matters: ")
    assert "in slot 7, a difference of" in text
    low, high = map(float, text.partition("95 % CI ")[2].partition(")")[0].split(" to "))
    assert low < 52.6 < high
    costs = importance_of(rng, 359, [0.2, *[0] * 7]).costs
    assert costs.startswith("leaving out block 0 costs most: ")
    low, high = map(float, costs.partition("95 % CI ")[2].partition(")")[0].split(" to "))
    assert low < 20 < high
    accuracy, shuffled = [0.9] + [0.13] * 7, [0.12] * 8
    assert "outputs of block 0" in PROBE.finding(Probe(accuracy, shuffled, [1 / 8] * 8, 359))
