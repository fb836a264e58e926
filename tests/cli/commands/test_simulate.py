"""``ls-edge simulate``: latency and throughput of a fleet from profiles, and errors about its options."""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.protocol.codecs import wire_bytes


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
    flags = ("--bundle", bundle, "--profiles", profile, "--devices", 8, "--requests", 200, "--site-size", 4)
    code, printed, errors = command("simulate", *flags, "--json", "--jobs", 1)
    assert code == 0, errors
    found = json.loads(printed)
    assert (found["devices"], found["requests"], found["answered"], found["failed"]) == (8, 200, 200, 0)
    assert (found["sites"], found["degraded"], found["top1"], found["seed"]) == (2, 0, None, 0)
    assert found["bundle_id"] == Bundle.open(bundle).manifest.bundle_id
    assert found["latency_ms"]["p50"] >= 4 * 2 + 1
    assert found["throughput"] == pytest.approx(8 * 1e3 / 8, rel=0.25)
    assert (found["profiles"]["board"]["devices"], found["profiles"]["board"]["watts"]) == (8, None)
    tokens = Bundle.open(bundle).manifest.tokens
    payload = wire_bytes("raw", tokens.count, tokens.dim)
    assert sum(found["link_bytes"].values()) == round(found["hops"] * 100) * payload, "one of two sites"
    assert "simulate:" in errors
    code, printed, _ = command("simulate", *flags, "--jobs", 1)
    assert code == 0
    assert "200 of 200" in printed
    assert "assumed: no device is lost (--churn)" in printed


@pytest.mark.release
def test_the_example_of_the_document_shows_what_a_second_holder_is_worth(command, bundle, profile):
    text = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("ls-edge simulate")]
    lines = [words for words in lines if "6000" in words]
    found = {}
    for words in lines:
        words = [{"bundle": bundle, "board.json": profile, "6000": 2000}.get(word, word) for word in words]
        code, printed, errors = command(*words, "--json", "--jobs", 1)
        assert code in (0, 3), errors
        one = json.loads(printed)
        found[words[-1]] = one["degraded"], one["latency_ms"]["max"]
    (alone, slow), (shared, fast) = found["1"], found["2"]
    assert alone > 1.5 * shared
    assert slow > 1.5 * fast


@pytest.mark.leaks_ok("vl-convert keeps its threads")
def test_losses_change_the_exit_code_and_are_reported(command, bundle, profile, tmp_path):
    pytest.importorskip("altair")
    report, document = tmp_path / "fleet.html", tmp_path / "fleet.json"
    flags = (
        "--bundle", bundle, "--profiles", profile, "--devices", 4, "--requests", 300, "--rate", 30, "--jobs", 1,
        "--churn", "up=2s,down=2s,kill=1,stop=1", "--max-skips", 3, "--budget-ms", 1000,
    )  # fmt: skip
    code, printed, errors = command("simulate", *flags, "--report", report, "--json")
    assert code == 3, errors
    found = json.loads(printed)
    assert found["answered"] + found["failed"] == 300
    assert found["losses"]["count"] == sum(found["losses"]["by_kind"].values()) > 0
    assert 0.2 < found["losses"]["up_share"] < 0.8
    page = report.read_text(encoding="utf-8")
    assert "A simulated fleet" in page
    assert f"of {found['requests']}, " in page
    assert page.count('type="application/json"') == 2
    assert "there is no accuracy" in page
    document.write_text(printed, encoding="utf-8")
    code, printed, errors = command("report", document, "--json")
    assert code == 0, errors
    (row,) = json.loads(printed)["rows"]
    assert (row["kind"], row["throughput"]) == ("simulate", found["throughput"])


@pytest.mark.leaks_ok("vl-convert keeps its threads")
def test_the_page_has_the_warnings_and_the_accuracy_of_orders_that_ran(command, bundle, profile, tmp_path):
    pytest.importorskip("altair")
    flags = ("--bundle", bundle, "--profiles", profile, "--devices", 2, "--requests", 20, "--rate", 30, "--jobs", 1)
    asked = ("--churn", "up=1h,down=1m", "--execute", 3, "--data", "digits", "--report", tmp_path / "fleet.html")
    code, printed, errors = command("simulate", *flags, *asked, "--json")
    assert code in (0, 3), errors
    found = json.loads(printed)
    page = (tmp_path / "fleet.html").read_text(encoding="utf-8")
    assert f"Warning: {found['warnings'][0]}" in page
    assert "there is no accuracy" not in page
    assert "of 3 orders that ran" in page
    assert f'<dt>Accuracy</dt><dd class="big">{100 * found["top1"]:.1f}<small>%</small>' in page


