"""Planning problems from profiles and links: what was measured, and what is assumed instead."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.device.hardware import JETSON_MEMORY_SHARE, MEMORY_SHARE
from ls_edge.device.profile import DeviceProfile
from ls_edge.runtime.fleet.planning.from_profiles import (
    CALL_MS,
    LATENCY_MS,
    MeasuredRun,
    NamedProfile,
    PlanningInputs,
    problem_of,
    read_profiles,
)
from ls_edge.runtime.fleet.planning.problem import with_ends
from ls_edge.runtime.protocol.codecs import codec_of

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

    def make(name="a", *, batches=(("1", 2.0, None),), ends_ms=1.0, free=None, l4t=None, **more):
        parts = ["stem", "head", *(f"block {number}" for number in range(bundle.num_blocks))]
        state = {"clocks_mhz": {}, "temperatures_c": {}, "throttled": [], "counters": {}}
        document = {
            "schema": 1, "bundle_id": bundle.manifest.bundle_id, "model_id": bundle.manifest.model_id, "model": "tiny",
            "engine": "onnx", "provider": "cpu", "precision": "fp32", "threads": 1,
            "device": {
                "name": name, "board": None, "cpu": "", "cores": 1, "cpu_quota": None, "gpus": [], "memory_bytes": None,
                "available_bytes": free, "l4t": l4t, "power_mode": None, "versions": {},
            },
            "batch": {size: batch(ms, energy_mj, ends_ms) for size, ms, energy_mj in batches},
            "parts": [
                {"part": part, "load_ms": 1.0, "built": False, "file_bytes": PART_BYTES, "resident_bytes": None}
                for part in parts
            ],
            "memory_bytes": PART_BYTES * len(parts), "power_watts": None, "power_scope": None,
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
    jetson, _ = problem_of(bundle, PlanningInputs((make_profile(free=free, l4t="36.4.7"),)))
    assert jetson.devices[0].capacity == pytest.approx(free * JETSON_MEMORY_SHARE / PART_BYTES)
    assert (device.ends_size, device.files) == (pytest.approx(2), bundle.num_blocks)
    assert problem.source.part_ms(STEM) + problem.source.part_ms(HEAD) == 2.0
    assert not assumes(assumptions, "memory for every block")
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
    problem, _ = problem_of(bundle, PlanningInputs((peer,), make_profile()))
    assert problem.devices[0].ends_size == pytest.approx(3)
    assert with_ends(problem, {"peer": tuple(range(bundle.num_blocks))}) is not None, "memory without a known limit"


def test_unmeasured_links_have_the_given_speed_and_tokens_the_given_codec(bundle, make_profile):
    tokens, codecs = bundle.manifest.tokens, {"a": "fp16", "b": "int8", "source": "raw"}
    problem, assumptions = problem_of(
        bundle, PlanningInputs((make_profile("a"), make_profile("b")), codecs={"a": "fp16", "b": "int8"}, mbit=10.0)
    )
    wire = {name: codec_of(codec).wire_bytes(tokens.count, tokens.dim) * 8e-3 / 10 for name, codec in codecs.items()}
    assert {name: device.wire_ms for name, device in problem.processes.items()} == wire
    assert problem.devices[0].visit_ms == pytest.approx(LATENCY_MS + wire["a"] + CALL_MS)
    assert assumes(assumptions, "links of 10 Mbit/s and 0.3 ms for a, b: not measured (--run FILE)")


def test_links_take_the_times_of_a_run(bundle, make_profile, tmp_path):
    """Hops of a run include the overhead of the peer; another peer has the assumed link."""
    path = tmp_path / "run.json"
    peers = {"a": {"wire_ms_p50": 3.0, "requests": 9}, "c": {"wire_ms_p50": None}}
    document = {"bundle_id": bundle.manifest.bundle_id, "hops": {"wire_ms_p50": 2.0, "codec_ms_p50": 0.5}}
    path.write_text(json.dumps(document | {"peers": peers, "policy": "nearest"}), encoding="utf-8")
    inputs = PlanningInputs((make_profile("a"), make_profile("b")), run=MeasuredRun.read(path), mbit=0.01)
    problem, assumptions = problem_of(bundle, inputs)
    a, b = problem.devices
    assert (a.visit_ms, a.wire_ms) == (3.5, 3.5), "no transfer is shorter than its time on the wire"
    assert (problem.source.visit_ms, a.runtime_ms) == (2.5, CALL_MS)
    assert b.visit_ms > 100
    assert assumes(assumptions, "0.3 ms for b: not measured")
    other = dataclasses.replace(inputs, run=msgspec.structs.replace(inputs.run, bundle_id="f" * 64))
    with pytest.raises(DataError, match=r"--run is of bundle f+"):
        problem_of(bundle, other)
    with pytest.raises(DataError, match="is not a run"):
        MeasuredRun.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("objective", "more", "max_batch"),
    [
        ("latency", {}, 1),
        ("throughput", {}, 4),
        ("energy", {}, 8),
        ("throughput", {"batches": {"a": 2}}, 2),
    ],
)
def test_the_batch_fits_the_objective_unless_it_is_given(bundle, make_profile, objective, more, max_batch):
    sizes = (("1", 2.0, 9.0), ("4", 4.0, 8.0), ("8", 12.0, 7.0))
    problem, _ = problem_of(bundle, PlanningInputs((make_profile(batches=sizes),), objective=objective, **more))
    assert problem.devices[0].max_batch == max_batch


def test_the_source_is_as_fast_as_the_fastest_device_unless_its_profile_is_given(bundle, make_profile):
    slow, fast, peer = make_profile("slow", ends_ms=5.0), make_profile("fast"), make_profile("peer", ends_ms=None)
    problem, assumptions = problem_of(bundle, PlanningInputs((slow, fast, peer)))
    assert problem.source.stem_ms == 1.0
    assert assumes(assumptions, "as fast as on fast (--source FILE)")
    assert problem.devices[2].stem_ms == 1.0
    assert assumes(assumptions, "stem and head are slower on peer than on fast by the same factor as a block")
    problem, assumptions = problem_of(bundle, PlanningInputs((peer,), slow))
    assert problem.source.stem_ms == 5.0
    assert not assumes(assumptions, "--source FILE")
    problem, assumptions = problem_of(bundle, PlanningInputs((peer,)))
    assert (problem.source.stem_ms, problem.devices[0].head_ms) == (2.0, 2.0)
    assert assumes(assumptions, "stem and head take as long as a block each: not measured on peer")


def test_profiles_of_other_models_are_refused_and_throttling_is_named(bundle, make_profile):
    with pytest.raises(DataError, match=r"is of model f+.*measure this bundle on that device"):
        problem_of(bundle, PlanningInputs((make_profile(model_id="f" * 64),)))
    hot = make_profile(throttled=True, throttled_by=["heat"], batches=(("4", 8.0, None),))
    for line in ("although it throttled (heat): measure it again", "a takes 1/4 of the time of 4 images for one"):
        assert assumes(problem_of(bundle, PlanningInputs((hot,)))[1], line)


def test_energy_is_not_compared_silently_where_the_sensors_measure_different_things(bundle, make_profile):
    module, board = (make_profile(scope, power_scope=scope) for scope in ("module", "board"))
    _, assumptions = problem_of(bundle, PlanningInputs((module, board), objective="energy"))
    assert assumes(assumptions, "the sensors measure different things: module (module), board (board)")
    for inputs in (PlanningInputs((module, board)), PlanningInputs((module,), objective="energy")):
        assert not assumes(problem_of(bundle, inputs)[1], "sensors")


def test_a_profile_may_stand_for_several_devices(make_profile, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(make_profile().profile))
    assert [one.name for one in read_profiles([f"x,y={path}", str(path)])] == ["x", "y", "a"]
    for words, message in (
        ([str(path), f"a={path}"], "'a' names another profile, too; rename one, for example a-b="),
        (["a="], "'a=' names no file; write FILE"),
        ([f"source={path}"], "'source' names the process that has the images, too"),
        ([f"x y={path}"], "'x y' cannot name a device"),
    ):
        with pytest.raises(UsageError, match=message):
            read_profiles(words)
