"""``ls-edge bench`` as a user types it."""

import json
import re

import pytest

from ls_edge.device.profile import load_profile
from ls_edge.device.sensors import Sensors
from ls_edge.runtime.fleet.local_cluster import LocalCluster


def test_a_profile_has_the_times_of_every_part(command, bundle, tmp_path):
    out = tmp_path / "profile.json"
    words = ["bench", bundle, "--out", out, "--name", "here", "--batch", "1,2", "--duration", 0.05, "--threads", 1]
    code, printed, errors = command(*words, "--json")
    assert code in (0, 3), errors  # 3 where this machine throttles
    found = load_profile(out)
    assert (found.device.name, list(found.batch)) == ("here", ["1", "2"])
    assert json.loads(printed) == json.loads(out.read_text(encoding="utf-8"))
    assert "bench: stem (0/8)" in errors
    code, printed, _ = command(*words)
    assert code in (0, 3)
    assert re.match(r".+, fp32, batch 1\n +median ms", printed)
    assert "chain" in printed
    assert f"written to {out}" in printed


def test_wrong_options_are_refused(command, bundle, write_peers, tmp_path):
    path, out = write_peers({"a": [0]}), tmp_path / "p.json"
    for arguments, code, message in (
        ((), 2, "name the folder of a bundle, or a running peer"),
        ((bundle, "--batch", "1,x"), 2, "'1,x' is not a list of numbers"),
        ((bundle, "--batch", "0"), 2, "from 1 to 1024"),
        ((bundle, "--batch", "1,2"), 2, "several sizes only for a profile"),
        ((bundle, "--name", "a"), 2, "give --out FILE too"),
        ((bundle, "--out", tmp_path), 2, "is a folder"),
        ((bundle, "--out", out, "--name", "no name"), 2, "give one with --name"),
        ((bundle, "--peers", path), 2, "leave out BUNDLE or --peers"),
        (("--peers", path, "--name", "a", "--batch", "2"), 2, "--batch: a peer measures the engines that it serves"),
        (("--peers", path, "--name", "b"), 2, "unknown peer 'b'"),
        (("--peers", path, "--name", "a", "--duration", "61"), 2, "at most 60 seconds"),
        (("--peers", path, "--name", "a", "--out", out), 1, "a: nobody answers at"),
    ):
        found, _, errors = command("bench", *arguments)
        assert (found, message in errors) == (code, True), errors
    assert not out.exists()


def test_a_peer_measures_what_it_serves(tmp_path, bundle, command):
    cluster = LocalCluster(
        tmp_path / "fleet", bundle, {"a": (1, 2)}, sources=["laptop"], keys=True, each={"max_batch": 2}
    )
    out = tmp_path / "a.json"
    with cluster as peers:
        peers.wait_settled()
        ask = ["--peers", peers.path, "--secret-key", peers.secret_key("laptop")]
        code, printed, errors = command("bench", *ask, "--name", "a", "--out", out, "--duration", 0.0004)
        assert code in (0, 3), errors
    assert f"written to {out}" in printed
    found = load_profile(out)
    assert (found.device.name, list(found.batch), found.threads) == ("a", ["1", "2"], 1)
    assert [part.part for part in found.parts] == ["block 1", "block 2"]
    for times in found.batch.values():
        assert (times.stem_ms, times.head_ms, times.chain_ms, len(times.blocks_ms)) == (None, None, None, 4)
        assert times.blocks_ms[0].p50 == pytest.approx((times.blocks_ms[1].p50 + times.blocks_ms[2].p50) / 2)


def test_a_device_that_throttles_is_marked(command, bundle, tmp_path, monkeypatch):
    """The sensors are those of a board whose processor is at its limit."""
    zone = tmp_path / "board/sys/class/thermal/thermal_zone0"
    (zone / "cdev0").mkdir(parents=True)
    for name, text in (("type", "cpu-thermal"), ("temp", "99500"), ("trip_point_0_type", "passive"),
                       ("trip_point_0_temp", "99000"), ("cdev0_trip_point", "0"), ("cdev0/type", "cpufreq-cpu0"),
                       ):  # fmt: skip
        (zone / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr("ls_edge.engines.profiling.Sensors", lambda: Sensors(tmp_path / "board"))
    out = tmp_path / "hot.json"
    code, _, errors = command("bench", bundle, "--out", out, "--duration", 0.02, "--threads", 1, "--name", "hot")
    assert code == 3
    assert "the device throttled, so these times cannot be used: cpu-thermal 0 at 100 °C (limit 99)" in errors
    assert load_profile(out).throttled
