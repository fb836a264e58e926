"""The policy ``quality``: what it chooses, and that it wins accuracy back where holders come and go."""

import random

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.order_costs import VERSION, Fit, Measured, OrderCosts
from ls_edge.runtime.protocol.messages import Itinerary, ReturnReason
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.policy import RunHere, SendTo, Wait
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.source.source import Source
from tests.order_costs import cost
from tests.runtime.routing.driver import Candidate

BLOCKS = 6


def choose(itinerary, *situation, **more):
    return policy_of(itinerary.policy).next_step(itinerary, *situation, **more)


def costs_of(slot=None, inverted=None):
    """Costs that grow with the distance of a block from its trained slot, unless told otherwise."""
    far = tuple(tuple(0.1 * abs(b - s) for s in range(BLOCKS)) for b in range(BLOCKS))
    pairs = tuple(tuple(0.2 if a < b else 0.0 for b in range(BLOCKS)) for a in range(BLOCKS))
    measured = Measured(0.1, 0.9)
    return OrderCosts(
        VERSION, "test", 1, 1, measured, measured, slot or far, inverted or pairs, (0.5,) * BLOCKS, Fit(1, 1.0, 0.0)
    )


def candidate(name, blocks, credit=4, wait_us=0, link_us=1000, block_us=5000):
    return Candidate(name, frozenset(blocks), frozenset(), credit, wait_us, block_us, link_us)


def itinerary(remaining=range(BLOCKS), waves=(), latency_weight=1.0):
    return Itinerary("laptop", "quality", tuple(remaining), 2, waves=waves, latency_weight=latency_weight)


def own(blocks=(), wait_us=0, costs=None):
    return LocalNode(frozenset(blocks), wait_us, 5000, Model(costs=costs or costs_of()))


def test_the_block_with_the_least_loss_is_sent_for_even_where_another_runs_here():
    choice = choose(itinerary(), own({3, 4}), [candidate("a", {0}), candidate("b", {5})], patient=True)
    assert choice == SendTo("a")


@pytest.mark.parametrize("seed", range(5))
def test_the_trained_order_is_chosen_where_all_blocks_are_reachable(seed):
    """However little it costs to run some of the blocks late."""
    rng = random.Random(seed)
    pairs = tuple(tuple(rng.uniform(0.001, 0.2) if a < b else 0.0 for b in range(BLOCKS)) for a in range(BLOCKS))
    costs = costs_of(slot=((0.0,) * BLOCKS,) * BLOCKS, inverted=pairs)
    for done in range(BLOCKS):
        asked = itinerary(range(done, BLOCKS), waves=((((0, "x"),),),) * done, latency_weight=0.0)
        assert choose(asked, own(range(BLOCKS), costs=costs), [], patient=True) == RunHere(done)


def test_time_is_traded_at_the_price():
    slow = [candidate("a", {0}, link_us=2_000_000)]
    assert choose(itinerary(latency_weight=0.0), own({1}), slow, patient=True) == SendTo("a")
    assert choose(itinerary(latency_weight=10.0), own({1}), slow, patient=True) == RunHere(1)


def test_it_waits_for_a_credit_only_where_that_is_worth_it():
    busy = [candidate("a", {0}, credit=0)]
    assert choose(itinerary(latency_weight=0.1), own({5}), busy, patient=True) == Wait()
    assert choose(itinerary(latency_weight=100.0), own({5}), busy, patient=True) == RunHere(5)
    assert choose(itinerary(latency_weight=0.1), own({5}), busy, patient=False) == RunHere(5)


def test_nobody_reachable_goes_back():
    assert choose(itinerary(), own(), [], patient=True) == ReturnReason.UNREACHABLE


def test_without_costs_it_is_nearest():
    here = LocalNode(frozenset({2}), 0, 5000)
    assert choose(itinerary(), here, [candidate("a", {1})], patient=True) == SendTo("a")


def test_on_random_reachable_subsets_it_costs_less_than_nearest_and_random():
    """Costs that grow with the distance, unevenly, as measured ones do; a random half is reachable in each step."""
    rng = random.Random(3)
    weight = [rng.uniform(0.2, 1.0) for _ in range(BLOCKS)]
    slot = tuple(
        tuple(weight[b] * abs(b - s) / BLOCKS + 0.1 * rng.random() * (b != s) for s in range(BLOCKS))
        for b in range(BLOCKS)
    )
    pairs = tuple(tuple(0.3 * rng.random() if a < b else 0.0 for b in range(BLOCKS)) for a in range(BLOCKS))
    costs = costs_of(slot, pairs)

    def walk(policy, seed):
        reach = random.Random(seed)
        remaining, done = list(range(BLOCKS)), []
        while remaining:
            there = set(reach.sample(remaining, max(1, len(remaining) // 2)))
            waves = (((*((b, "x") for b in done),),),) if done else ()
            asked = Itinerary("laptop", policy, tuple(remaining), 0, waves=waves, latency_weight=0.0)
            choice = choose(asked, LocalNode(frozenset(there), 0, 1, Model(costs=costs)), [], patient=True)
            assert isinstance(choice, RunHere)
            block = choice.block if policy != "any" else reach.choice(sorted(there))
            remaining.remove(block)
            done.append(block)
        return cost(costs, done)

    seeds = range(300)
    quality = sum(walk("quality", s) for s in seeds)
    nearest = sum(walk("nearest", s) for s in seeds)
    drawn = sum(walk("any", s) for s in seeds)
    assert quality < nearest < drawn
    assert quality <= 0.7 * drawn


def test_a_bundle_without_costs_is_refused(tiny_bundle, tmp_path):
    path = tmp_path / "peers.yaml"
    path.write_text("peers: [{name: a, address: 'tcp://127.0.0.1:5999', blocks: '0-5'}]")
    with pytest.raises(UsageError, match="has no order_costs"):
        Source.open(path, tiny_bundle, policy="quality")
