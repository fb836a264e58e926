"""Order costs: measured on an order-sensitive model, they rank orders that were never measured."""

import copy
import itertools
import random

import msgspec
import numpy as np
import pytest
import torch

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle
from ls_edge.core.order_costs import VERSION, Fit, Measured, OrderCosts, read_order_costs
from ls_edge.evaluation.orders import spearman
from ls_edge.export.calibration import Samples, read_calibration
from ls_edge.export.order_costs import (
    TRACKS,
    coefficients,
    draw_orders,
    features_of,
    measure_order_costs,
    ranking_warnings,
    ridge,
)
from ls_edge.export.settings import ExportSettings
from ls_edge.export.targets import PartsView
from ls_edge.export.writer import export_run
from ls_edge.training.models.small_models import build
from ls_edge.training.runs.checkpoint import load_run
from tests.order_costs import cost

BLOCKS = 6


@pytest.fixture(scope="module")
def calibration(trained):
    return read_calibration("digits", trained.record.image, trained.record.classes, 400)


@pytest.fixture(scope="module")
def costs(trained, calibration):
    return measure_order_costs(PartsView(trained.view), calibration.fit, "digits", orders=160)


def loss_of(view, samples, order):
    with torch.no_grad():
        logits = view(torch.from_numpy(samples.images), order)
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(samples.labels), reduction="none")
    return float(losses.clamp(max=2 * np.log(10)).mean())


@pytest.mark.release
def test_the_model_is_sensitive_to_its_order(calibration, costs):
    assert costs.trained.top1 > 0.85
    assert costs.random.top1 < costs.trained.top1 - 0.2
    assert costs.random.loss > costs.trained.loss + 0.5
    assert costs.images == len(calibration.fit)


def test_random_order_is_the_mean_of_all_uniform_draws():
    """In narrow bands, many of them are also drawn as an order near the trained one, or again."""
    view, bands = build("vit_digits", {"depth": 4}).eval(), Bands.from_json("0/1-2/3")
    generator = np.random.default_rng(0)
    images = generator.normal(size=(32, 3, 16, 16)).astype(np.float32)
    samples = Samples(images, generator.integers(0, 10, 32))
    found = measure_order_costs(PartsView(view, bands=bands), samples, "noise", orders=24)
    drawn = [item.order for item, kind in draw_orders(bands, 24) if kind == "uniform"]
    assert len(set(drawn)) == 2
    assert found.random.loss == pytest.approx(np.mean([loss_of(view, samples, order) for order in drawn]), rel=1e-6)


@pytest.mark.release
def test_estimates_rank_orders_of_other_images(trained, calibration, costs):
    orders = Bands(BLOCKS).random_orders(40, seed=99)
    measured = np.array([loss_of(trained.view, calibration.held_out, order) for order in orders])
    estimated = np.array([cost(costs, order) for order in orders])
    assert spearman(estimated, measured) > 0.5
    assert costs.fit.spearman > 0.5
    best = estimated.argsort()[:10]
    assert measured[best].mean() < measured.mean() - 0.1


@pytest.mark.release
def test_costs_that_rank_no_better_than_chance_give_a_warning(make_run, calibration, costs, tmp_path):
    assert ranking_warnings(costs) == []

    def nothing(view):  # blocks that add nothing, so that no order costs anything
        for block in view.blocks:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()

    run = load_run(make_run(tmp_path / "run", change=nothing, depth=BLOCKS))
    orders, tracks = ranking_warnings(
        measure_order_costs(PartsView(run.view), calibration.fit, "digits", orders=144, images=32)
    )
    assert "held-out orders by 0.00 (1 is perfect, 0 is chance), so the policy quality" in orders
    assert "held-out arrangements with tracks by 0.00" in tracks
    assert "policy parallel" in tracks
    measured = measure_order_costs(PartsView(run.view), calibration.fit, "digits", orders=12, images=32)
    few = ranking_warnings(measured)
    assert few[0].startswith("order costs: only 2 orders were held out, too few to judge how well the estimates rank")
    one = msgspec.structs.replace(measured, fit=msgspec.structs.replace(measured.fit, orders=1))
    assert ranking_warnings(one)[0].startswith("order costs: only 1 order was held out")
    settings = ExportSettings(cost_orders=12)
    assert export_run(run, tmp_path / "bundle", settings, calibration=calibration).warnings == tuple(few)


@pytest.mark.release
def test_estimates_rank_arrangements_with_tracks(trained, calibration, costs):
    generator = random.Random(5)
    dealt = [
        Bands(BLOCKS).random_waves(order, generator, TRACKS, interleaved=True)
        for order in Bands(BLOCKS).random_orders(40, seed=98)
    ]
    measured = np.array([loss_of(trained.view, calibration.held_out, item) for item in dealt])
    estimated = np.array([cost(costs, item) for item in dealt])
    assert spearman(estimated, measured) > 0.5
    assert costs.fit_tracks.spearman > 0.3
    assert 5 < costs.fit_tracks.orders < costs.arrangements < costs.orders / 2
    assert measured[estimated.argsort()[:10]].mean() < measured.mean() - 0.1


