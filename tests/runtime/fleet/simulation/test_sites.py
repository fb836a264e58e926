"""Sites of a fleet: their devices, placements and assumptions."""

import dataclasses

import msgspec
import pytest

from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.evaluation.simulation_summary import WHOLE, FleetSettings
from ls_edge.runtime.fleet.planning.survival import whole_share
from ls_edge.runtime.fleet.simulation.sites import plan_site, simulation_context, sites_of
from ls_edge.runtime.simulator.churn import Churn


def test_a_fleet_is_divided_into_sites_that_are_alike(make_problem):
    sites, assumed = sites_of(make_problem(2.0, 3.0), FleetSettings(devices=35, requests=100))
    assert [len(site.kinds) for site in sites] == [12, 12, 11]
    assert [site.requests for site in sites] == [34, 33, 33]
    assert sorted(sites[0].kinds.values()) == ["a"] * 6 + ["b"] * 6
    assert all(set(site.placement) == set(site.kinds) for site in sites)
    assert {"a", "a-2", "b", "b-6"} <= set(sites[0].kinds)
    held = [block for blocks in sites[0].placement.values() for block in blocks]
    assert all(held.count(block) >= 2 for block in range(4))
    assert "3 sites of up to 16 devices" in assumed[0]
    few, assumed = sites_of(make_problem(2.0), FleetSettings(devices=32, requests=1), site_size=8)
    assert [site.requests for site in few] == [1]
    assert "3 sites have no request" in assumed[1]
    assert simulation_context(few, bundle_id="id", churn=[], assumptions=assumed).devices == len(few[0].kinds) == 8


def test_measured_links_apply_only_to_the_measured_devices(make_problem):
    links = {(a, b): 4.0 for a in ("source", "a", "b") for b in ("source", "a", "b") if a != b}
    problem = make_problem(2.0, 2.0, visit_ms=1.0, links_ms=links)
    (site,), assumed = sites_of(problem, FleetSettings(devices=2, requests=1))
    assert site.problem.links_ms == links
    assert len(assumed) == 1
    (site,), assumed = sites_of(problem, FleetSettings(devices=3, requests=1))
    assert site.problem.links_ms == {}
    assert "mean time of the links" in assumed[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 1}, "--devices 1 is less than the number of profiles .2.; raise it"),
        ({"devices": 2, "replicas": 2}, "a site of 2 devices: 4 blocks with 2 holders each are 8 copies.*--site-size"),
    ],
)
def test_impossible_fleets_are_refused(make_problem, settings, message):
    with pytest.raises(UsageError, match=message):
        sites_of(make_problem(2.0, 3.0, capacity=3), FleetSettings(requests=1, **settings))


def test_blocks_have_one_holder_if_memory_has_no_room_for_two(make_problem):
    (site,), _ = sites_of(make_problem(2.0, 3.0, capacity=3), FleetSettings(devices=2, requests=1))
    assert site.problem.replicas == 1


def test_a_document_has_the_settings_and_the_replicas_and_concurrency_of_its_sites(make_problem):
    settings = FleetSettings(devices=3, requests=7, policy="random", max_skips=1, budget_ms=1234.5, rate=2.5, seed=9)
    sites, assumptions = sites_of(make_problem(2.0), settings)
    found = simulation_context(sites, bundle_id="id", churn=["up=1m,down=1s"], assumptions=assumptions)
    assert (found.replicas, found.concurrency) == (sites[0].problem.replicas, sites[0].concurrency) == (2, 16)
    kept = {key: value for key, value in msgspec.structs.asdict(settings).items() if value is not None}
    assert {key: getattr(found, key) for key in kept} == kept
    assert (found.bundle_id, found.sites, found.devices_per_site, found.churn) == ("id", 1, 3, ["up=1m,down=1s"])


def test_holders_of_a_block_are_in_different_zones_of_a_site(make_problem):
    churn = [Churn(3600.0, 60.0), Churn(36000.0, 600.0, zone=2)]
    (site,), _ = sites_of(make_problem(2.0, capacity=2), FleetSettings(devices=8, requests=1), churn=churn)
    zone_of = {device.name: device.zone for device in site.problem.devices}
    assert sorted(zone_of.values()) == sorted(f"zone-{number}" for number in (1, 2, 3, 4) for _ in range(2))
    for block in range(4):
        holders = [name for name, blocks in site.placement.items() if block in blocks]
        assert len({zone_of[name] for name in holders}) == len(holders) >= 2


def test_the_losses_of_all_zones_count(make_problem):
    """One board: its zone is lost for two reasons, or a larger zone with it."""
    churn = [Churn(9.0, 1.0, zone=2), Churn(4.0, 1.0, zone=2), Churn(3.0, 1.0, zone=4)]
    for losses, expected in ((churn[:2], 0.9 * 0.8), (churn, 0.9 * 0.8 * 0.75)):
        site, placement, _ = plan_site(make_problem(2.0), 1, (0,), churn=losses, exactly=True)
        assert whole_share(site, placement) == pytest.approx(expected)


def test_a_slow_source_sends_images_to_devices_with_stem_and_head(make_problem, simulate):
    def answered(source_ms):
        problem = make_problem(2.0, 2.0, source_ms=source_ms, visit_ms=1.0, capacity=6)
        ends = [dataclasses.replace(one, stem_ms=1.0, head_ms=0.5, ends_size=1.0) for one in problem.devices]
        problem = dataclasses.replace(problem, devices=tuple(ends), token_bytes=100, image_share=2.0, logits_share=0.1)
        (site,) = sites_of(problem, FleetSettings(devices=2, requests=20))[0]
        (outcome,) = simulate(problem, devices=2, requests=20)
        assert all(outcome.states == WHOLE)
        return set(site.placement["a"]), sum(outcome.link_bytes.values())

    assert answered(0.1) == ({0, 1, 2, 3}, 20 * 2 * 100)
    assert answered(50.0) == ({STEM, 0, 1, 2, 3, HEAD}, 20 * (200 + 10))
