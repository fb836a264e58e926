"""Sites of a fleet: their devices and placements."""

import dataclasses

import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.evaluation.simulation_summary import WHOLE, FleetSettings
from ls_edge.runtime.fleet.simulation.sites import sites_of
from ls_edge.runtime.simulator.churn import Churn


def test_a_fleet_is_divided_into_sites_that_are_alike(make_problem):
    sites = sites_of(make_problem(2.0, 3.0), FleetSettings(devices=35, requests=100, rate=10.0))
    assert [len(site.kinds) for site in sites] == [12, 12, 11]
    assert [site.requests for site in sites] == [34, 33, 33]
    assert [site.rate for site in sites] == [3.4, 3.3, 3.3]
    assert sorted(sites[0].kinds.values()) == ["a"] * 6 + ["b"] * 6
    assert all(set(site.placement) == set(site.kinds) for site in sites)
    assert {"a", "a-2", "b", "b-6"} <= set(sites[0].kinds)
    held = [block for blocks in sites[0].placement.values() for block in blocks]
    assert all(held.count(block) >= 2 for block in range(4))
    assert [site.requests for site in sites_of(make_problem(2.0), FleetSettings(devices=32, requests=1))] == [1]
    large = dataclasses.replace(make_problem(2.0, capacity=1), num_blocks=12)
    (site,) = sites_of(large, FleetSettings(devices=23, requests=9))
    assert len(site.kinds) == 23  # two sites would have no room for the model


@pytest.mark.parametrize(
    ("settings", "replicas", "message"),
    [
        ({"devices": 1}, None, "--devices 1 is less than the number of profiles .2.; raise it"),
        ({"devices": 2}, 3, "a site of 2 devices: 3 holders of each block need as many devices, there are 2 devices"),
        ({"devices": 2}, 2, "a site of 2 devices: 4 blocks with 2 holders each are 8 copies"),
    ],
)
def test_impossible_fleets_are_refused(make_problem, settings, replicas, message):
    with pytest.raises(UsageError, match=message):
        sites_of(make_problem(2.0, 3.0, capacity=3), FleetSettings(requests=1, **settings), replicas, Churn(9.0, 1.0))


def test_blocks_have_one_holder_if_memory_has_no_room_for_two(make_problem):
    (site,) = sites_of(make_problem(2.0, 3.0, capacity=3), FleetSettings(devices=2, requests=1))
    assert site.problem.replicas == 1


def test_a_slow_source_sends_images_to_devices_with_stem_and_head(make_problem, simulate):
    for source_ms, held in ((0.1, {0, 1, 2, 3}), (50.0, {STEM, 0, 1, 2, 3, HEAD})):
        problem = make_problem(2.0, 2.0, source_ms=source_ms, visit_ms=1.0, capacity=6)
        ends = [dataclasses.replace(one, stem_ms=1.0, head_ms=0.5, ends_size=1.0) for one in problem.devices]
        problem = dataclasses.replace(problem, devices=tuple(ends), image_share=2.0, logits_share=0.1)
        (site,) = sites_of(problem, FleetSettings(devices=2, requests=20))
        assert set(site.placement["a"]) == held
        (outcome,) = simulate(problem, devices=2, requests=20)
        assert all(outcome.states == WHOLE)
