"""``ls-edge status``: how peers are, why one cannot be used, and what a ``peers.yaml`` describes."""

import contextlib
import json
import os
import re
import signal
import socket
import stat

import msgspec
import pytest
import yaml
import zmq

from ls_edge.cli.commands.status import remarks
from ls_edge.core.bundle import Bundle
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.status import Observer, PeerStatus
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Cancel, Complaint, Hello, State, Welcome, new_alias
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import new_keys
from tests.runtime.transport.stranger import Stranger

PLACEMENT = {"a": [0, 1, 2, 3], "b": [2, 3, 4, 5]}
FIELDS = {"reachable", "key", "state", "bundle_id", "blocks", "warm", "latency_ms", "reason"}
"""Of the contract."""


def asked(ls_edge, path, *arguments, code=0):
    done = ls_edge.run("status", "--peers", path, "--json", *arguments)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)["peers"]


def test_healthy_peers_are_alive(ls_edge, peers, tiny_bundle):
    manifest = Bundle.open(tiny_bundle).manifest
    found = asked(ls_edge, peers.path)
    assert list(found) == ["a", "b"]
    for name, peer in found.items():
        assert set(peer) >= FIELDS
        assert (peer["reachable"], peer["key"], peer["state"], peer["warm"]) == (True, "none", "alive", True)
        assert (peer["bundle_id"], peer["model_id"]) == (manifest.bundle_id, manifest.model_id)
        assert peer["blocks"] == PLACEMENT[name]
        assert peer["latency_ms"] > 0
        assert (peer["queue"], peer["reason"]) == (0, None)
    done = ls_edge.run("status", "--peers", peers.path)
    assert done.returncode == 0
    assert [line.split()[:4] for line in done.stdout.splitlines()[1:3]] == [
        ["a", "alive", "none", "0-3"],
        ["b", "alive", "none", "2-5"],
    ]
    assert "blocks 0-1 only on a, 4-5 only on b" in done.stdout


def test_the_table_names_engines(ls_edge, peers):
    done = ls_edge.run("status", "--peers", peers.path)
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "peer",
        "state",
        "key",
        "blocks",
        "queue",
        "credits",
        "block",
        "latency",
        "bundle",
        "engine",
    ]
    assert [line.rstrip().endswith("onnx CPU") for line in lines[1:3]] == [True, True]
    assert not any("no link" in line for line in lines)


def test_a_peer_that_only_other_peers_reach_is_a_holder(ls_edge, serve_peers, tmp_path):
    document = yaml.safe_load(serve_peers({"a": range(3), "b": range(3, 6)}).path.read_text())
    document["peers"][1]["address"] = "tcp://127.0.0.1:9"
    here = tmp_path / "here.yaml"
    here.write_text(yaml.safe_dump(document))
    done = ls_edge.run("status", "--peers", here, "--wait", 20)
    assert "b is reached through a, but not from here" in done.stdout
    assert "no holder" not in done.stdout
    found = json.loads(ls_edge.run("status", "--peers", here, "--json").stdout)["peers"]
    assert {name: peer["reached_through"] for name, peer in found.items()} == {"a": [], "b": ["a"]}
    done = ls_edge.run("doctor", "--peers", here, "--json", timeout=120)
    assert json.loads(done.stdout)["peers"]["b"]["reason"].endswith("; it is reached through a")


def test_blocks_behind_one_peer_have_holders(serve, write_peers, tiny_bundle):
    path = write_peers({"a": range(2), "b": range(2, 4), "c": range(4, 6)})

    def view_of(name, *hidden):
        document = yaml.safe_load(path.read_text())
        for number, peer in enumerate(document["peers"]):
            peer["address"] = f"tcp://127.0.0.1:{number + 1}" if peer["name"] in hidden else peer["address"]
        view = path.with_name(f"{name}.yaml")
        view.write_text(yaml.safe_dump(document))
        return load_peers(view)

    for name, *hidden in ("a", "c"), ("b",), ("c", "a"):
        serve(Peer(view_of(name, *hidden), name, Bundle.open(tiny_bundle)))
    with Observer(view_of("here", "b", "c")) as observer:
        assert observer.wait_until(lambda: observer.view()["a"].leads_to == (2, 3), 30.0)
        lines = list(remarks(observer.view(), observer.peers))
    assert "b is reached through a, but not from here" in lines
    assert "blocks 4-5: no holder" in lines


