"""Order costs: measured on a model that minds its order, they tell orders apart that were never measured."""

import random

import numpy as np
import pytest
import torch

from ls_edge.arrangement import random_orders
from ls_edge.bundle import Bundle
from ls_edge.costs import read_order_costs
from ls_edge.export.calibration import Samples, read_calibration
from ls_edge.export.order_costs import draw_orders, features_of, measure_order_costs, ridge, spearman
from ls_edge.export.split import PartsView
from ls_edge.export.writer import ExportSettings, export_run

BLOCKS = 6


@pytest.fixture(scope="module")
def calibration(trained):
    return read_calibration("digits", trained.image, trained.classes, 400)


@pytest.fixture(scope="module")
def costs(trained, calibration):
    return measure_order_costs(PartsView(trained.view), calibration.fit, "digits", orders=160)


def loss_of(view, samples, order):
    with torch.no_grad():
        logits = view(torch.from_numpy(samples.images), order)
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(samples.labels), reduction="none")
    return float(losses.clamp(max=2 * np.log(10)).mean())


def test_the_model_minds_its_order(costs):
    assert costs.trained.top1 > 0.85
    assert costs.random.top1 < costs.trained.top1 - 0.2
    assert costs.random.loss > costs.trained.loss + 0.5
    assert costs.images == 64


def test_estimates_rank_orders_of_other_images(trained, calibration, costs):
    orders = random_orders(BLOCKS, 40, seed=99)
    measured = np.array([loss_of(trained.view, calibration.held_out, order) for order in orders])
    estimated = np.array([costs.cost(order) for order in orders])
    assert spearman(estimated, measured) > 0.5
    assert costs.fit.spearman > 0.5
    best = estimated.argsort()[:10]
    assert measured[best].mean() < measured.mean() - 0.1


def test_estimates_rank_what_is_skipped(trained, calibration, costs):
    ones = [tuple(b for b in range(BLOCKS) if b != gone) for gone in range(BLOCKS)]
    measured = np.array([loss_of(trained.view, calibration.held_out, order) for order in ones])
    estimated = np.array([costs.cost(order) for order in ones])
    assert measured[estimated.argmin()] < np.median(measured)


def test_greedy_choice_by_next_cost_beats_chance(trained, calibration, costs):
    """The use that a policy makes of it: half of the blocks come late, the rest is up to the estimate."""
    generator, gained = random.Random(0), []
    for _ in range(12):
        late = set(generator.sample(range(BLOCKS), 2))
        drawn = [b for b in generator.sample(range(BLOCKS), BLOCKS) if b not in late]
        chosen = []
        while len(chosen) < len(drawn):
            chosen.append(min(set(drawn) - set(chosen), key=lambda b: costs.next_cost(chosen, b)))
        tail = sorted(late)
        by_chance = loss_of(trained.view, calibration.held_out, [*drawn, *tail])
        gained.append(by_chance - loss_of(trained.view, calibration.held_out, [*chosen, *tail]))
    assert np.mean(gained) > 0.1


def test_the_same_images_give_the_same_costs(trained, calibration, costs):
    again = measure_order_costs(PartsView(trained.view), calibration.fit, "digits", orders=160)
    assert again == costs


def test_without_labels_the_trained_answers_are_the_measure(trained, calibration):
    bare = Samples(calibration.fit.images, None)
    found = measure_order_costs(PartsView(trained.view), bare, "digits", orders=60, images=32)
    assert found.trained.top1 is None
    assert found.random.loss > found.trained.loss


def test_by_parts_of_several_blocks(trained, calibration):
    told = []
    found = measure_order_costs(
        PartsView(trained.view, 2), calibration.fit, "digits", orders=24, images=40, on_batch=told.append
    )
    assert found.blocks == 3
    assert found.cost([0, 1, 2]) == 0
    assert told == [32, 40]


def test_orders_are_of_all_kinds_and_always_the_same():
    orders = draw_orders(8, 40)
    assert orders == draw_orders(8, 40)
    kinds = [kind for _, kind in orders]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"uniform": 10, "near": 20, "fewer": 10}
    assert {len(order) for order, _ in orders} == {6, 7, 8}


def test_a_linear_truth_is_found():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=2 * 36 + 6)
    features = np.stack([features_of(order, 6) for order, _ in draw_orders(6, 400)])
    found = ridge(features, features @ truth + 0.01 * generator.normal(size=400))
    fresh = np.stack([features_of(order, 6) for order in random_orders(6, 50, seed=5)])
    assert spearman(fresh @ found, fresh @ truth) > 0.99


def test_the_manifest_has_them_and_int8_keeps_the_accuracy(trained, calibration, tmp_path):
    settings = ExportSettings("int8", cost_orders=40)
    manifest = export_run(trained, tmp_path / "bundle", settings, calibration=calibration).bundle.manifest
    costs = read_order_costs(Bundle.open(tmp_path / "bundle").manifest.order_costs, 6)
    assert costs.source == "digits"
    top1 = manifest.verified["top1"]
    assert top1["images"] == len(calibration.held_out)
    assert top1["bundle"] >= top1["pytorch"] - 0.01
    assert manifest.verified["images"] == "digits"
    assert manifest.verified["min_cosine"] >= 0.999