@pytest.mark.release
def test_estimates_rank_skipped_blocks(trained, calibration, costs):
    ones = [tuple(b for b in range(BLOCKS) if b != gone) for gone in range(BLOCKS)]
    measured = np.array([loss_of(trained.view, calibration.held_out, order) for order in ones])
    estimated = np.array([cost(costs, order) for order in ones])
    assert set(estimated.argsort()[-2:]) == set(measured.argsort()[-2:]) == {0, 1}


@pytest.mark.release
def test_blocks_that_commute_have_small_order_costs(trained, calibration):
    """A block that adds nothing commutes with all others, so the estimate charges nothing for being out of order."""
    view = copy.deepcopy(trained.view)
    for layer in (view.blocks[3].attn.proj, view.blocks[3].mlp.fc2):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    costs = measure_order_costs(PartsView(view), calibration.fit, "digits", orders=160)
    inverted = np.abs(np.array(costs.inverted))

    with_it = [inverted[min(3, other), max(3, other)] for other in range(BLOCKS) if other != 3]
    others = [inverted[pair] for pair in itertools.combinations(range(BLOCKS), 2) if 3 not in pair]
    assert np.mean(with_it) < 0.5 * np.mean(others)


@pytest.mark.release
def test_a_greedy_choice_by_cost_beats_chance(trained, calibration, costs):
    """Choose greedily, as a policy does, while some blocks arrive late."""
    generator, gained = random.Random(0), []
    for _ in range(12):
        late = set(generator.sample(range(BLOCKS), 2))
        drawn = [b for b in generator.sample(range(BLOCKS), BLOCKS) if b not in late]
        chosen = []
        while len(chosen) < len(drawn):
            rest = set(drawn) - set(chosen)
            chosen.append(min(rest, key=lambda b: cost(costs, [*chosen, b, *sorted(rest - {b}), *sorted(late)])))
        tail = sorted(late)
        by_chance = loss_of(trained.view, calibration.held_out, [*drawn, *tail])
        gained.append(by_chance - loss_of(trained.view, calibration.held_out, [*chosen, *tail]))
    assert np.mean(gained) > 0.1


@pytest.mark.release
def test_the_same_images_give_the_same_costs(trained, calibration, costs):
    again = measure_order_costs(PartsView(trained.view), calibration.fit, "digits", orders=160)
    assert again == costs


@pytest.mark.release
def test_without_labels_the_trained_answers_are_the_measure(trained, calibration):
    bare = Samples(calibration.fit.images, None)
    found = measure_order_costs(PartsView(trained.view), bare, "digits", orders=60, images=32)
    assert found.trained.top1 is None
    assert found.random.loss > found.trained.loss


@pytest.mark.release
def test_costs_are_measured_by_parts_of_several_blocks(trained, calibration):
    found = measure_order_costs(PartsView(trained.view, 2), calibration.fit, "digits", orders=24, images=40)
    assert cost(found, [0, 1, 2]) == 0


def test_orders_are_of_all_kinds_and_always_the_same():
    orders = draw_orders(Bands(8), 48)
    assert orders == draw_orders(Bands(8), 48)
    kinds = [kind for _, kind in orders]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "uniform": 8, "near": 8, "fewer": 8, "near fewer": 8, "near tracks": 8, "near fewer tracks": 4, "tracks": 4,
    }  # fmt: skip
    assert {len(item.order) for item, _ in orders} == {6, 7, 8}
    assert all(item.is_plain != kind.endswith("tracks") for item, kind in orders)


@pytest.mark.parametrize("bands", ["0/1-6/7", "0-1/2-7", "0/1/2/3/4/5/6/7"])
def test_all_orders_are_within_the_bands(bands):
    bands = Bands.from_json(bands)
    drawn = draw_orders(bands, 96)
    for item, _ in drawn:
        bands.check(item)
    plain = {item.order for item, kind in drawn if kind == "uniform"}
    assert (len(plain) == 1) == (bands.num_orders == 1)
    assert any(not item.is_plain for item, _ in drawn) == (bands.num_orders > 1)


@pytest.mark.release
def test_costs_in_bands_are_measured_in_bands(trained, calibration):
    view = PartsView(trained.view, bands=Bands.from_json("0/1-4/5"))
    found = measure_order_costs(view, calibration.fit, "digits", orders=48, images=32)
    slot, inverted = np.array(found.slot), np.array(found.inverted)
    assert not inverted[0].any()  # nothing runs ahead of block 0
    assert not inverted[:, 5].any()  # nothing runs behind block 5
    assert not slot[0].any()
    assert slot[2, [1, 3, 4]].any()


