"""Why a peer cannot be used: real peers and sources that do not get together, and what ``Node.problems`` says of it."""

import dataclasses

import msgspec
import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.core.text import short_id
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSettings
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Complaint, Hello, Welcome
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.problems import PeerProblems

ALL = tuple(range(6))


def altered(file, name="peers-2.yaml", **changes):
    """The file again, ``changes`` made to the peer ``a`` or (``source``) to the source."""
    content = yaml.safe_load(file.path.read_text())
    content["sources"][0] |= changes.pop("source", {})
    content["peers"][0] |= changes
    path = file.path.parent / name
    path.write_text(yaml.safe_dump(content))
    return load_peers(path)


@pytest.fixture
def bundle(tiny_bundle):
    return Bundle.open(tiny_bundle)


@pytest.fixture
def file(write_peers):
    return load_peers(write_peers({"a": ALL}, sources=["laptop"]))


@pytest.fixture
def says(wait_until):
    """Wait until a source says something of the peer ``a``."""

    def look(source, what):
        wait_until(
            lambda: what in source.snapshot.problems.get("a", ""), what=f"{what!r}; it says {source.snapshot.problems}"
        )
        return source.snapshot.problems["a"]

    return look


def test_nobody_listens_and_then_somebody_does(file, bundle, serve, says):
    with Source(file, bundle) as source:
        assert says(source, "nobody answers").startswith(f"nobody answers at {file.peer('a').address}; start it, or")
        peer = serve(Peer(file, "a", bundle))
        assert source.wait_ready(10) == ()
        assert source.snapshot.problems == {}
        peer.stop()
        says(source, "nobody answers")


def test_a_name_that_is_not_known(file, bundle, serve, says):
    port = file.peer("a").address.rpartition(":")[2]
    content = yaml.safe_load(file.path.read_text())
    content["insecure"] = True
    content["peers"][0]["address"] = f"tcp://nowhere.invalid:{port}"
    file.path.write_text(yaml.safe_dump(content))
    with Source(load_peers(file.path), bundle) as source:
        assert "cannot resolve host name 'nowhere.invalid'" in says(source, "correct its address in peers.yaml")


def test_another_model(file, bundle, other_bundle, serve, says):
    serve(Peer(file, "a", Bundle.open(other_bundle)))
    with Source(file, bundle) as source:
        assert short_id(bundle.manifest.model_id) in says(source, "has model")
        assert "a" in source.snapshot.mismatched
        assert "it refused us" in source.snapshot.problems["a"]


def test_a_peer_that_demands_the_same_bundle(file, bundle, serve, says):
    other = dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, bundle_id="f" * 64))
    serve(Peer(file, "a", other, PeerSettings(strict_bundle=True)))
    with Source(file, bundle) as source:
        said = says(source, "--strict-bundle is on")
        assert said.startswith("it refused us: ")
        assert "has bundle" in said


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_keys_that_do_not_fit(write_peers, bundle, serve, says, wait_until):
    keys = {name: KeyPair(*zmq.curve_keypair()) for name in ("a", "laptop", "other")}
    file = load_peers(write_peers({"a": ALL}, keys=keys, sources=["laptop"]))
    peer = serve(Peer(file, "a", bundle, keys=keys["a"]))
    other = keys["other"].public.decode()
    with Source(altered(file, source={"public_key": other}), bundle, keys=keys["other"]) as source:
        assert "it refused our key, which is not in its peers.yaml" in says(source, "no link to tcp://")
    wait_until(lambda: peer.node.counts["connections refused"], what="it to be counted")
    with Source(altered(file, public_key=other), bundle, keys=keys["laptop"]) as source:
        says(source, "no link to tcp://")
    plain = yaml.safe_load(file.path.read_text())
    for entry in (*plain["peers"], *plain["sources"]):
        del entry["public_key"]
    path = file.path.parent / "plain.yaml"
    path.write_text(yaml.safe_dump(plain))
    with Source(load_peers(path), bundle) as source:
        assert "keys" in says(source, "no link to tcp://")  # who sees first that the other differs hangs up


def test_complaints_are_shown_without_escape_sequences(file, bundle, says, wait_until):
    manifest = bundle.manifest
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, Source(file, bundle) as source:
        router.linger = 0
        router.bind(file.peer("a").address)
        assert router.poll(10_000)
        caller, *frames = router.recv_multipart()
        assert isinstance(framing.decode(frames[0])[0], Hello)
        welcome = Welcome("a", "peer", 1, 0, manifest.model_id, manifest.bundle_id, ALL)
        router.send_multipart([caller, framing.encode(welcome)])
        wait_until(lambda: source.snapshot.problems == {}, what="a link")
        router.send_multipart([caller, framing.encode(Complaint("tokens of \x1b[31mnonsense\nfrom you"))])
        said = says(source, "it dropped a message of ours: tokens of ")
        assert said.isprintable()
        router.send_multipart([caller, framing.encode(welcome)])
        wait_until(lambda: source.snapshot.problems == {}, what="a peer that is well")


def test_reasons_of_unknown_names_are_not_kept_and_old_complaints_end():
    problems = PeerProblems(["a", "b"])
    assert dict(problems.reasons) == {"a": "no link to it yet", "b": "no link to it yet"}
    problems.clear("a")
    before = problems.reasons
    problems.note("a", "complaint", "it dropped something")
    problems.note("stranger", "complaint", "x" * 10_000)
    problems.note("b", "complaint", "hidden behind the link")
    assert dict(problems.reasons) == {"a": "it dropped something", "b": "no link to it yet"}
    assert "a" not in before  # a snapshot stays what it was
    problems.forget_old(float("inf"))
    assert dict(problems.reasons) == {"b": "no link to it yet"}
    with pytest.raises(TypeError):
        problems.reasons["a"] = "x"
