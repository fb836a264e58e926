"""``ls-edge profile`` as a user types it."""

import json

import pytest

from ls_edge.device.profile import load_links, load_profile
from ls_edge.device.sensors import Sensors
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer


def test_a_profile_has_the_times_of_every_part(command, bundle, tmp_path):
    out = tmp_path / "profile.json"
    code, printed, errors = command(
        "profile",
        bundle,
        "--out",
        out,
        "--name",
        "here",
        "--batch",
        "1,2",
        "--duration",
        0.05,
        "--threads",
        1,
        "--json",
    )
    assert code in (0, 3), errors  # 3 where this machine throttles
    found = load_profile(out)
    assert (found.device.name, list(found.batch)) == ("here", ["1", "2"])
    assert json.loads(printed) == json.loads(out.read_text(encoding="utf-8"))
    assert "profile: idle (0/8)" in errors


def test_tables_have_the_times_of_each_batch_size(command, bundle, tmp_path):
    code, printed, _ = command(
        "profile", bundle, "--out", tmp_path / "p.json", "--duration", 0.02, "--threads", 1, "--name", "a"
    )
    assert code in (0, 3)
    assert "chain" in printed
    assert f"written to {tmp_path / 'p.json'}" in printed


def test_wrong_options_are_refused(command, bundle, tmp_path, complaints):
    for arguments, message in (
        (("--out", tmp_path / "p.json", "--batch", "1,x"), "'1,x' is not a list of numbers"),
        (("--out", tmp_path / "p.json", "--batch", "0"), "from 1 to 1024"),
        (("--out", tmp_path), "is a folder"),
        (("--out", tmp_path / "p.json", "--name", "no name"), "give one with --name"),
    ):
        code, _, errors = command("profile", bundle, *arguments)
        assert code == 2
        assert message in errors
    assert not (tmp_path / "p.json").exists()


@pytest.mark.release
def test_links_between_peers_are_measured_in_every_codec(command, bundle, write_peers, serve, tmp_path):
    path = write_peers({"a": [0, 1], "b": [2, 3]})
    for name in "ab":
        serve(Peer.open(path, name, bundle))
    out = tmp_path / "links.json"
    code, printed, errors = command("profile", bundle, "--links", "--peers", path, "--out", out, "--transfers", 3)
    assert code == 0, errors
    found = load_links(out)
    assert {(one.origin, one.to) for one in found.transfers} >= {("a", "b"), ("b", "a")}
    assert {one.transfers for one in found.transfers} == {3}
    assert f"written to {out}" in printed
    assert "raw p50 (p95)" in printed


def test_a_peer_measures_what_it_serves(tmp_path, bundle, command):
    cluster = LocalCluster(
        tmp_path / "fleet", bundle, {"a": (1, 2)}, sources=["laptop"], keys=True, stores=True, each={"max_batch": 2}
    )
    out = tmp_path / "a.json"
    with cluster as peers:
        peers.wait_settled()
        ask = ["--peers", peers.path, "--secret-key", peers.secret_key("laptop")]
        code, _, errors = command("profile", *ask, "--name", "a", "--out", out, "--duration", 0.05)
        assert (code, "a: a is not serving a bundle yet" in errors) == (1, True), errors
        assert command("push", "--bundle", bundle, *ask)[0] == 0
        code, printed, errors = command("profile", *ask, "--name", "a", "--out", out, "--duration", 0.05)
        assert code in (0, 3), errors
    assert f"written to {out}" in printed
    found = load_profile(out)
    assert (found.device.name, list(found.batch), found.threads) == ("a", ["1", "2"], 1)
    assert [part.part for part in found.parts] == ["block 1", "block 2"]
    for times in found.batch.values():
        assert (times.stem_ms, times.head_ms, times.chain_ms, len(times.blocks_ms)) == (None, None, None, 4)
        assert times.blocks_ms[0].p50 == pytest.approx((times.blocks_ms[1].p50 + times.blocks_ms[2].p50) / 2)
    plan = ["plan", "--bundle", bundle, "--profiles", out, "--objective", "latency", "--allow-throttled", "--json"]
    code, _, errors = command(*plan)
    assert (code, "stem and head were not measured: peers have none" in errors) == (2, True)
    here = tmp_path / "laptop.json"
    assert command("profile", bundle, "--out", here, "--duration", 0.02, "--name", "laptop")[0] in (0, 3)
    code, printed, errors = command(*plan, "--source", here)
    assert code == 0, errors
    assert any(
        "stem and head are slower on a than on laptop by the same factor" in one
        for one in json.loads(printed)["assumptions"]
    )


def test_wrong_options_of_links_are_refused(command, bundle, write_peers, tmp_path):
    path = write_peers({"a": [0]})
    out = tmp_path / "links.json"
    for arguments, code, message in (
        ((bundle, "--links"), 2, "give --peers peers.yaml"),
        ((bundle, "--peers", path), 2, "leave out BUNDLE or --peers"),
        (("--peers", path, "--name", "a", "--batch", "2"), 2, "--batch: a peer measures the engines that it serves"),
        (("--peers", path, "--name", "b"), 2, "unknown peer 'b'"),
        (("--peers", path, "--name", "a", "--duration", "61"), 2, "at most 60 seconds"),
        (("--peers", path, "--name", "a"), 1, "a: nobody answers at"),
        ((), 2, "name the folder of a bundle to profile"),
        ((tmp_path / "none", "--links", "--peers", path), 1, "none is not a bundle"),
    ):
        found, _, errors = command("profile", *arguments, "--out", out)
        assert (found, message in errors) == (code, True), errors
    assert not out.exists()


def test_a_device_that_throttles_is_marked_and_refused_by_plan(command, bundle, tmp_path, monkeypatch):
    """The sensors are those of a board whose processor is at its limit."""
    zone = tmp_path / "board/sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    for name, text in (("type", "cpu-thermal"), ("temp", "99500"), ("trip_point_0_type", "passive"),
                       ("trip_point_0_temp", "99000")):  # fmt: skip
        (zone / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr("ls_edge.engines.profiling.Sensors", lambda: Sensors(tmp_path / "board"))
    out = tmp_path / "hot.json"
    code, _, errors = command("profile", bundle, "--out", out, "--duration", 0.02, "--threads", 1, "--name", "hot")
    assert code == 3
    assert "the device throttled, so these times cannot be used: cpu-thermal at 100" in errors
    assert load_profile(out).throttled
    code, _, errors = command("plan", "--bundle", bundle, "--profiles", out, "--objective", "latency")
    assert code == 1
    assert "hot throttled while it was measured" in errors
