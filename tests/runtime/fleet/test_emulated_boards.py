"""Emulated boards: their speed and its source, and marked profiles."""

import time

import msgspec
import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.device.sensors import Sensors
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
from ls_edge.runtime.fleet.emulated_boards import EmulatedBoard, PacedEngine, Pacer, emulated_boards, emulated_profile


@pytest.fixture
def measured(tiny_bundle, tmp_path):
    return profile_bundle(
        Bundle.open(tiny_bundle), MeasuredDevice("here", Sensors(tmp_path / "none")), duration=0.02, threads=1
    )


def test_boards_are_known_by_name_or_by_their_profile(measured, tmp_path):
    path = tmp_path / "jetson.json"
    path.write_bytes(msgspec.json.encode(measured))
    boards = emulated_boards(["orin-nano", "orin-nano-super", "orin-nano", str(path)])
    assert [board.name for board in boards] == ["orin-nano-0", "orin-nano-super-0", "orin-nano-1", "here-0"]
    assert 12 * boards[0].block_ms == pytest.approx(1000 / 98)
    assert 12 * boards[1].block_ms == pytest.approx(1000 / 158)
    assert boards[3].block_ms == measured.block_ms
    assert "vit-base-patch16-224" in boards[0].source
    assert boards[3].source == "its profile jetson.json"
    (slow,) = emulated_boards(["orin-nano"], 10)
    assert slow.block_ms == pytest.approx(10 * boards[0].block_ms)
    assert slow.source.endswith("10 times slower")
    with pytest.raises(UsageError, match="unknown board 'orin-nan'; did you mean 'orin-nano'"):
        emulated_boards(["orin-nan"])


def test_an_emulated_profile_is_marked_and_leaves_unknown_values_out(measured):
    (board,) = emulated_boards(["orin-nano"], 100)
    found = emulated_profile(msgspec.structs.replace(measured, power_watts=5.0, throttled=True), board)
    assert found.block_ms == pytest.approx(board.block_ms, abs=1e-3)
    assert (found.device.name, found.device.emulated) == ("orin-nano-0", board.source)
    assert (found.power_watts, found.energy_mj_per_image, found.throttled) == (None, None, False)
    with pytest.raises(UsageError, match="too slow to emulate it"):
        emulated_profile(measured, EmulatedBoard("quick-0", 1e-6, "nobody"))


def test_late_sleep_does_not_make_a_board_slower(monkeypatch):
    """Consecutive calls end when the board would have finished them, although each sleep is 10 ms too long."""

    class Quick:
        part, kind, provider, signature = "block 0", "onnx", "cpu", None

        def run(self, inputs):
            return inputs["tokens"]

        def close(self):
            pass

    now = [100.0]

    def late_sleep(seconds):
        now[0] += seconds + 0.010

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", late_sleep)
    engine = PacedEngine(Quick(), Pacer(), 50.0)
    one, two = np.zeros((1, 4, 8), np.float32), np.zeros((2, 4, 8), np.float32)

    def took(tokens, calls):
        began = now[0]
        for _ in range(calls):
            engine.run({"tokens": tokens})
            now[0] += 0.001  # time of a peer between two calls
        return now[0] - began

    assert took(one, 20) == pytest.approx(20 * 0.051 + 0.010)
    now[0] += 1.0  # nothing waited, so the next call is not shortened
    assert took(one, 1) == pytest.approx(0.061)
    now[0] += 1.0
    assert took(two, 1) == pytest.approx(0.111)