def test_stem_and_head_without_holders_are_named(serve, write_peers, tiny_bundle):
    file = load_peers(write_peers({"a": "stem, 0-5", "b": "0-5, head"}))
    serve(Peer(file, "a", Bundle.open(tiny_bundle)))
    with Observer(file) as observer:
        found = observer.wait_until(lambda: observer.view()["a"].warm, 30.0) and observer.view()
    assert found["b"].blocks == (*range(6), "head")
    assert list(remarks(found, file)) == [
        "the head: no holder",
        "blocks 0-5 only on a; if one is lost, answers skip its blocks or fail",
        "the stem only on a; if it is lost, sources without a bundle get no answers",
    ]


def test_peers_of_different_models_are_not_told_to_copy_their_file(write_peers):
    status = PeerStatus(
        reachable=True, key="none", state=PeerState.ALIVE, model_id="x", blocks=(0,), warm=True, address=""
    )
    found = {"a": status, "b": msgspec.structs.replace(status, model_id="y")}
    lines = list(remarks(found, load_peers(write_peers({"a": [0], "b": [0]}))))
    assert lines == ["peers serve 2 different models, which do not work together"]


@pytest.mark.release
def test_missing_links_between_peers_are_named(ls_edge, tiny_bundle, tmp_path):
    placement = {"a": range(4), "b": range(2, 6), "c": range(6)}
    local = LocalCluster(tmp_path / "local", tiny_bundle, placement, keys=True, sources=["laptop"])
    right, other = local.path, new_keys("other", tmp_path)[0].public.decode()
    document = yaml.safe_load(right.read_text())
    document["peers"][2]["public_key"] = other
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(document))
    try:
        local.path = wrong
        local.start("a", "b")
        local.path = right
        local.start("c")
        local.wait_warm()
        key = ["--peers", right, "--secret-key", local.secret_key("laptop")]
        done = ls_edge.run("status", *key)
        (line,) = [line for line in done.stdout.splitlines() if "no link" in line]
        assert line.startswith("a has no link to c; b has no link to c; c has no link to a, b. Give these machines the")
        found = json.loads(ls_edge.run("status", *key, "--json").stdout)
        assert found["unreached"] == {"a": ["c"], "b": ["c"], "c": ["a", "b"]}
        assert {peer["state"] for peer in found["peers"].values()} == {"alive"}
    finally:
        local.close()


def test_an_observer_leaves_no_trace_in_routing(peers, tiny_bundle):
    file = load_peers(peers.path)
    with Source.open(file, tiny_bundle) as source:
        assert source.wait_ready(30) == ()
        others = [Observer(file) for _ in range(3)]
        try:
            for observer in others:
                assert {status.state for status in observer.look(5.0).values()} == {"alive"}
            found = others[0].look(5.0)["a"]
            assert "b" in found.reaches
            assert source.name in " ".join(found.reaches)
            assert ("observer" in " ".join(found.reaches), found.credits) == (False, 16)
            assert source.submit(source.preprocess(_image())).result(10).degraded is False
        finally:
            for observer in others:
                observer.close()
    assert "lost" not in [line.split()[1] for line in _log_of(peers, "a") if "observer" in line]


def _image():
    from ls_edge.data.datasets import open_data

    return open_data("digits", "eval").images[0].read()


def _log_of(peers, name):
    return peers.log_path(name).read_text().splitlines()


