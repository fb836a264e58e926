"""Outputs of blocks by slot, and pairs of blocks, against plain computations."""

import msgspec
import numpy as np
import pytest

from ls_edge.analysis import analyze
from ls_edge.analysis.blocks import slot_outputs
from ls_edge.analysis.blocks.norms import BINS
from ls_edge.analysis.blocks.pairs import Pairs
from ls_edge.analysis.plan import AnalysisPlan, AnalysisSettings
from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError

DEPTH, DIM, TOKENS = 4, 6, 3


class Layers:
    """Block i adds ``tanh(x W_i)``, and ``mark`` in the direction of its slot; blocks of zeros add only that."""

    num_blocks = DEPTH

    def __init__(self, mark=0.0, zeroed=(), seed=0):
        rng = np.random.default_rng(seed)
        self.weights = rng.standard_normal((DEPTH, DIM, DIM))
        self.weights[list(zeroed)] = 0
        self.mark, self.ran = mark, []

    def stem(self, images):
        return images

    def block(self, index, tokens, slot):
        self.ran.append((index, slot, len(tokens)))
        return tokens + np.tanh(tokens @ self.weights[index]) + self.mark * np.eye(DIM)[slot]

    def head(self, tokens):
        return tokens.mean(axis=1)[:, :3]

    def array_of(self, tokens):
        return tokens


def drawn(count):
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, TOKENS, DIM)), rng.integers(0, 3, count)


def found(model, count=120, kinds=("slots", "norms", "pairs"), bands=None, **fields):
    plan = AnalysisPlan(AnalysisSettings(what=kinds, orders=1, **fields), bands or Bands(DEPTH))
    images, labels = drawn(count)
    return analyze(model, [(images[at : at + 50], labels[at : at + 50]) for at in range(0, count, 50)], plan)


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_accuracy_and_norms_are_those_of_images_run_one_by_one(pool):
    model, (images, labels) = Layers(mark=0.3), drawn(120)
    right, norms = {}, {}
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        order, tokens, before = Bands(DEPTH).random_order(0, number), image[None], None
        for slot, block in enumerate(order):
            before, tokens = tokens, model.block(block, tokens, slot)
            added = (tokens - before)[0]
            vector = added.mean(axis=0) if pool == "mean" else added[0]
            norms.setdefault(block, []).append((slot, np.linalg.norm(vector)))
        for slot, block in enumerate(order):
            right.setdefault((block, slot), []).append(model.head(tokens).argmax() == label)
    result = found(model, pool=pool)
    for block in range(DEPTH):
        largest = max(norm for _, norm in norms[block])
        for slot in range(DEPTH):
            assert result.slots.accuracy[block][slot] == pytest.approx(np.mean(right[block, slot]))
            assert result.slots.images[block][slot] == len(right[block, slot])
            values = [norm / largest for at, norm in norms[block] if at == slot]
            assert result.norms.mean[block][slot] == pytest.approx(np.mean(values))
            shares = result.norms.shares[block][slot]
            assert shares == pytest.approx(np.histogram(values, BINS, (0, 1))[0] / len(values))
            assert sum(shares) == pytest.approx(1)


def test_blocks_stay_in_their_bands_and_kept_outputs_are_bounded(monkeypatch):
    monkeypatch.setattr(slot_outputs, "MOST_IMAGES", 30)
    model = Layers()
    result = found(model, bands=Bands.from_json("0/1-3"))
    assert all(slot == 0 for block, slot, _ in model.ran if block == 0)
    assert result.slots.accuracy[0][1:] == [None] * 3
    assert sum(result.slots.images[1]) == 120
    assert result.norms.images == 30
    assert result.pairs.difference[0] == [None] * DEPTH
    assert "single slot" in found(model, bands=Bands.fixed(DEPTH)).finding("norms")


def test_norms_compare_only_blocks_that_ran_in_their_own_slot():
    result = found(Layers())
    own = [
        [None if slot == block else value for slot, value in enumerate(row)]
        for block, row in enumerate(result.norms.mean)
    ]
    result = msgspec.structs.replace(result, norms=msgspec.structs.replace(result.norms, mean=own))
    assert result.finding("norms").endswith("; no random order ran a block in its own slot.")


def test_a_block_commutes_with_one_that_adds_nothing_and_not_with_others():
    pairs = found(Layers(zeroed=[2])).pairs
    model, (images, _) = Layers(zeroed=[2]), drawn(120)
    for one in range(DEPTH):
        for other in range(DEPTH):
            value = pairs.difference[one][other]
            if other <= one:
                assert value is None
            elif 2 in (one, other):
                assert value == pytest.approx(0, abs=1e-12)
            else:
                assert value > 0.05
    tokens = images
    for block in range(1):
        tokens = model.block(block, tokens, block)
    trained = model.block(3, model.block(1, tokens, 1), 2)
    swapped = model.block(1, model.block(3, tokens, 1), 2)
    apart = np.linalg.norm(trained - swapped, axis=2) / np.linalg.norm(trained - tokens, axis=2)
    assert pairs.difference[1][3] == pytest.approx(apart.mean())


def test_the_rank_correlation_with_order_costs():
    difference = [[None, 0.1, 0.3], [None, None, 0.2], [None, None, None]]
    assert Pairs(difference, 9).rank_correlation is None
    assert Pairs(difference, 9, [[0, 1, 5], [0, 0, 2], [0, 0, 0]]).rank_correlation == pytest.approx(1)
    assert Pairs(difference, 9, [[0, 5, 1], [0, 0, 2], [0, 0, 0]]).rank_correlation == pytest.approx(-1)
    assert Pairs(difference, 9, [[0, 2, 2], [0, 0, 2], [0, 0, 0]]).rank_correlation is None


def test_a_probe_reads_slots_that_leave_a_mark_and_guesses_exchanged_ones():
    pytest.importorskip("sklearn")
    marked = found(Layers(mark=6.0), 240, ("probe",))
    assert min(marked.probe.accuracy) > 0.9
    assert marked.probe.shuffled == pytest.approx([0.25] * DEPTH, abs=0.12)
    assert marked.probe.chance == [0.25] * DEPTH
    assert marked.finding("probe").startswith("A linear probe reads the slot of ")
    few = found(Layers(), 8, ("probe",))
    assert few.probe is None
    assert "too few images" in few.reasons["probe"]


@pytest.mark.slow  # numba compiles for half a minute, on a loaded machine for minutes
@pytest.mark.timeout(900)
@pytest.mark.leaks_ok  # tqdm's monitor lives on
def test_a_map_tells_slots_that_leave_a_mark_apart():
    pytest.importorskip("umap", exc_type=ImportError)
    marked = found(Layers(mark=12.0), 120, ("umap",), block=1)
    own, logits, every = marked.umap
    assert (own.of, logits.of) == ("tokens after block 1", "logits after block 1")
    assert set(own.blocks) == {1}
    assert set(every.blocks) == set(range(DEPTH))
    assert own.neighbors > 0.9
    assert len(own.points) == 120
    assert found(Layers(mark=12.0), 120, ("umap",), block=1).umap == marked.umap
    assert found(Layers(), 120, ("umap",), block=1).umap[0].neighbors < 0.6


def test_a_block_that_the_model_lacks():
    with pytest.raises(UsageError, match="--block 4: the model has blocks 0 to 3"):
        found(Layers(), 8, ("slots",), block=4)