@pytest.mark.release
@pytest.mark.parametrize("count", [1, 4, 9])
def test_few_orders_are_enough(trained, calibration, count):
    found = measure_order_costs(PartsView(trained.view), calibration.fit, "digits", orders=count, images=32)
    read = read_order_costs(msgspec.json.decode(msgspec.json.encode(found)), BLOCKS)
    assert read == found
    assert (found.beside is None) == (count == 1)


@pytest.mark.release
def test_each_order_runs_on_a_part_of_the_images_and_all_parts_count(trained, calibration):
    """Costs cover all images, although no order runs on more than 32 of them."""
    one, other = (Samples(calibration.fit.images[a:b], calibration.fit.labels[a:b]) for a, b in ((0, 32), (32, 64)))
    both = Samples(calibration.fit.images[:64], calibration.fit.labels[:64])
    found = [
        measure_order_costs(PartsView(trained.view), part, "digits", orders=40, images=32).trained.loss
        for part in (one, other, both)
    ]
    assert found[2] == pytest.approx((found[0] + found[1]) / 2)


def test_a_linear_model_is_recovered():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=3 * 36 + 6)
    features = np.stack([features_of(order, 6) for order, _ in draw_orders(Bands(6), 400)])
    found = ridge(features, features @ truth + 0.01 * generator.normal(size=400))
    fresh = np.stack([features_of(order, 6) for order in Bands(6).random_orders(50, seed=5)])
    assert spearman(fresh @ found, fresh @ truth) > 0.99
    drawn = random.Random(1)
    bands = Bands(6)
    waves = [bands.random_waves(order, drawn, TRACKS, interleaved=True) for order in bands.random_orders(50, seed=6)]
    dealt = np.stack([features_of(item, 6) for item in waves])
    assert spearman(dealt @ found, dealt @ truth) > 0.98


@pytest.mark.parametrize("count", [100, 120, 140])
def test_noise_is_not_fitted_with_as_many_values_as_coefficients(count):
    """The shrinkage has to be strong; a poor estimate of the error would choose the weakest."""
    generator = np.random.default_rng(count)
    features = generator.normal(size=(count, 120))
    found = ridge(features, generator.normal(size=count))
    assert np.linalg.norm(found) < 1


def test_noise_does_not_make_an_inversion_look_better_than_the_trained_order():
    """With shrinkage to zero, 9 of the 66 pairs came out below zero."""
    generator = np.random.default_rng(1)
    drawn = [item for item, _ in draw_orders(Bands(12), 96)]
    features = np.stack([features_of(item, 12) for item in drawn])
    truth = np.concatenate([np.zeros(144), np.full(144, 0.02), np.zeros(144), np.full(12, 0.05)])
    values = features @ truth + 0.4 * generator.normal(size=len(drawn))
    pairs = coefficients(features, values, 12)[144:288].reshape(12, 12)
    assert (pairs[np.triu_indices(12, 1)] > 0).all()
    assert not pairs[np.tril_indices(12)].any()


def test_features_are_the_terms_of_the_estimate():
    generator = np.random.default_rng(2)
    up = np.triu(np.ones((5, 5)), 1)
    slot, inverted, beside = generator.normal(size=(3, 5, 5)) * [1 - np.eye(5), up, up]
    skip = generator.normal(size=5)
    entries = np.concatenate([slot.ravel(), inverted.ravel(), beside.ravel(), skip])
    zero = Measured(0.0, None)
    rows = [tuple(map(tuple, table.tolist())) for table in (slot, inverted, beside)]
    costs = OrderCosts(
        VERSION, "", 1, 1, zero, zero, rows[0], rows[1], tuple(skip.tolist()), Fit(0, 0.0, 0.0), beside=rows[2]
    )
    assert cost(costs, Arrangement.plain(range(5))) == 0
    for item, _ in draw_orders(Bands(5), 60):
        assert features_of(item, 5) @ entries == pytest.approx(cost(costs, item))


@pytest.mark.release
def test_the_manifest_has_the_costs_and_int8_keeps_the_accuracy(trained, calibration, tmp_path):
    settings = ExportSettings(precision="int8", cost_orders=40)
    manifest = export_run(trained, tmp_path / "bundle", settings, calibration=calibration).bundle.manifest
    costs = read_order_costs(Bundle.open(tmp_path / "bundle").manifest.order_costs, 6)
    assert costs.source == "digits"
    top1 = manifest.verified["top1"]
    assert top1["images"] == len(calibration.held_out)
    assert top1["bundle"] >= top1["pytorch"] - 0.01
    assert manifest.verified["images"] == "digits"
    assert manifest.verified["min_cosine"] >= 0.999
