"""``ls-edge plan``: from profiles of devices to a recommendation and a peers.yaml."""

import json
import re

import msgspec
import pytest
import yaml

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle, bundle_id_of, interface_of
from ls_edge.core.peers_file import load_peers
from ls_edge.device.profile import load_profile
from ls_edge.runtime.protocol.codecs import codec_of


@pytest.fixture
def profile(measured, tmp_path):
    """Write the profile of a board whose blocks take ``block_ms`` and need a tenth of its memory ``tenths`` times."""

    def write(name, block_ms=1.0, *, tenths=100, watts=None, throttled_by=(), **changes):
        document = msgspec.to_builtins(measured)
        times = document["batch"]["1"]
        for key, ms in (("stem_ms", 0.5), ("head_ms", 0.5)):
            times[key] = {"p50": ms, "p95": ms, "min": ms}
        times["blocks_ms"] = [{"p50": block_ms, "p95": block_ms, "min": block_ms}] * 4
        times["visits_ms"] = {str(n): dict.fromkeys(("p50", "p95", "min"), n * block_ms) for n in (1, 2, 4)}
        for part in document["parts"]:
            part["file_bytes"], part["resident_bytes"] = 1000, 1000
        document["memory_bytes"] = 6000
        document["device"] |= {"name": name, "available_bytes": 100 * tenths * 125 // 10}
        document |= {
            "power_watts": watts,
            "throttled": bool(throttled_by),
            "throttled_by": list(throttled_by),
        } | changes
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        load_profile(path)
        return path

    return write


def planned(command, *arguments):
    code, printed, errors = command("plan", *arguments, "--json")
    assert code == 0, errors
    return json.loads(printed)


def test_one_fast_board_is_better_alone_for_latency(command, bundle, profile):
    boards = profile("a", 1.0), profile("b", 3.0)
    words = ("--bundle", bundle, "--objective", "latency", "--profiles")
    found = planned(command, *words, *boards, "--mbit", "100000")
    assert found["recommendation"] == "one"
    single = found["baselines"]["single"]
    assert single["placement"] == {"a": ["stem", 0, 1, 2, 3, "head"]}
    assert single["latency_ms"] == pytest.approx(1.0 + 4 * 1.0 + 2 * 0.3 + 0.6, abs=0.1)
    assert found["expected"]["latency_ms"] == single["latency_ms"]  # all blocks on that device
    assert found["reason"].startswith(f"a alone, {single['latency_ms']:.1f} ms, ")
    assert found["solver"] == "heuristic"  # which peers have stem and head is not searched
    code, printed, _ = command("plan", *words, boards[0])
    assert code == 0
    assert printed.startswith("One device: a alone, ")
    assert "there is no other device" in printed
    assert re.search(r"^source +stem, head +1$", printed, re.M) is None


def test_a_visit_is_counted_as_it_was_measured(command, bundle, profile):
    """Both boards run a block alone in 4 ms; in ``b`` that is 3 ms for the call and 1 ms for each block."""
    a, b = profile("a", 4.0), profile("b", 4.0)
    document = json.loads(b.read_text(encoding="utf-8"))
    document["batch"]["1"]["visits_ms"] = {str(n): dict.fromkeys(("p50", "p95", "min"), 3 + n) for n in (1, 2, 4)}
    b.write_text(json.dumps(document), encoding="utf-8")
    words = ("--bundle", bundle, "--objective", "latency", "--mbit", "100000", "--profiles")
    alone = [planned(command, *words, path)["baselines"]["single"]["latency_ms"] for path in (a, b)]
    assert alone[0] - alone[1] == pytest.approx((4 * 4) - (3 + 4 * 1), abs=0.1)


def test_independent_copies_win_where_tokens_take_longer_than_images(command, bundle, profile):
    """The links carry few tokens a second; a JPEG of the digits is much smaller."""
    words = ("--bundle", bundle, "--profiles", profile("a", 1.0), profile("b", 1.0), "--objective", "throughput")
    found = planned(command, *words, "--mbit", "1")
    assert found["recommendation"] == "replicate"
    copies = found["baselines"]["replicate"]
    assert copies["throughput"] == pytest.approx(2 * 1e3 / 5)
    assert copies["placement"] == found["placement"] == {name: ["stem", 0, 1, 2, 3, "head"] for name in "ab"}
    assert found["reason"].startswith(f"{copies['throughput']:.0f} images a second, against ")
    assert any("as JPEG" in line for line in found["assumptions"])
    code, printed, _ = command("plan", *words, "--mbit", "1")
    assert code == 0
    assert printed.startswith("Replicate (every device holds all blocks): ")


def test_the_throughput_of_a_fleet_is_compared_with_baselines(command, bundle, profile, tmp_path):
    """Three quarters of the work for the board that is three times as fast."""
    out = tmp_path / "peers.yaml"
    boards = (  # no room for stem and head
        profile("fast", 2.0, tenths=5, engine="tensorrt"),
        profile("slow", 6.0, tenths=5),
    )
    words = ("--bundle", bundle, "--profiles", *boards, "--objective", "throughput", "--mbit", "100000")
    found = planned(command, *words, "--out", out)
    assert found["recommendation"] == "split"
    assert found["expected"]["throughput"] == pytest.approx(1e3 / (3 * 2.0))
    for name in ("single", "round_robin", "equal_split"):
        assert found["expected"]["throughput"] > found["baselines"][name]["throughput"]
    assert (found["expected"]["energy_mj"], found["solver"]) == (None, "exact")
    assert re.search(r"^source +stem, head +1$", command("plan", *words)[1], re.M)
    written = yaml.safe_load(out.read_text(encoding="utf-8"))
    held = {entry["name"]: entry["blocks"] for entry in written["peers"]}
    assert {name: len(blocks) for name, blocks in found["placement"].items()} == {"fast": 3, "slow": 1}
    assert set(held) == {"fast", "slow"}
    assert all(entry["address"] == f"tcp://{entry['name']}:5555" for entry in written["peers"])
    assert {entry["name"]: entry.get("engine") for entry in written["peers"]} == {"fast": "tensorrt", "slow": None}


def test_a_known_file_keeps_addresses_and_tokens_have_its_codec(command, bundle, profile, tmp_path):
    """Two blocks to a board at most, so tokens are transferred three times; the source gets them raw."""
    codec = "int8"
    base, out = tmp_path / "base.yaml", tmp_path / "peers.yaml"
    base.write_text(
        f"peers:\n- {{name: a, address: 'tcp://127.0.0.1:5601', blocks: [0], threads: 2, codec: {codec}}}\n"
        f"- {{name: '2e3', address: 'tcp://127.0.0.1:5602', blocks: [0], codec: {codec}}}\n"
        "- {name: unmeasured, address: 'tcp://127.0.0.1:5603', blocks: [1]}\n",
        encoding="utf-8",
    )
    found = planned(
        command, "--bundle", bundle, "--profiles", profile("a", tenths=3), profile("2e3", tenths=3), "--objective",
        "latency", "--mbit", 10, "--out", out, "--peers", base,
    )  # fmt: skip
    assert found["recommendation"] == "split"
    assert found["reason"].startswith("no device has memory for the whole model; split over 2 devices: ")
    tokens = Bundle.open(bundle).manifest.tokens
    wire_ms = [codec_of(to).wire_bytes(tokens.count, tokens.dim) * 8e-3 / 10 for to in (codec, codec, "raw")]
    assert found["expected"]["latency_ms"] == pytest.approx(1.0 + 4 * 1.0 + 2 * 0.6 + 3 * 0.3 + sum(wire_ms), abs=0.01)
    file = load_peers(out)
    assert {peer.name: (peer.address, peer.threads, peer.codec) for peer in file.peers} == {
        "a": ("tcp://127.0.0.1:5601", 2, codec), "2e3": ("tcp://127.0.0.1:5602", None, codec),
        "unmeasured": ("tcp://127.0.0.1:5603", None, "raw"),
    }  # fmt: skip
    held = {k: tuple(v) for k, v in found["placement"].items()} | {"unmeasured": (1,)}
    assert {peer.name: peer.blocks for peer in file.peers} == held


def test_links_come_from_a_run(command, bundle, profile, tmp_path):
    """Two boards of a kind, of which one has a slow link: it gets no blocks."""
    path, out = tmp_path / "run.json", tmp_path / "peers.yaml"
    peers = {"o1": {"wire_ms_p50": 0.5}, "o2": {"wire_ms_p50": 50.0}}
    document = {"bundle_id": Bundle.open(bundle).manifest.bundle_id, "hops": {"wire_ms_p50": 0.5}, "peers": peers}
    path.write_text(json.dumps(document), encoding="utf-8")
    words = ("--bundle", bundle, "--profiles", f"o1,o2={profile('orin', 1.0)}", "--objective", "latency")
    found = planned(command, *words, "--run", path, "--out", out)
    assert found["placement"] == {"o1": ["stem", 0, 1, 2, 3, "head"], "o2": []}
    assert found["expected"]["latency_ms"] == pytest.approx(1.0 + 4 * 1.0 + 2 * 0.5, abs=0.02)
    assert not any("Mbit/s" in line for line in found["assumptions"])
    assert "# Without blocks, so left out: o2" in out.read_text(encoding="utf-8")


def test_energy_is_an_objective(command, bundle, profile):
    boards = profile("hungry", 1.0, watts=20.0), profile("frugal", 2.0, watts=4.0)
    found = planned(command, "--bundle", bundle, "--profiles", *boards, "--objective", "energy")
    assert found["placement"]["frugal"] == ["stem", 0, 1, 2, 3, "head"]  # the source is as hungry as it is fast
    assert found["expected"]["energy_mj"] == pytest.approx((4 * 2.0 + 1.0) * 4.0)


def test_the_batch_is_the_best_one_of_the_profile(command, bundle, profile, tmp_path):
    """Eight at once take three times as long as one: taken for throughput, not for a request alone."""
    path = profile("a", 2.0)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["batch"]["8"] = document["batch"]["1"] | {
        key: {"p50": 3 * ms, "p95": 3 * ms, "min": 3 * ms} for key, ms in (("stem_ms", 0.5), ("head_ms", 0.5))
    } | {"blocks_ms": [{"p50": 6.0, "p95": 6.0, "min": 6.0}] * 4, "visits_ms": {}}  # fmt: skip
    path.write_text(json.dumps(document), encoding="utf-8")
    out, words = tmp_path / "peers.yaml", ("--bundle", bundle, "--profiles", f"a,b={path}", "--mbit", "100000")
    many = planned(command, *words, "--objective", "throughput", "--out", out)
    assert (many["max_batch"], many["concurrency"]) == ({"a": 8, "b": 8}, 64)
    assert {entry["max_batch"] for entry in yaml.safe_load(out.read_text(encoding="utf-8"))["peers"]} == {8}
    assert many["baselines"]["replicate"]["throughput"] == pytest.approx(2 * 1e3 * 8 / (3 + 4 * 6.0))
    alone = planned(command, *words, "--objective", "latency", "--out", out, "--overwrite")
    assert alone["max_batch"] == {"a": 1, "b": 1}


def test_unusable_profiles_and_options_are_one_line(command, bundle, profile, tmp_path, make_bundle):
    a, b = profile("a"), profile("b")
    other = make_bundle(tmp_path / "other", seed=9)
    for arguments, code, message in (
        ((bundle, a, a), 2, "'a' names another profile, too"),
        ((other, a), 1, "measure this bundle on that device"),
        ((bundle, tmp_path / "none.json"), 1, "No such file or directory; make it with 'ls-edge"),
        ((bundle, a, "--run", a), 1, "is not a run"),
        ((bundle, a, "--replicas", "2"), 2, "2 holders of each block need as many devices, there is 1 device; add"),
        ((bundle, a, b, "--objective", "energy"), 2, "which a, b did not report"),
        ((bundle, a, "--peers", a), 2, "give --out FILE as well"),
    ):
        bundle_, *rest = arguments
        wanted = () if "--objective" in rest else ("--objective", "latency")
        found, _, errors = command("plan", "--bundle", bundle_, "--profiles", *rest, *wanted)
        assert (found, message in errors) == (code, True), errors


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, None],
)
@pytest.mark.parametrize("flag", ["--profiles", "--run"])
def test_deep_long_and_endless_documents_are_refused(command, bundle, profile, tmp_path, flag, content):
    path = tmp_path / "given.json" if content else "/dev/zero"
    if content:
        path.write_bytes(content)
    files = ("--profiles", path) if flag == "--profiles" else ("--profiles", profile("a"), "--run", path)
    code, _, errors = command("plan", "--bundle", bundle, *files, "--objective", "latency")
    assert code == 1
    assert errors.startswith(f"ls-edge: {path}")
    assert errors.count("\n") == 1


def test_a_plan_respects_the_bands_of_the_bundle(command, make_bundle, profile, tmp_path):
    """Every block has its place, and each board gets a stretch of the trained order."""
    folder = make_bundle(tmp_path / "fixed")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    opened = Bundle.open(folder)
    bands = Bands.ladder(4)[0]
    interface = interface_of(
        opened.manifest.image, opened.manifest.tokens, bands, opened.manifest.classes, needs_slot=False
    )
    manifest |= {
        "bands": bands.to_json(),
        "bundle_id": bundle_id_of(interface, "fp32", opened.manifest.parts),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    boards = [profile(name, 1.0, tenths=3, model_id=manifest["model_id"]) for name in "ab"]
    found = planned(command, "--bundle", folder, "--profiles", *boards, "--objective", "throughput")
    assert sorted(found["placement"].values()) == [[0, 1], [2, 3]]
    assert found["policy"] == "sequential"
    assert found["recommendation"] == "split"
