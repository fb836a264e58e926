"""``ls-edge plan``: from profiles of devices to a peers.yaml, with latencies that a simulation confirms."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle, bundle_id_of, interface_of
from ls_edge.core.peers_file import load_peers
from ls_edge.device.profile import LinkFit, LinksDocument, LinkTimes, load_profile
from ls_edge.runtime.protocol.codecs import wire_bytes

TRACE = Path(__file__).parents[3] / "examples" / "traces" / "home.csv"


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
    found = planned(
        command, "--bundle", bundle, "--profiles", profile("a", 1.0), profile("b", 3.0), "--objective", "latency",
        "--link-ms", "2", "--mbit", "100000",
    )  # fmt: skip
    assert found["recommendation"] == "single"
    assert found["winner"] == "single"
    single = found["baselines"]["single"]
    assert (single["device"], single["placement"]) == ("a", {"a": ["stem", 0, 1, 2, 3, "head"]})
    assert single["latency_ms"] == pytest.approx(1.0 + 4 * 1.0 + 2 * 2.0 + 0.6, abs=0.1)
    assert found["expected"]["latency_ms"] == single["latency_ms"]  # all blocks on that device
    assert found["reason"].startswith(f"a alone, {single['latency_ms']:.1f} ms, against ")
    assert "for distribution (" in found["reason"]
    assert any("images a second against" in line for line in found["advantages"])
    assert found["solver"] == "heuristic"  # which peers have stem and head is not searched
    code, printed, _ = command(
        "plan", "--bundle", bundle, "--profiles", profile("a", 1.0), "--objective", "latency", "--no-simulation"
    )
    assert code == 0
    assert printed.startswith("One device is best: a alone, ")
    assert "there is no other device" in printed


def test_a_visit_is_counted_as_it_was_measured(command, bundle, profile):
    """Both boards run a block alone in 4 ms; in ``b`` that is 3 ms for the call and 1 ms for each block."""
    a, b = profile("a", 4.0), profile("b", 4.0)
    document = json.loads(b.read_text(encoding="utf-8"))
    document["batch"]["1"]["visits_ms"] = {str(n): dict.fromkeys(("p50", "p95", "min"), 3 + n) for n in (1, 2, 4)}
    b.write_text(json.dumps(document), encoding="utf-8")
    words = ("--bundle", bundle, "--objective", "latency", "--link-ms", "2", "--mbit", "100000", "--profiles")
    alone = [planned(command, *words, path)["baselines"]["single"]["latency_ms"] for path in (a, b)]
    assert alone[0] - alone[1] == pytest.approx((4 * 4) - (3 + 4 * 1), abs=0.1)


@pytest.mark.parametrize("objective", ["latency", "throughput", "survival"])
def test_a_plan_for_one_device_never_says_distribute(command, bundle, profile, objective):
    found = planned(command, "--bundle", bundle, "--profiles", profile("a", 1.0), "--objective", objective)
    assert (found["recommendation"], found["winner"]) == ("single", "single")
    single = found["baselines"]["single"]
    assert (single["throughput"], single["latency_ms"]) == (
        found["expected"]["throughput"], found["expected"]["latency_ms"],
    )  # fmt: skip
    assert found["baselines"]["copies"] is None


def test_independent_copies_win_where_tokens_take_longer_than_images(command, bundle, profile):
    """The links carry few tokens a second; a JPEG of the digits is much smaller."""
    words = ("--bundle", bundle, "--profiles", profile("a", 1.0), profile("b", 1.0), "--objective", "throughput")
    found = planned(command, *words, "--mbit", "1")
    assert (found["recommendation"], found["winner"]) == ("single", "copies")
    copies = found["baselines"]["copies"]
    assert copies["throughput"] == pytest.approx(2 * 1e3 / 5)
    assert copies["placement"] == {name: ["stem", 0, 1, 2, 3, "head"] for name in "ab"}
    assert found["reason"].startswith(f"{copies['throughput']:.0f} images a second, against ")
    assert "% more) and" in found["reason"]
    assert any("as JPEG" in line for line in found["assumptions"])
    assert any("around each engine call, a, b spends another 0.6 ms" in line for line in found["assumptions"])
    code, printed, _ = command("plan", *words, "--mbit", "1", "--no-simulation")
    assert code == 0
    assert printed.startswith("Independent copies of the whole model are best: ")


def test_the_throughput_of_a_fleet_is_compared_with_baselines(command, bundle, profile, tmp_path):
    out = tmp_path / "peers.yaml"
    found = planned(
        command, "--bundle", bundle, "--profiles", profile("fast", 2.0), profile("slow", 6.0), "--objective",
        "throughput", "--link-ms", "0.1", "--mbit", "100000", "--out", out,
    )  # fmt: skip
    assert found["recommendation"] == "distribute"
    assert found["replicas"] in (1, 2)
    expected = found["expected"]
    assert expected["throughput"] >= found["formula"]["throughput"] * 0.95
    for name in ("single", "round_robin", "equal_split", "trained_order"):
        assert expected["throughput"] >= 0.99 * found["baselines"][name]["throughput"]
    assert expected["policy"] == found["policy"]
    assert found["expected"]["energy_mj"] is None
    written = yaml.safe_load(out.read_text(encoding="utf-8"))
    held = {entry["name"]: entry["blocks"] for entry in written["peers"]}
    assert set(held) == {name for name, blocks in found["placement"].items() if blocks}
    assert all(entry["address"] == f"tcp://{entry['name']}:5555" for entry in written["peers"])


def test_a_model_that_fits_no_board_alone_is_distributed(command, bundle, profile, tmp_path):
    """Three blocks to a board at most; one that is known keeps its address and key."""
    base = tmp_path / "base.yaml"
    base.write_text(
        "peers:\n- {name: a, address: 'tcp://127.0.0.1:5601', blocks: [0], threads: 2}\n"
        "- {name: b, address: 'tcp://127.0.0.1:5602', blocks: [0]}\n",
        encoding="utf-8",
    )
    out = tmp_path / "peers.yaml"
    found = planned(
        command, "--bundle", bundle, "--profiles", profile("a", tenths=3), profile("b", tenths=3), "--objective",
        "latency", "--out", out, "--peers", base,
    )  # fmt: skip
    assert found["recommendation"] == "distribute"
    assert found["reason"] == "no device has memory for the whole model"
    assert found["baselines"]["single"] is None
    file = load_peers(out)
    assert {peer.name: (peer.address, peer.threads) for peer in file.peers} == {
        "a": ("tcp://127.0.0.1:5601", 2), "b": ("tcp://127.0.0.1:5602", None),
    }  # fmt: skip
    assert sorted(block for peer in file.peers for block in peer.blocks) == [0, 1, 2, 3]
    assert {peer.name: peer.blocks for peer in file.peers} == {k: tuple(v) for k, v in found["placement"].items()}


@pytest.mark.release
def test_energy_and_survival_are_objectives(command, bundle, profile):
    boards = profile("hungry", 1.0, watts=20.0), profile("frugal", 2.0, watts=4.0)
    found = planned(command, "--bundle", bundle, "--profiles", *boards, "--objective", "energy")
    assert found["placement"]["frugal"] == ["stem", 0, 1, 2, 3, "head"]  # the source is as hungry as it is fast
    assert found["formula"]["energy_mj"] == pytest.approx((4 * 2.0 + 1.0) * 4.0)
    assert found["expected"]["energy_mj"] == pytest.approx(found["formula"]["energy_mj"], rel=0.01)
    boards = [profile(name, 1.0) for name in "abc"]
    found = planned(
        command, "--bundle", bundle, "--profiles", *boards, "--objective", "survival", "--replicas", "2",
        "--max-replicas", "2", "--loss-probability", "0.1",
    )  # fmt: skip
    assert found["formula"]["whole_share"] == pytest.approx(0.99)
    assert found["recommendation"] == "single"
    assert found["winner"] == "copies"  # all three boards have the whole model, not two of them each block
    assert found["baselines"]["copies"]["whole_share"] == pytest.approx(0.999)
    assert found["baselines"]["single"]["whole_share"] == 0.9


@pytest.mark.release
def test_the_batch_comes_from_the_peers(command, bundle, profile, measured, tmp_path):
    """Eight at once take three times as long as one: taken for throughput, not for a request alone."""
    path = profile("a", 2.0)
    document = json.loads(path.read_text(encoding="utf-8"))
    one = document["batch"]["1"]
    document["batch"]["8"] = one | {
        key: {"p50": 3 * ms, "p95": 3 * ms, "min": 3 * ms} for key, ms in (("stem_ms", 0.5), ("head_ms", 0.5))
    } | {"blocks_ms": [{"p50": 6.0, "p95": 6.0, "min": 6.0}] * 4, "visits_ms": {}}  # fmt: skip
    path.write_text(json.dumps(document), encoding="utf-8")
    out, words = tmp_path / "peers.yaml", ("--bundle", bundle, "--profiles", f"a,b={path}", "--link-ms", "0.1")
    many = planned(command, *words, "--objective", "throughput", "--out", out)
    assert (many["max_batch"], many["concurrency"]) == ({"a": 8, "b": 8}, 64)
    assert {entry["max_batch"] for entry in yaml.safe_load(out.read_text(encoding="utf-8"))["peers"]} == {8}
    assert many["baselines"]["single"]["throughput"] == pytest.approx(1e3 * 8 / (4 * 6.0), rel=0.05)
    assert many["baselines"]["copies"]["throughput"] == pytest.approx(2 * 1e3 * 8 / (3 + 4 * 6.0), rel=0.05)
    assert many["formula"]["throughput"] == pytest.approx(1e3 * 2 / (4 * 6.0 / 8))
    alone = planned(command, *words, "--objective", "latency", "--out", out, "--overwrite")
    assert alone["max_batch"] == {"a": 1, "b": 1}
    assert alone["baselines"]["single"]["latency_ms"] == pytest.approx(1.0 + 4 * 2.0 + 0.2 + 0.6, abs=0.1)
    four = planned(command, *words, "--objective", "throughput", "--batch", "4", "--no-simulation")
    assert four["formula"]["throughput"] == pytest.approx(1e3 * 2 / (4 * (2.0 + 4.0 * 3 / 7) / 4))
    assert any(
        "batches of up to 4: their time is estimated from batches of 1, 8" in line for line in four["assumptions"]
    )
    base = tmp_path / "base.yaml"
    base.write_text(
        "peers:\n- {name: a, address: 'tcp://127.0.0.1:5601', blocks: [0], max_batch: 8}\n"
        "- {name: b, address: 'tcp://127.0.0.1:5602', blocks: [0]}\n",
        encoding="utf-8",
    )
    known = planned(
        command, *words, "--objective", "throughput", "--no-simulation", "--out", out, "--peers", base, "--overwrite"
    )
    assert known["max_batch"] == {"a": 8, "b": 1}


def test_zones_links_and_several_devices_of_a_kind_are_planned(command, bundle, profile, tmp_path):
    board = profile("orin", 1.0)
    model = Bundle.open(bundle).manifest.model_id
    names = ("laptop", "o1", "o2", "o3")
    transfers = [
        LinkTimes(one, two, "raw", 2048, 9, 5.0 if "o3" in (one, two) else 0.5, 6.0)
        for one in names for two in names if one != two
    ]  # fmt: skip
    links = tmp_path / "links.json"
    links.write_bytes(
        msgspec.json.encode(LinksDocument(1, model, "laptop", transfers, [LinkFit("o1", "o2", None, None)], []))
    )
    found = planned(
        command, "--bundle", bundle, "--profiles", f"o1,o2,o3={board}", "--links", links, "--objective", "latency",
        "--replicas", "2", "--zones", "left=o1,o2",
    )  # fmt: skip
    assert found["placement"]["o3"] == ["stem", 0, 1, 2, 3, "head"]  # the only one in another zone
    blocks = [part for name in ("o1", "o2") for part in found["placement"][name] if part not in ("stem", "head")]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert "o3" not in found["route"]
    assert not any("Mbit/s" in line for line in found["assumptions"])


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_plan_counts_tokens_in_the_codec_and_writes_it(command, bundle, profile, tmp_path, codec):
    """Two boards have room for half of the blocks each, so tokens are transferred three times."""
    out, mbit = tmp_path / "peers.yaml", 10.0
    tokens = Bundle.open(bundle).manifest.tokens
    words = (
        "--bundle", bundle, "--profiles", profile("a", tenths=2), profile("b", tenths=2), "--objective", "latency",
        "--mbit", mbit, "--no-simulation",
    )  # fmt: skip
    raw, small = planned(command, *words), planned(command, *words, "--codec", codec, "--out", out)
    saved = wire_bytes("raw", tokens.count, tokens.dim) - wire_bytes(codec, tokens.count, tokens.dim)
    difference = raw["formula"]["latency_ms"] - small["formula"]["latency_ms"]
    assert difference == pytest.approx(3 * saved * 8e-3 / mbit, abs=1e-3)
    assert {entry["codec"] for entry in yaml.safe_load(out.read_text(encoding="utf-8"))["peers"]} == {codec}


def test_a_plan_takes_the_links_as_measured_in_the_codec(command, bundle, profile, tmp_path):
    names, links = ("laptop", "a", "b"), tmp_path / "links.json"
    times = {"raw": 5.0, "fp16": 3.0}
    transfers = [
        LinkTimes(one, two, codec, 2048, 9, ms, ms)
        for one in names for two in names if one != two for codec, ms in times.items()
    ]  # fmt: skip
    model = Bundle.open(bundle).manifest.model_id
    links.write_bytes(msgspec.json.encode(LinksDocument(1, model, "laptop", transfers, [], [])))
    words = (
        "--bundle", bundle, "--profiles", profile("a", tenths=2), profile("b", tenths=2), "--objective", "latency",
        "--links", links, "--no-simulation", "--codec",
    )  # fmt: skip
    raw, half, missing = (planned(command, *words, codec) for codec in ("raw", "fp16", "int8"))
    assert raw["formula"]["latency_ms"] - half["formula"]["latency_ms"] == pytest.approx(3 * (5.0 - 3.0))
    assert any("none was measured as int8: some of a, b" in line for line in missing["assumptions"])
    assert not any("none was measured as" in line for line in half["assumptions"])


def test_unusable_profiles_and_options_are_one_line(command, bundle, profile, tmp_path, make_bundle):
    a, b = profile("a"), profile("b")
    other = make_bundle(tmp_path / "other", seed=9)
    hot = profile("hot", throttled_by=["cpu-thermal at 100"])
    for arguments, code, message in (
        ((bundle, a, a), 2, "two profiles have the name 'a'"),
        ((other, a), 1, "profile this bundle on that device"),
        (
            (bundle, tmp_path / "none.json"),
            1,
            "check the path, or make it with 'ls-edge profile",
        ),
        ((bundle, hot), 1, "hot throttled while it was measured (cpu-thermal at 100)"),
        ((bundle, a, "--replicas", "2"), 2, "8 copies; the memory of the devices has room for 4"),
        ((bundle, a, b, "--objective", "energy"), 2, "which a, b did not report"),
        ((bundle, a, "--loss-probability", "2"), 2, "'2' cannot be read"),
        ((bundle, a, "--loss-probability", "c=0.1"), 2, "names 'c', which is neither a device nor a zone; there are a"),
        ((bundle, a, "--zones", "rack"), 2, "write ZONE=NAME"),
        ((bundle, a, "--zones", "rack=c"), 2, "--zones names 'c'"),
        ((bundle, a, "--peers", a), 2, "give --out FILE as well"),
        ((bundle, f"a b={a}"), 2, "cannot name a device"),
        ((bundle, f"source={a}"), 2, "'source' names the process that has the images"),
    ):
        bundle_, *rest = arguments
        wanted = () if "--objective" in rest else ("--objective", "latency")
        found, _, errors = command("plan", "--bundle", bundle_, "--profiles", *rest, *wanted)
        assert (found, message in errors) == (code, True), errors
    assert planned(
        command, "--bundle", bundle, "--profiles", hot, "--objective", "latency", "--allow-throttled"
    )["placement"]["hot"]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"schema": 1, "x":' + b"[" * 100_000, b'{"schema":' + b"9" * 5000 + b"}", None],
)
@pytest.mark.parametrize("flag", ["--profiles", "--links"])
@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_deep_long_and_endless_documents_are_refused(command, bundle, profile, tmp_path, name, flag, content):
    path = tmp_path / "given.json" if content else "/dev/zero"
    if content:
        path.write_bytes(content)
    rest = ("--objective", "latency") if name == "plan" else ("--devices", "2", "--requests", "1")
    files = ("--profiles", path) if flag == "--profiles" else ("--profiles", profile("a"), "--links", path)
    code, _, errors = command(name, "--bundle", bundle, *files, *rest)
    assert code == 1
    assert errors.startswith(f"ls-edge: {path}")
    assert "nested too deeply, or with numbers of thousands of digits" in errors or "larger than 64000000 byt" in errors
    assert errors.count("\n") == 1


def test_a_plan_respects_the_bands_of_the_bundle(command, make_bundle, profile, tmp_path):
    """Every block has its place: only the trained order is simulated, and each board gets a stretch of it."""
    folder = make_bundle(tmp_path / "fixed")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    opened = Bundle.open(folder)
    bands = Bands.fixed(4)
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
    assert found["recommendation"] == "distribute"


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
def test_a_target_names_the_smallest_fleet_that_reaches_it(command, bundle, profile):
    flags = ("--bundle", bundle, "--profiles", profile("a", 1.0, watts=5.0), "--churn", "up=9s,down=1s")
    code, printed, errors = command("plan", *flags, "--target", "95%", "--budget-ms", 100, "--json")
    assert code == 0, errors
    found = json.loads(printed)
    assert found["answer"].startswith("2 devices with 2 copies of each block reach whole=0.95: ")
    met = next(one for one in found["fleets"] if one["verdict"] == "met")
    assert (met["devices"], met["watts"]) == (2, 10.0)
    assert found["churn"] == ["up=9s,down=1s"]
    assert errors.startswith("plan: simulating 1 device, 1 copy of each block (0/16)\n")


@pytest.mark.leaks_ok("multiprocessing keeps the process that cleans up after the others")
def test_the_table_has_the_results_and_intervals_of_what_was_asked_for(command, bundle, profile):
    flags = ("--bundle", bundle, "--profiles", profile("a", 1.0), "--churn", "up=9s,down=1s", "--budget-ms", 100)
    wanted = ("--target", "answered=0.5", "--target", "p99=1s", "--target", "answered=0.4", "--rate", 5)
    code, printed, errors = command("plan", *flags, *wanted)
    assert code == 0, errors
    sentence, heads, first, *_ = printed.splitlines()
    assert sentence.startswith("1 device with 1 copy of each block reaches answered=0.5 and p99=1000ms and ")
    assert re.split(r"\s{2,}", heads.strip())[:-2] == [
        "devices", "copies", "target", "answered", "interval", "p99", "interval", "formula"
    ]  # fmt: skip
    _, _, _, share, interval, p99, range_ms, *_ = re.split(r"\s{2,}", first.strip())
    assert sentence.count(f"{share} get an answer, 95 % interval {interval}") == 1
    assert f"p99 {p99}, 95 % interval {range_ms}, with losses in" in sentence


def test_churn_is_the_loss_probability_of_every_device(command, bundle, profile):
    flags = ("--bundle", bundle, "--profiles", profile("a"), profile("b"), "--objective", "survival", "--no-simulation")
    by_churn = planned(command, *flags, "--churn", "up=57m,down=3m")
    assert by_churn == planned(command, *flags, "--loss-probability", "0.05")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --objective latency, throughput, energy or survival, or --target 0.999 with --churn"),
        (("--target", "0.9"), "--target needs --churn up=1h,down=3m"),
        (("--target", "0.9", "--churn", "none.csv"), "--churn none.csv: cannot be read"),
        (("--target", "0.9", "--churn", TRACE), "a trace as --churn is for simulate; give mean times"),
        (("--target", "0.9", "--objective", "latency"), "--target tries numbers of devices and copies; leave --obj"),
        (("--target", "0.9", "--churn", "up=1h,down=3m", "--max-replicas", 2), "leave --max-replicas out"),
        (("--target", "0.9", "--churn", "up=1h,down=3m", "--zones", "x=a"), "leave --zones out"),
        (("--target", "0.9", "--churn", "up=1h,down=3m", "--loss-probability", "0.1"), "leave --loss-probability out"),
        (("--target", "0.9", "--churn", "up=1h,down=3m", "--max-skips", 99), "max_skips 99 is larger than the"),
        (("--objective", "latency", "--rate", 3), "--rate is for --target; leave --rate out"),
        (("--objective", "latency", "--max-skips", 3), "--max-skips is for --target; leave --max-skips out"),
        (("--objective", "survival", "--churn", "up=9h,down=3m,of=source"), "zones and sources in --churn are for"),
        (("--objective", "survival", "--churn", "up=9h,down=1h", "--loss-probability", "0.2"), "leave one out"),
        (("--target", "2", "--churn", "up=1h,down=3m"), "--target '2' cannot be read; write a share below 1"),
    ],
)
def test_an_incomplete_question_is_one_line(command, bundle, profile, flags, message):
    code, printed, errors = command("plan", "--bundle", bundle, "--profiles", profile("a"), *flags)
    assert (code, printed) == (2, "")
    assert message in errors