def test_links_codec_and_batches_change_the_latency(command, bundle, profile):
    """Two boards with room for half of the model each: tokens take three transfers."""

    def simulate(*flags):
        words = ("--devices", 2, "--requests", 20, "--replicas", 1, "--max-replicas", 1, "--concurrency", 1)
        code, printed, errors = command(
            "simulate", "--bundle", bundle, "--profiles", profile, *words, *flags, "--jobs", 1, "--json"
        )
        assert code == 0, errors
        return json.loads(printed)

    tokens = Bundle.open(bundle).manifest.tokens
    slow = ("--mbit", 1, "--link-ms", 0)
    raw, half = (simulate(*slow, "--codec", codec) for codec in ("raw", "fp16"))
    transfers = raw["hops"]
    saved = wire_bytes("raw", tokens.count, tokens.dim) - wire_bytes("fp16", tokens.count, tokens.dim)
    difference = raw["latency_ms"]["p50"] - half["latency_ms"]["p50"]
    assert difference == pytest.approx(transfers * saved * 8e-3, rel=0.01)
    assert any("links of 1 Mbit/s and 0 ms" in line for line in raw["assumptions"])
    assert any("batches of up to 4" in line for line in simulate("--batch", 4)["assumptions"])


def test_a_fleet_without_answers_is_a_failure(command, bundle, profile):
    code, printed, _ = command(
        "simulate", "--bundle", bundle, "--profiles", profile, "--devices", 1, "--requests", 5, "--budget-ms", 2,
        "--json",
    )  # fmt: skip
    assert code == 1
    assert json.loads(printed)["errors"] == {"BudgetExceeded": 5}


def test_the_first_sentence_is_the_answer_and_more_is_simulated_until_it_is_certain(command, bundle, profile):
    flags = (
        "--bundle", bundle, "--profiles", profile, "--devices", 1, "--requests", 120, "--seed", 3, "--rate", 10,
        "--jobs", 1, "--max-skips", 0, "--budget-ms", 100, "--churn", "up=2s,down=200ms",
    )  # fmt: skip
    code, printed, errors = command("simulate", *flags)
    assert code == 3, errors
    first, second = printed.replace("\n", " ").split(".  ", 1)[0], printed
    assert "of the requests get a whole answer (95 % interval" in first
    assert "the answer is uncertain; about" in second.replace("\n", " ")
    assert "simulated time: 14.0 s in the longest run of a site" in printed
    code, printed, errors = command("simulate", *flags, "--until", "40%", "--json")
    found = json.loads(printed)
    assert found["requests"] > 120
    half = (found["whole_share"]["high"] - found["whole_share"]["low"]) / 2
    assert half <= 0.4 * (1 - found["whole_share"]["share"])
    assert found["warnings"] == []


@pytest.mark.leaks_ok("vl-convert keeps its threads")
def test_a_sweep_is_a_table_and_a_file_that_continues(command, bundle, profile, tmp_path):
    out = tmp_path / "sweep.json"
    flags = (
        "--bundle", bundle, "--profiles", profile, "--devices", 2, "--requests", 40, "--rate", 20, "--jobs", 1,
        "--churn", "up=1s,down=1s,stop=1", "--sweep", "up=1s,1h", "--seeds", 2, "--max-skips", 0, "--budget-ms", 100,
    )  # fmt: skip
    code, printed, errors = command("simulate", *flags, "--sweep", "replicas=1,2", "--out", out)
    assert code == 3, errors
    assert "1h         1" in printed
    assert printed.startswith("Most requests get a whole answer with up=1h, replicas=")
    assert "fewest with up=1s, replicas=" in printed
    assert "a sweep has no --until, so give it more --requests or --seeds" in " ".join(printed.split())
    code, printed, errors = command("simulate", *flags, "--sweep", "replicas=1,2", "--out", out, "--json")
    found = json.loads(printed)
    assert found == json.loads(out.read_text(encoding="utf-8"))
    assert [cell["values"] for cell in found["cells"]][:2] == [{"up": "1s", "replicas": one} for one in "12"]
    assert [cell["summary"]["churn"] for cell in found["cells"]][2] == ["up=1h,down=1s,stop=1"]
    assert all(cell["summary"]["requests"] == 80 for cell in found["cells"])
    often, seldom = found["cells"][1]["summary"], found["cells"][3]["summary"]
    assert often["whole_share"]["share"] < seldom["whole_share"]["share"]
    pytest.importorskip("altair")
    page = tmp_path / "sweep.html"
    code, _, errors = command("simulate", *flags, "--sweep", "replicas=1,2", "--out", out, "--report", page)
    assert code == 3, errors
    text = page.read_text(encoding="utf-8")
    assert "4 combinations" in text
    assert text.count('type="application/json"') == 1
    assert "replicas=1, up 1s: " in text, "the chart's description has each cell"


