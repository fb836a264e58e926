"""Planning problems from profiles and links: what was measured, and what is assumed instead."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.device.profile import CallOverhead, DeviceProfile, LinkFit, LinksDocument, LinkTimes
from ls_edge.runtime.fleet.planning.from_profiles import (
    CALL_MS,
    MEMORY_SHARE,
    NamedProfile,
    PlanningInputs,
    problem_of,
    read_profiles,
)
from ls_edge.runtime.fleet.planning.problem import with_ends
from ls_edge.runtime.protocol.codecs import wire_bytes

PART_BYTES = 1000


@pytest.fixture
def bundle(tiny_bundle):
    return Bundle.open(tiny_bundle)


@pytest.fixture
def make_profile(bundle):
    """Return the profile of a device: 2 ms for a block, 1 ms for each of stem and head, parts of 1000 bytes."""

    def times(ms):
        return None if ms is None else {"p50": ms, "p95": ms, "min": ms}

    def batch(block_ms, energy_mj, ends_ms):
        return {
            "stem_ms": times(ends_ms), "head_ms": times(ends_ms), "chain_ms": None, "repeats": 9, "slowdown": 1.0,
            "blocks_ms": [times(block_ms)] * bundle.num_blocks, "power_watts": None, "energy_mj_per_image": energy_mj,
        }  # fmt: skip

    def make(name="a", *, batches=(("1", 2.0, None),), ends_ms=1.0, free=None, **more):
        parts = ["stem", "head", *(f"block {number}" for number in range(bundle.num_blocks))]
        state = {"clocks_mhz": {}, "temperatures_c": {}, "throttled": [], "counters": {}}
        document = {
            "schema": 1, "bundle_id": bundle.manifest.bundle_id, "model_id": bundle.manifest.model_id, "model": "tiny",
            "engine": "onnx", "provider": "cpu", "precision": "fp32", "threads": 1,
            "device": {
                "name": name, "board": None, "cpu": "", "cores": 1, "cpu_quota": None, "gpus": [], "memory_bytes": None,
                "available_bytes": free, "l4t": None, "power_mode": None, "battery_wh": None, "versions": {},
            },
            "batch": {size: batch(ms, energy_mj, ends_ms) for size, ms, energy_mj in batches},
            "parts": [
                {"part": part, "load_ms": 1.0, "built": False, "file_bytes": PART_BYTES, "resident_bytes": None}
                for part in parts
            ],
            "memory_bytes": PART_BYTES * len(parts), "power_watts": None, "idle_watts": None, "power_scope": None,
            "power_channels": {}, "energy_mj_per_image": None, "throttled": False, "throttled_by": [],
            "before": state, "after": state, **more,
        }  # fmt: skip
        return NamedProfile(name, Path(f"{name}.json"), msgspec.convert(document, DeviceProfile, strict=False))

    return make


def assumes(assumptions, text):
    return any(text in line for line in assumptions)


def test_a_device_has_the_times_and_the_memory_of_its_profile(bundle, make_profile):
    free = PART_BYTES * 10
    problem, assumptions = problem_of(bundle, PlanningInputs((make_profile(free=free),)))
    (device,) = problem.devices
    assert (device.block_ms, device.stem_ms, device.head_ms, device.max_batch) == (2.0, 1.0, 1.0, 1)
    assert device.capacity == pytest.approx(free * MEMORY_SHARE / PART_BYTES)
    assert device.ends_size == pytest.approx(2)
    assert problem.source.part_ms(STEM) + problem.source.part_ms(HEAD) == 2.0
    assert not assumes(assumptions, "gives no amount")
    problem, assumptions = problem_of(bundle, PlanningInputs((make_profile(),)))
    assert problem.devices[0].capacity >= bundle.num_blocks
    assert assumes(assumptions, "a has memory for every block: its profile does not say how much")


def test_a_peer_without_stem_and_head_needs_the_memory_of_the_sources(bundle, make_profile):
    parts = [
        {"part": part, "load_ms": 0.0, "built": False, "file_bytes": PART_BYTES, "resident_bytes": None}
        for part in ("block 0", "block 1")
    ]
    held = {"parts": parts, "memory_bytes": 3 * PART_BYTES}  # a thousand bytes besides the parts
    peer = make_profile("peer", ends_ms=None, **held)
    problem, _ = problem_of(bundle, PlanningInputs((peer,), source=make_profile()))
    assert problem.devices[0].ends_size == pytest.approx(3)
    assert with_ends(problem, {"peer": tuple(range(bundle.num_blocks))}) is not None, "memory without a known limit"


def test_unmeasured_links_have_the_given_speed_and_tokens_the_given_codec(bundle, make_profile):
    tokens = bundle.manifest.tokens
    for codec in ("raw", "fp16", "int8"):
        problem, assumptions = problem_of(
            bundle, PlanningInputs((make_profile("a"), make_profile("b")), codec=codec, mbit=10.0, latency_ms=0.5)
        )
        wire = wire_bytes(codec, tokens.count, tokens.dim) * 8e-3 / 10
        assert {device.wire_ms for device in problem.processes.values()} == {wire}
        assert problem.devices[0].visit_ms == pytest.approx(0.5 + wire + CALL_MS)
        assert problem.links_ms == {}
        assert assumes(assumptions, "links of 10 Mbit/s and 0.5 ms: none was measured")
        assert assumes(assumptions, "around each engine call, a, b spends another 0.6 ms")


def test_measured_links_and_calls_replace_the_assumptions(bundle, make_profile):
    pairs = [(one, two) for one in ("laptop", "a", "b") for two in ("laptop", "a", "b") if one != two]
    links = LinksDocument(
        1, bundle.manifest.model_id, "laptop",
        [LinkTimes(*pair, codec, 1, 1, ms, ms) for pair in pairs for codec, ms in (("raw", 4.0), ("fp16", 3.0))],
        [LinkFit("laptop", "a", 0.1, 100.0)], [],
        [CallOverhead(name, 0.25, 0.75, 1.0, 9) for name in "ab"],
    )  # fmt: skip
    inputs = PlanningInputs((make_profile("a"), make_profile("b")), links=links, codec="fp16")
    problem, assumptions = problem_of(bundle, inputs)
    assert set(problem.links_ms.values()) == {3.0}
    assert problem.links_ms["source", "a"] == 3.0
    a, b = problem.devices
    assert (a.runtime_ms, a.runtime_mean_ms) == (0.25, 0.75)
    assert a.visit_ms == pytest.approx(3.0 + 0.25)
    tokens = bundle.manifest.tokens
    assert a.wire_ms == pytest.approx(wire_bytes("fp16", tokens.count, tokens.dim) * 8e-3 / 100)
    assert b.wire_ms == 3.0
    assert not assumes(assumptions, "Mbit/s")
    _, assumptions = problem_of(bundle, dataclasses.replace(inputs, codec="int8"))
    assert assumes(assumptions, "where none was measured as int8: some of a, b")
    with pytest.raises(DataError, match="another model's tokens"):
        problem_of(bundle, dataclasses.replace(inputs, links=msgspec.structs.replace(links, model_id="x" * 64)))


def test_a_bandwidth_fitted_to_noise_makes_no_transfer_free_and_noise_is_named(bundle, make_profile):
    pairs = [(one, two) for one in ("laptop", "a", "b") for two in ("laptop", "a", "b") if one != two]
    links = LinksDocument(
        1, bundle.manifest.model_id, "laptop", [LinkTimes(*pair, "raw", 1, 20, 0.4, 0.5) for pair in pairs[1:]],
        [LinkFit("laptop", "a", 0.1, 0.01)], [], [],
    )  # fmt: skip
    links.transfers.append(LinkTimes("laptop", "a", "raw", 1, 20, 0.4, 31.0))
    problem, assumptions = problem_of(bundle, PlanningInputs((make_profile("a"), make_profile("b")), links=links))
    assert all(process.wire_ms <= 0.4 for process in problem.processes.values())
    noisy = [line for line in assumptions if "noisy" in line]
    assert len(noisy) == 1
    assert "laptop to a as raw" in noisy[0]


@pytest.mark.parametrize(
    ("objective", "more", "max_batch"),
    [
        ("latency", {}, 1),
        ("throughput", {}, 4),
        ("energy", {}, 8),
        ("throughput", {"batches": {"a": 2}}, 2),
        ("throughput", {"batches": {"a": 2}, "batch": 3}, 3),
    ],
)
def test_the_batch_fits_the_objective_unless_it_is_given(bundle, make_profile, objective, more, max_batch):
    sizes = (("1", 2.0, 9.0), ("4", 4.0, 8.0), ("8", 12.0, 7.0))
    problem, assumptions = problem_of(
        bundle, PlanningInputs((make_profile(batches=sizes),), objective=objective, **more)
    )
    assert problem.devices[0].max_batch == max_batch
    assert assumes(assumptions, "estimated from batches of 1, 4, 8") == (max_batch in (2, 3))


def test_the_source_is_the_fastest_device_unless_its_profile_is_given(bundle, make_profile):
    slow, fast, peer = make_profile("slow", ends_ms=5.0), make_profile("fast"), make_profile("peer", ends_ms=None)
    problem, assumptions = problem_of(bundle, PlanningInputs((slow, fast, peer)))
    assert problem.source.stem_ms == 1.0
    assert assumes(assumptions, "as fast as on fast (--source FILE)")
    assert problem.devices[2].stem_ms == 1.0
    assert assumes(assumptions, "stem and head are slower on peer than on fast by the same factor as a block")
    problem, assumptions = problem_of(bundle, PlanningInputs((peer,), source=slow))
    assert problem.source.stem_ms == 5.0
    assert not assumes(assumptions, "--source FILE")
    with pytest.raises(UsageError, match=r"stem and head were not measured.*--source FILE"):
        problem_of(bundle, PlanningInputs((peer,)))


def test_losses_apply_to_devices_to_zones_and_to_all_others(bundle, make_profile):
    profiles = tuple(make_profile(name) for name in "abc")
    problem, _ = problem_of(
        bundle, PlanningInputs(profiles, losses={"": 0.1, "a": 0.2, "rack": 0.3}, zones={"a": "rack", "b": "rack"})
    )
    assert [device.loss for device in problem.devices] == [0.2, 0.1, 0.1]
    assert [device.zone for device in problem.devices] == ["rack", "rack", None]
    assert problem.zone_losses == {"rack": 0.3}


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"zones": {"b": "rack"}}, UsageError, "--zones names 'b', which has no profile; profiles name a"),
        ({"losses": {"b": 0.1}}, UsageError, "names 'b', which is neither a device nor a zone; there are a"),
        ({"zones": {"a": "a"}}, UsageError, "a names both a zone and a device"),
    ],
)
def test_names_without_a_device_are_refused(bundle, make_profile, inputs, error, message):
    with pytest.raises(error, match=message):
        problem_of(bundle, PlanningInputs((make_profile(),), **inputs))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_id": "f" * 64}, "is of model f+.*profile this bundle on that device"),
        ({"throttled": True, "throttled_by": ["heat"]}, "throttled while it was measured .heat.*--allow-throttled"),
    ],
)
def test_profiles_of_other_models_and_of_throttled_devices_are_refused(bundle, make_profile, more, message):
    profile = make_profile(**more)
    with pytest.raises(DataError, match=message):
        problem_of(bundle, PlanningInputs((profile,)))
    if "throttled" in more:
        assert problem_of(bundle, PlanningInputs((profile,), throttled=True))[0].devices


def test_a_profile_may_stand_for_several_devices(make_profile, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(make_profile().profile))
    assert [one.name for one in read_profiles([f"x,y={path}", str(path)])] == ["x", "y", "a"]
    with pytest.raises(UsageError, match="two profiles have the name 'a'; rename one, for example a-b="):
        read_profiles([str(path), f"a={path}"])
    with pytest.raises(UsageError, match="'x y' cannot name a device"):
        read_profiles([f"x y={path}"])