def test_unreachable_peers_are_lost(ls_edge, tiny_bundle, tmp_path, write_peers):
    with LocalCluster(tmp_path / "local", tiny_bundle, PLACEMENT) as local:
        local.wait_warm()
        local.kill("b")
        text = local.path.read_text()
        path = tmp_path / "more.yaml"
        path.write_text(
            f"insecure: true\n{text}- {{name: nowhere, address: 'tcp://no.such.host.invalid:5555', blocks: [0]}}\n"
        )
        found = asked(ls_edge, path, "--wait", "2", code=3)
        assert {name: peer["state"] for name, peer in found.items()} == {"a": "alive", "b": "lost", "nowhere": "lost"}
        assert "nobody answers at tcp://127.0.0.1:" in found["b"]["reason"]
        assert "cannot resolve host name 'no.such.host.invalid'" in found["nowhere"]["reason"]
        for name in ("b", "nowhere"):
            assert (found[name]["reachable"], found[name]["warm"], found[name]["latency_ms"]) == (False, False, None)
        assert found["b"]["blocks"] == PLACEMENT["b"]
        shown = ls_edge.run("status", "--peers", path, "--wait", "1").stdout
        assert "blocks 4-5: no holder" in shown
    nobody = write_peers({"a": range(6)})
    assert asked(ls_edge, nobody, "--wait", "1", code=1)["a"]["state"] == "lost"


