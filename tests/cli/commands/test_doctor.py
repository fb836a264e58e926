"""``ls-edge doctor``: one JSON document, a table, and the exit code."""

import json
import re
import socket
import subprocess
import sys

import pytest
import yaml
import zmq
from PIL import Image

from ls_edge.cli.main import main
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.messages import FindingRow
from ls_edge.runtime.transport.keys import new_keys
from tests.engines.conftest import DOUBLES

WELL = FindingRow("ok", "Python", "3.11", "")
HOT = FindingRow("warn", "throttling", "cpu at 101\x1b[31m", "cool it")
BROKEN = FindingRow("bad", "onnxruntime", "is not installed", "pip install 'ls-edge[cpu]'")


def test_this_machine_is_checked():
    done = subprocess.run(
        [sys.executable, "-m", "ls_edge", "doctor", "--json"], capture_output=True, text=True, timeout=170, check=False
    )
    document = json.loads(done.stdout)
    assert set(document) == {"status", "findings"}
    assert all(set(finding) == {"status", "what", "detail", "fix"} for finding in document["findings"])
    seen = {finding["what"]: finding["status"] for finding in document["findings"]}
    assert {"Python", "msgspec", "pyzmq", "libzmq", "CPU", "cores", "disk"} <= set(seen)
    assert seen["Python"] == "ok"
    assert done.returncode == (1 if "bad" in seen.values() else 0)
    assert all(finding["fix"] for finding in document["findings"] if finding["status"] != "ok")


