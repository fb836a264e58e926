"""``ls-edge simulate``: latency and throughput of a fleet from profiles, and errors about its options."""

import json

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.protocol.codecs import codec_of


@pytest.fixture(scope="module")
def profile(measured, tmp_path_factory):
    """A profile of this machine in which every block takes 2 ms, stem and head 1 ms together."""
    document = msgspec.to_builtins(measured)
    document["device"]["name"] = "board"
    times = document["batch"]["1"]
    for key in ("stem_ms", "head_ms"):
        times[key] = {"p50": 0.5, "p95": 0.5, "min": 0.5}
    times["blocks_ms"] = [{"p50": 2.0, "p95": 2.0, "min": 2.0}] * len(times["blocks_ms"])
    times["visits_ms"] = {}
    path = tmp_path_factory.mktemp("profiles") / "board.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_fleet_has_json_and_a_table(command, bundle, profile):
    """Twenty boards at two sites; each runs an image in 9 ms."""
    flags = ("--bundle", bundle, "--profiles", profile, "--devices", 20, "--requests", 2000)
    code, printed, errors = command("simulate", *flags, "--json")
    assert code == 0, errors
    found = json.loads(printed)
    assert (found["devices"], found["requests"], found["answered"], found["failed"]) == (20, 2000, 2000, 0)
    assert (found["sites"], found["degraded"], found["top1"], found["seed"]) == (2, 0, None, 0)
    assert found["bundle_id"] == Bundle.open(bundle).manifest.bundle_id
    assert found["latency_ms"]["p50"] >= 4 * 2 + 1
    assert found["throughput"] == pytest.approx(20 * 1e3 / 9, rel=0.15)
    assert found["busy"]["board"] > 0.8
    assert "simulate:" in errors
    code, printed, _ = command("simulate", *flags)
    assert code == 0
    assert "2,000 of 2,000" in printed
    assert "assumed: no device is lost (--churn)" in printed


@pytest.mark.leaks_ok("vl-convert keeps its threads")
def test_losses_change_the_exit_code_and_are_reported(command, bundle, profile, tmp_path):
    pytest.importorskip("altair")
    report = tmp_path / "fleet.html"
    flags = (
        "--bundle", bundle, "--profiles", profile, "--devices", 2, "--requests", 300, "--rate", 5,
        "--churn", "up=5s,down=15s",
    )  # fmt: skip
    code, printed, errors = command("simulate", *flags, "--report", report, "--json")
    assert code == 3, errors
    found = json.loads(printed)
    assert found["answered"] + found["failed"] == 300
    assert found["losses"] > 0
    assert 0.05 < found["up_share"] < 0.6
    page = report.read_text(encoding="utf-8")
    assert "A simulated fleet" in page
    assert f"of {found['requests']}, " in page
    assert page.count('type="application/json"') == 2
    assert "there is no accuracy" in page


def test_slow_links_and_a_run_change_the_latency(command, bundle, profile, tmp_path):
    """One board with everything: an image goes out and logits come back, as long as the stem stays at the source."""

    def latency(*flags):
        words = ("--devices", 1, "--requests", 20, "--rate", 1)
        code, printed, errors = command("simulate", "--bundle", bundle, "--profiles", profile, *words, *flags, "--json")
        assert code == 0, errors
        return json.loads(printed)["latency_ms"]["p50"]

    tokens = Bundle.open(bundle).manifest.tokens
    run = tmp_path / "run.json"
    hops = {"wire_ms_p50": 30.0, "codec_ms_p50": 0.0}
    document = {"bundle_id": Bundle.open(bundle).manifest.bundle_id, "hops": hops, "peers": {"board": hops}}
    run.write_text(json.dumps(document), encoding="utf-8")
    usual, slow, measured = latency(), latency("--mbit", 1), latency("--run", run)
    assert usual < slow < usual + 2 * codec_of("raw").wire_bytes(tokens.count, tokens.dim) * 8e-3
    assert measured - usual == pytest.approx(2 * 30.0, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--churn", "often"), "--churn 'often' has no times from 1ms to 8784h; write up=10m,down=30s"),
        (("--rate", "1e-9", "--churn", "up=1h,down=3m"), "5 requests at 1e-09 per second see about 2.65e+06 losses"),
        (("--replicas", "9"), "a site of 2 devices: 9 holders of each block need"),
        (("--report", "."), "cannot write .: it is a folder; name a file"),
        (("--rate", "0"), "0.0 is not in the range"),
        (("--devices", "0"), "0 is not in the range"),
    ],
)
def test_unusable_settings_are_one_line(command, bundle, profile, flags, message):
    words = ("--bundle", bundle, "--profiles", profile, "--devices", 2, "--requests", 5)
    code, printed, errors = command("simulate", *words, *flags)
    assert (code, printed) == (2, "")
    assert message in errors
    assert len([line for line in errors.splitlines() if line.startswith("ls-edge: ")]) == 1