def test_another_program_at_the_address_is_silent(ls_edge, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = tmp_path / "peers.yaml"
        path.write_text(f"peers: [{{name: a, address: 'tcp://127.0.0.1:{server.getsockname()[1]}', blocks: [0]}}]")
        found = asked(ls_edge, path, "--wait", "1", code=1)["a"]
    assert (found["reachable"], found["state"]) == (False, "lost")
    assert found["reason"]


def test_a_peer_at_the_address_of_another_is_refused(ls_edge, peers, tmp_path):
    path = tmp_path / "peers.yaml"
    path.write_text(peers.path.read_text().replace("name: a", "name: c"))
    found = asked(ls_edge, path, code=3)
    assert found["c"]["state"] == "refused"
    assert "is 'a'; correct the addresses" in found["c"]["reason"]


@pytest.fixture
def keys(tmp_path):
    made = {name: new_keys(name, tmp_path / "keys") for name in ("a", "b", "laptop", "stranger")}
    return {name: pair for name, (pair, _, _) in made.items()}


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_wrong_and_missing_keys_differ(
    ls_edge, complaints, write_peers, serve, keys, tiny_bundle, tmp_path, wait_until
):
    path = write_peers(PLACEMENT, keys=keys, sources=["laptop"])
    bundle = Bundle.open(tiny_bundle)
    serving = [serve(Peer(load_peers(path), name, bundle, keys=keys[name])) for name in PLACEMENT]
    wait_until(lambda: all(peer.machine.rules.warm for peer in serving), 30.0, "warm peers")
    secret = tmp_path / "keys" / "laptop.key_secret"
    found = asked(ls_edge, path, "--secret-key", secret)
    assert {peer["key"] for peer in found.values()} == {"accepted"}
    assert {peer["state"] for peer in found.values()} == {"alive"}

    done = ls_edge.run("status", "--peers", path)
    assert done.returncode == 2
    assert "give --secret-key" in complaints(done)[0]
    done = ls_edge.run("status", "--peers", path, "--secret-key", tmp_path / "keys" / "stranger.key_secret")
    assert done.returncode == 2
    assert "belongs to no source" in complaints(done)[0]

    # Our file knows the stranger as a source, theirs does not; and b's key is another one than we think.
    document = yaml.safe_load(path.read_text())
    document["sources"] = [{"name": "stranger", "public_key": keys["stranger"].public.decode()}]
    ours = tmp_path / "ours.yaml"
    ours.write_text(yaml.safe_dump(document))
    found = asked(ls_edge, ours, "--secret-key", tmp_path / "keys" / "stranger.key_secret", code=1)
    for peer in found.values():
        assert (peer["reachable"], peer["key"], peer["state"]) == (False, "refused", "refused")
        assert "refused our key" in peer["reason"]
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600


def test_watching_shows_the_state_every_second(ls_edge, tiny_bundle, tmp_path, wait_until):
    """As text and as JSON: a look a second, until Ctrl-C."""
    with LocalCluster(tmp_path / "local", tiny_bundle, PLACEMENT) as local:
        local.wait_warm()
        with contextlib.ExitStack() as files:
            started, outputs = [], [tmp_path / "text", tmp_path / "json"]
            for out, more in zip(outputs, ([], ["--json"]), strict=True):
                words = ["status", "--peers", local.path, "--watch", *more]
                started.append(ls_edge.start(*words, stdout=files.enter_context(out.open("w"))))
            text, lines = (lambda: outputs[0].read_text()), (lambda: outputs[1].read_text().splitlines()[:-1])
            wait_until(lambda: lines() and json.loads(lines()[-1])["peers"]["b"]["state"] == "alive", 30.0, "a look")
            done = ls_edge.run("status", "--peers", local.path, "--debug")
            assert done.returncode == 0, done.stderr
            assert re.search(r"^a \d+\.\d{6} NeighborUp\(hello=Hello\(name='b'", done.stderr, re.M)
            local.kill("b")
            wait_until(lambda: json.loads(lines()[-1])["peers"]["b"]["state"] == "lost", 30.0, "b to be lost")
            wait_until(lambda: "blocks 4-5: no holder" in text(), 30.0, "the remark")
            for process in started:
                process.send_signal(signal.SIGINT)
                assert process.wait(10) == 130


def test_an_observer_may_only_listen(peers, wait_until):
    file = load_peers(peers.path)
    with Stranger(file, "a") as rogue:
        wait_until(lambda: rogue.poll().up, 10.0, "the link")
        name = new_alias("observer")
        rogue.says(Hello(name, "observer", 1, wire.MINOR, "", ""))
        wait_until(lambda: rogue.poll().heard_of(Welcome) and rogue.heard_of(State), 10.0, "how it is")
        assert rogue.heard_of(Complaint) == []
        rogue.says(Cancel((b"r" * 16,), 1000))
        wait_until(lambda: rogue.poll().heard_of(Complaint), 10.0, "a complaint")
        assert "which may not route" in rogue.heard_of(Complaint)[-1].what
        # It does not become a source by saying so, nor gets blocks, nor takes a peer's name.
        manifest = rogue.heard_of(Welcome)[0]
        for bad, why in [
            (Hello(name, "source", 1, 0, manifest.model_id, manifest.bundle_id), "in another role"),
            (Hello(name, "observer", 1, 0, "", "", (0,)), "announces blocks"),
            (Hello("b", "observer", 1, 0, "", ""), "a link carries one name"),
        ]:
            before = len(rogue.heard_of(Complaint))
            rogue.says(bad)
            wait_until(lambda before=before: len(rogue.poll().heard_of(Complaint)) > before, 10.0, "a complaint")
            assert why in rogue.heard_of(Complaint)[-1].what


# The file alone.


@pytest.mark.release
def test_a_check_of_the_file_needs_no_peer(ls_edge, complaints, tmp_path):
    path = tmp_path / "peers.yaml"
    path.write_text(
        """
insecure: true
peers:
  - {name: a, address: "tcp://no.such.host.invalid:5555", blocks: "0-3"}
  - {name: b, address: "tcp://10.255.255.1:5555", bind: "tcp://0.0.0.0:5555", blocks: [3, 5]}
"""
    )
    done = ls_edge.run("status", "--peers", path, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == [
        f"{path}: valid; 2 peers, 6 blocks, insecure, without keys, sources: any",
        "  a  tcp://no.such.host.invalid:5555  blocks 0-3",
        "  b  tcp://10.255.255.1:5555, listens on tcp://0.0.0.0:5555  blocks 3, 5",
        "block 4: no holder",
        "blocks 0-2 only on a, 5 only on b; if one is lost, answers skip its blocks or fail",
    ]
    document = json.loads(ls_edge.run("status", "--peers", path, "--check", "--json").stdout)
    holders = {"0": ["a"], "1": ["a"], "2": ["a"], "3": ["a", "b"], "4": [], "5": ["b"]}
    assert (document["holders"], document["keys"]) == (holders, False)
    path.write_text("peers:\n  - {name: a, address: tcp://127.0.0.1:5555, blocks: all}\n")
    lines = ls_edge.run("status", "--peers", path, "--check").stdout.splitlines()
    assert (lines[0].split(", ")[1], lines[1].split()[-2:]) == ("all blocks", ["blocks", "all"])
    path.write_text("peers:\n  - {name: a, adress: x, blocks: [0]}\n")
    done = ls_edge.run("status", "--peers", path, "--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert complaints(done)[0].startswith(f"ls-edge: {path}:2:15: unknown key 'adress'; did you mean 'address'?")
