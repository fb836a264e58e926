"""``ls-edge bench --out`` of a real bundle, with the sensors of a board and without any."""

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.device import hardware
from ls_edge.device.sensors import Sensors
from ls_edge.engines.executor import Executor
from ls_edge.engines.measuring import taken_bytes
from ls_edge.engines.opening import open_block_engines
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.profiling import MeasuredDevice, profile_blocks, profile_bundle


def board(root, *, over_current=0):
    base = root / "sys/class/hwmon"
    for path, content in {
        "hwmon0/name": "ina3221", "hwmon0/in1_label": "VDD_IN", "hwmon0/in1_input": 5000, "hwmon0/curr1_input": 1200,
        "hwmon1/name": "soctherm_oc", "hwmon1/oc1_event_cnt": over_current,
    }.items():  # fmt: skip
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(f"{content}\n", encoding="utf-8")
    return Sensors(root)


def test_a_profile_without_sensors_has_times_and_memory_but_no_power(bundle, tmp_path):
    steps = []
    found = profile_bundle(
        bundle, MeasuredDevice("here", Sensors(tmp_path)), batches=(2, 1), duration=0.05, threads=1,
        on_step=lambda done, total, text: steps.append((done, total, text)),
    )  # fmt: skip
    assert list(found.batch) == ["1", "2"]
    for times in found.batch.values():
        assert len(times.blocks_ms) == 6
        assert 0 < times.stem_ms.min <= times.stem_ms.p50 <= times.stem_ms.p95
        assert (
            times.chain_ms.min >= times.stem_ms.min + times.head_ms.min + sum(one.min for one in times.blocks_ms) - 0.01
        )
        assert times.repeats >= 3
        assert list(times.visits_ms) == ["1", "2", "6"]
        assert times.block_ms == pytest.approx((times.visits_ms["6"].p50 - times.visits_ms["1"].p50) / 5)
        assert times.energy_mj_per_image is times.power_watts is None
    assert [part.part for part in found.parts] == ["stem", *(f"block {index}" for index in range(6)), "head"]
    assert all(part.load_ms > 0 and part.file_bytes > 0 and not part.built for part in found.parts)
    assert found.memory_bytes >= sum(part.file_bytes for part in found.parts)
    assert found.block_memory_bytes >= found.parts[1].file_bytes
    assert (found.power_watts, found.power_scope, found.energy_mj_per_image) == (None,) * 3
    assert (found.throttled, found.throttled_by) == (False, [])
    assert (found.device.l4t, found.device.power_mode) == (None, None)
    assert steps[0] == (0, 10, "stem")
    assert steps[-1] == (9, 10, "batch 2")
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)


def test_power_and_energy_are_those_of_the_boards_sensors(bundle, tmp_path):
    found = profile_bundle(bundle, MeasuredDevice("orin-0", board(tmp_path)), duration=0.05, threads=1)
    assert (found.power_watts, found.power_scope) == (6.0, "module")
    times = found.batch["1"]
    assert found.energy_mj_per_image == times.energy_mj_per_image
    assert times.energy_mj_per_image >= 6.0 * times.chain_ms.min


def test_a_board_that_throttles_in_between_is_marked(bundle, tmp_path):
    sensors = board(tmp_path)
    found = profile_bundle(
        bundle, MeasuredDevice("orin-0", sensors), duration=0.05, threads=1,
        on_step=lambda _done, _total, text: text == "batch 1" and board(tmp_path, over_current=3),
    )  # fmt: skip
    assert (found.throttled, found.throttled_by) == (True, ["soctherm_oc oc1: 3 more"])


@pytest.mark.parametrize("integrated", [0, 1])
def test_memory_of_the_gpu_counts_once(bundle, tmp_path, gpu, integrated, monkeypatch):
    """The double has a GPU of 1 GiB; an integrated one has the host's memory, which counts once."""
    gpu.integrated = integrated
    monkeypatch.setattr(hardware, "memory_gib", lambda: (gpu.memory / 2**30, gpu.available() / 2**30))
    monkeypatch.setattr("ls_edge.engines.measuring.resident_bytes", lambda: 0)
    device = MeasuredDevice("orin-0", Sensors(tmp_path))
    found = profile_bundle(bundle, device, duration=0.02, kind="tensorrt")
    files = sum(part.file_bytes for part in found.parts)
    assert found.provider.startswith("TensorRT")
    assert found.device.multiprocessors == 8
    assert found.memory_bytes >= files
    with Pipeline.open(bundle, kind="tensorrt") as pipeline:
        workspace, opened = pipeline.executor.workspace, pipeline.executor.workspace.taken_bytes()
        assert opened > 0  # the memory of the kernels
        address = gpu.allocate("device", 10 * files)
        assert taken_bytes(0, 0, workspace) == opened + 10 * files
        measured = profile_blocks(
            bundle, pipeline.executor, device, max_batch=1, duration=0.02, call=lambda function: function()
        )
        assert measured.device.multiprocessors == 8
        assert measured.memory_bytes == workspace.taken_bytes() > 10 * files
        freed = measured.device.available_bytes - device.facts.available_bytes
        assert freed == (measured.memory_bytes if integrated else 0), "the memory of a card is not the host's"
        monkeypatch.setattr("ls_edge.engines.measuring.resident_bytes", lambda: 10 * files)
        assert taken_bytes(0, 0, workspace) == workspace.taken_bytes() + (0 if integrated else 10 * files)
        gpu.free("device", address)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_engines_of_a_running_peer_count_as_available_memory_and_each_only_once(
    bundle, half_bundle, tmp_path, monkeypatch, precision
):
    """Two of three blocks share an engine; a plan replaces all of them. A CPU keeps fp16 as float32."""
    bundle = bundle if precision == "fp32" else Bundle.open(half_bundle)
    monkeypatch.setattr(hardware, "memory_gib", lambda: (2.0, 1.0))
    engines = open_block_engines(bundle, [1, 2], threads=1)
    executor = Executor({**engines, 3: engines[2]})
    found = profile_blocks(
        bundle,
        executor,
        MeasuredDevice("orin-0", Sensors(tmp_path)),
        max_batch=1,
        duration=0.02,
        call=lambda run: run(),
    )
    taken = [bundle.part("block 1").bytes, bundle.part("block 2").bytes, 0]
    assert [part.file_bytes for part in found.parts] == taken
    memory = sum(taken) * (2 if precision == "fp16" else 1)
    assert sum(part.taken_bytes for part in found.parts) == found.memory_bytes == memory
    assert found.device.available_bytes == 2**30 + memory


def test_invalid_arguments_are_refused(bundle):
    for wrong in ({"batches": ()}, {"batches": (0,)}, {"duration": 0.0}, {"threads": 0}):
        with pytest.raises(UsageError):
            profile_bundle(bundle, **{"threads": 1, "duration": 0.02, **wrong})
    with pytest.raises(UsageError):
        MeasuredDevice("no name")