@pytest.mark.parametrize(
    ("pyzmq", "status", "code", "flags"), [("99.0", "warn", 0, []), ("25.1", "bad", 1, ["--json"])]
)
def test_the_worst_finding_decides_the_exit_code(install_only, monkeypatch, command, pyzmq, status, code, flags):
    core = ("click", "msgspec", "numpy", "packaging", "pillow", "pyyaml", "rich")
    install_only({**dict.fromkeys(core, "99.0"), "pyzmq": pyzmq})
    for engine in ("onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, engine, None)
    ended, printed, _ = command("doctor", *flags)
    assert ended == code
    if flags:
        assert json.loads(printed)["status"] == status
    else:
        assert re.search(r"^ *warn +engines +neither ONNX Runtime", printed, re.M)


@pytest.fixture
def fleet(bundle, write_peers, serve, tmp_path):
    """Ask real peers: ``well``, ``broken``, ``old`` (knows no check), ``other`` (another key), ``mute``, ``down``."""
    if not zmq.has("curve"):
        pytest.skip("libzmq was built without CURVE")
    names = ("well", "broken", "old", "other", "mute", "down")
    keys = {name: new_keys(name, tmp_path)[0] for name in (*names, "laptop", "stranger")}
    path = write_peers(dict.fromkeys(names, range(4)), keys=keys, sources=["laptop"])
    checks = {"well": lambda: [WELL, HOT], "broken": lambda: [WELL, BROKEN], "old": None, "other": lambda: [WELL]}
    for name, examine in checks.items():
        serve(Peer.open(path, name, bundle, secret_key=tmp_path / f"{name}.key_secret", examine=examine))
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries, ours = {entry["name"]: entry for entry in document["peers"]}, tmp_path / "ours.yaml"
    entries["other"]["public_key"] = keys["stranger"].public.decode()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        entries["mute"]["address"] = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        ours.write_text(yaml.safe_dump(document), encoding="utf-8")
        yield ours, tmp_path / "laptop.key_secret"


def test_one_document_or_table_has_every_peer(command, fleet):
    path, key = fleet
    code, printed, errors = command("doctor", "--peers", path, "--secret-key", key, "--wait", "170", "--json")
    assert code == 1, errors
    document = json.loads(printed)
    peers = document["peers"]
    assert (document["status"], set(peers)) == ("bad", {"well", "broken", "old", "other", "mute", "down"})
    assert peers["well"] == {
        "status": "warn", "reason": None, "findings": [
            {"status": "ok", "what": "Python", "detail": "3.11", "fix": None},
            {"status": "warn", "what": "throttling", "detail": "cpu at 101\\x1b[31m", "fix": "cool it"},
        ],
    }  # fmt: skip
    assert [(one["status"], one["what"]) for one in peers["broken"]["findings"]] == [
        ("ok", "Python"), ("bad", "onnxruntime"),
    ]  # fmt: skip
    for name in ("old", "other", "mute", "down"):
        assert (peers[name]["status"], peers[name]["findings"], "\n" in peers[name]["reason"]) == ("bad", [], False)
    assert "inspect" in peers["old"]["reason"]
    assert len({peers[name]["reason"] for name in ("old", "other", "down")}) == 3
    code, printed, errors = command("doctor", "--peers", path, "--secret-key", key, "--wait", "170")
    assert code == 1, errors
    assert re.search(r"well +ok +1 check +passed\n *well +warn +throttling", printed)
    assert re.search(r"broken +bad +onnxruntime +is not installed +pip install 'ls-edge\[cpu\]'", printed)
    for name in ("old", "other", "down"):
        assert re.search(rf"{name} +bad +link", printed)
    assert "\x1b[31m" not in printed


def test_a_key_without_peers_is_refused(command, fleet, tmp_path):
    path, _ = fleet
    for arguments, code, message in (
        (("--peers", path), 2, "--secret-key"),
        (("--peers", path, "--secret-key", tmp_path / "stranger.key_secret"), 2, "belongs to no"),
        (("--secret-key", tmp_path / "laptop.key_secret"), 2, "give --peers FILE too"),
        (("--peers", tmp_path / "none.yaml"), 2, "none.yaml"),
    ):
        found, _, errors = command("doctor", *arguments)
        assert (found, message in errors) == (code, True), errors


@pytest.mark.release
@pytest.mark.timeout(400)
@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
@pytest.mark.parametrize("doubles", [False, True], ids=["this machine", "doubles of CUDA and TensorRT"])
def test_the_report_of_a_board_has_every_section_of_its_page(tmp_path, tiny_bundle, ls_edge, monkeypatch, doubles):
    if doubles:
        monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
        monkeypatch.setenv("LS_EDGE_CACHE", str(tmp_path / "cache"))
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (16, 16)).save(images / "a.png")
    path = tmp_path / "report.md"
    words = ["doctor", "--report", path, "--bundle", tiny_bundle]
    done = ls_edge.run(*words, "--data", images, timeout=380)
    text = path.read_text(encoding="utf-8")
    ended = dict(re.findall(r"^## (?:ls-edge )?(\w+).*\n\nExit code (\d+), [\d.]+ s\.$", text, re.M))
    found = re.findall(r"^## (?:ls-edge (\w+)|([^\n]+))", text, re.M)
    sections = {name or other for name, other in found}
    assert sections >= {"power mode", "memory", "sensors", "doctor", "verify", "bench", "status", "run"}
    assert len(re.findall(r"^visit of 1 block .*\n(?:visit of 2 blocks .*\n)?visit of \d blocks ", text, re.M)) == 1
    assert ("Double of a GPU" in text) is doubles
    assert re.findall(r"^## log of peer (.)\n\nExit code \S+\.$", text, re.M) == ["a", "b"]
    assert "chain: relative error: " in text
    assert {name for name, code in ended.items() if code not in "03"} <= {"doctor"}, text  # of this machine
    assert '"answered": 100' in text
    assert done.returncode == (1 if ended["doctor"] == "1" else 0)


def test_a_report_needs_a_model_and_replaces_no_file(tmp_path, bundle, monkeypatch, capsys):
    monkeypatch.delenv("LS_EDGE_BUNDLE", raising=False)
    path = tmp_path / "report.md"
    for text, more, words in (
        ("", (), "give --bundle FOLDER"),
        ("", ("--bundle", bundle, "--json"), "leave out --json and --peers"),
        ("mine", ("--bundle", bundle), "is not a file of this"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--report", str(path), *map(str, more)])
        assert (ended.value.code, words in capsys.readouterr().err) == (2, True)