def test_a_sweep_does_not_continue_with_another_trace(command, bundle, profile, tmp_path):
    trace, out = tmp_path / "trace.csv", tmp_path / "sweep.json"
    flags = (
        "--bundle", bundle, "--profiles", profile, "--devices", 2, "--requests", 4, "--jobs", 1, "--churn", trace,
        "--sweep", "replicas=1", "--out", out,
    )  # fmt: skip
    trace.write_text("a,0,up\na,9,down\n", encoding="utf-8")
    assert command("simulate", *flags)[0] == 0
    trace.write_text("a,0,up\na,8,down\na,9,up\n", encoding="utf-8")
    code, _, errors = command("simulate", *flags)
    assert code == 2
    assert "sweep.json is a sweep with other settings; name another file, or remove it" in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sweep", "seed=1,2"), "--sweep 'seed=1,2' cannot be read; write KEY=A,B with different values"),
        (("--sweep", "replicas=1,x"), "--sweep replicas=x: replicas is 'x'; it has to be a whole number from 1 to 64"),
        (("--sweep", "policy=nearest,best"), "unknown policy 'best'"),
        (("--sweep", "up=1m,2m"), "--sweep up=1m replaces a time of the first --churn, which has none; write up=1h"),
        (("--sweep", "up=1m,2m", "--churn", "home.csv"), "--sweep up=1m replaces a time of the first --churn"),
        (("--sweep", "up=1m,2m", "--churn", "up=1m"), "--churn 'up=1m' has no down"),
        (("--seeds", "3"), "--seeds and --out are for --sweep; add one, or use --seed"),
        (("--out", "cells.json"), "--seeds and --out are for --sweep"),
        (
            ("--until", "10%"),
            "--until repeats until enough outages were seen; give --churn up=1h,down=3m, or a trace with losses, too",
        ),
        (("--until", "10%", "--churn", "CALM"), "--until repeats until enough outages were seen"),
        (("--churn", "SHORT"), "short.csv has no two times a millisecond apart; a trace needs a beginning and an end"),
        (("--rate", "1e-9", "--churn", "up=1h,down=3m"), "5 requests at 1e-09 per second take 5e+09 s, with about 2.6"),
        (("--sweep", "replicas=1,2", "--until", "10%"), "--sweep has --seeds instead of --until"),
        (("--until", "often"), "--until 'often' is not a share between 0 and 1; write 10% or 0.1"),
        (("--until", "100%"), "--until '100%' is not a share between 0 and 1; write 10% or 0.1"),
        (("--churn", "often"), "--churn 'often': 'often' cannot be read; write up=10m,down=30s"),
        (("--replicas", "9"), "a site of 2 devices: 4 blocks with 9 holders each"),
        (("--max-skips", "5"), "max_skips 5 is larger than the number of blocks"),
        (("--budget-ms", "1e7"), "10000000.0 is not in the range 1<=x<=600000"),
        (("--report", "."), "cannot write .: it is a folder; name a file"),
        (("--rate", "0"), "0.0 is not in the range"),
        (("--site-size", "65"), "65 is not in the range"),
    ],
)
def test_unusable_settings_are_one_line(command, bundle, profile, tmp_path, flags, message):
    for name, text in (("calm", "a,0,up\na,100,up\n"), ("short", "a,0,up\na,1e-9,down\n")):
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
        flags = [tmp_path / f"{name}.csv" if flag == name.upper() else flag for flag in flags]
    code, printed, errors = command(
        "simulate", "--bundle", bundle, "--profiles", profile, "--devices", 2, "--requests", 5, "--jobs", 1, *flags
    )
    assert (code, printed) == (2, "")
    assert message in errors
    assert len([line for line in errors.splitlines() if line.startswith("ls-edge: ")]) == 1


def test_an_interrupt_ends_all_processes(ls_edge, bundle, profile, wait_until):
    started = ls_edge.start(
        "simulate", "--bundle", bundle, "--profiles", profile, "--devices", 64, "--requests", 1_000_000, "--jobs", 2,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert "simulate:" in started.stderr.readline()
        wait_until(lambda: len(members(started.pid)) >= 3, 30.0, "the processes of the pool")
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=30)
        assert started.returncode == 130
        assert "ls-edge: interrupted" in errors
        wait_until(lambda: not members(started.pid), 30.0, "the end of all processes")
    finally:
        for line in members(started.pid):
            os.kill(int(line.split()[2]), signal.SIGKILL)


def members(session):
    """Processes of a session that have not ended."""
    listed = subprocess.run(["ps", "-eo", "sid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(session) and "Z" not in line.split()[1]]


def test_a_model_without_a_bundle_has_the_blocks_and_the_bytes_that_are_given(command, bundle, profile):
    flags = ("--profiles", profile, "--devices", 2, "--requests", 50, "--jobs", 1)
    sizes = ("--blocks", 12, "--tokens-bytes", 100_000)
    code, printed, errors = command("simulate", *flags, *sizes, "--json")
    assert code == 0, errors
    found = json.loads(printed)
    assert (found["bundle_id"], found["answered"]) == ("", 50)
    assert found["latency_ms"]["p50"] >= 12 * 2 + 1
    assert sum(found["link_bytes"].values()) == found["hops"] * 50 * 100_000
    assert any("whatever model" in one for one in found["assumptions"])
    wrong = [
        ((), "both --blocks and --tokens-bytes"),
        (sizes[:2], "both --blocks and --tokens-bytes"),
        ((*sizes, "--bundle", bundle), "for a model without one"),
        ((*sizes, "--execute", 5, "--data", "digits"), "--execute"),
        ((*sizes, "--codec", "int8"), "--tokens-bytes the size of the encoded tokens"),
    ]
    for more_flags, said in wrong:
        code, _, errors = command("simulate", *flags, *more_flags)
        assert code == 2, errors
        assert said in errors
