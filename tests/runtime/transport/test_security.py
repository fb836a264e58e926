"""Who is let in: real CURVE links, right keys, wrong keys, no keys, and somebody else's name."""

import logging
import threading

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import ConfigError, LinkError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.messages import Complaint, Hello, Welcome
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.zap import Curve
from tests.runtime.transport.stranger import Stranger

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")

PLACEMENT = {"a": (0, 1, 2), "b": (3, 4, 5)}


def new_pair():
    return KeyPair(*zmq.curve_keypair())


@pytest.fixture
def keys():
    return {name: new_pair() for name in ("a", "b", "laptop")}


@pytest.fixture
def secured(tiny_bundle, write_peers, serve, keys):
    """Two peers with keys that serve, and their file; ``laptop`` may send images."""
    file = load_peers(write_peers(PLACEMENT, keys=keys, sources=["laptop"]))
    peers = {name: serve(Peer(file, name, Bundle.open(tiny_bundle), keys=keys[name])) for name in PLACEMENT}
    return file, peers


def hello(file, bundle, name, role="source"):
    manifest = Bundle.open(bundle).manifest
    return Hello(name, role, 1, 0, manifest.model_id, manifest.bundle_id)


def test_right_keys_work_from_image_to_answer(secured, tiny_bundle, keys, images, assert_replays):
    file, peers = secured
    with Source(file, Bundle.open(tiny_bundle), keys=keys["laptop"]) as source:
        assert source.name == "laptop"
        assert source.wait_ready(30) == ()
        batch = images(6)
        answers = [future.result(10) for future in [source.submit(image) for image in batch]]
    assert_replays(tiny_bundle, batch, answers)
    assert {holder for answer in answers for holder in answer.record.holders} == {"a", "b"}
    assert not any(peer.node.counts["connections refused"] for peer in peers.values())


def test_a_key_that_nobody_lists_is_refused_counted_and_logged_with_its_address(secured, wait_until, caplog):
    file, peers = secured
    node = peers["a"].node
    with Stranger(file, "a", new_pair()) as stranger:
        wait_until(lambda: stranger.poll() and node.counts["connections refused"] >= 2, what="a refusal, twice")
        logged = [vars(record) for record in caplog.records if record.message == "refused a connection"]
        assert [(one["address"], one["count"]) for one in logged][:2] == [("127.0.0.1", 1), ("127.0.0.1", 2)]
        assert stranger.links.failed["a"]
        assert not stranger.up
        assert not stranger.heard


def test_no_key_is_refused_and_counted(secured, wait_until):
    file, peers = secured
    node = peers["a"].node
    with Stranger(file, "a") as stranger:
        wait_until(lambda: stranger.poll() and node.counts["connections refused"], what="a refusal")
        assert not stranger.up
        assert not stranger.heard


def test_a_peer_with_another_key_than_the_file_is_not_talked_to(secured, wait_until, keys):
    file, _ = secured
    with Stranger(file, "a", keys["laptop"], server_key=new_pair().public) as laptop:
        wait_until(lambda: laptop.poll() and laptop.links.failed["a"], what="a failed handshake")
        assert not laptop.up


@pytest.mark.parametrize(
    ("name", "role"), [("b", "peer"), ("a", "peer"), ("somebody", "source"), ("laptop.1", "source")]
)
def test_a_listed_key_does_not_give_another_name(secured, tiny_bundle, wait_until, keys, name, role):
    file, peers = secured
    node = peers["a"].node
    with Stranger(file, "a", keys["laptop"]) as laptop:
        wait_until(lambda: laptop.poll().up, what="a link")
        laptop.says(hello(file, tiny_bundle, name, role))
        wait_until(lambda: laptop.poll().heard, what="an answer")
        assert isinstance(laptop.heard[0], Complaint)
        assert node.counts["hello refused"] == 1
        laptop.says(hello(file, tiny_bundle, "laptop"))
        wait_until(lambda: len(laptop.poll().heard) > 1, what="an answer to its own name")
        assert isinstance(laptop.heard[1], Welcome)  # and no STATE before it, which neighbors get every 100 ms


def test_a_key_that_is_listed_later_is_let_in_without_restarting_who_dials(
    tiny_bundle, write_peers, serve, keys, wait_until
):
    file = load_peers(write_peers(PLACEMENT, keys=keys, sources=["laptop"]))
    bundle = Bundle.open(tiny_bundle)
    late = new_pair()
    with Stranger(file, "a", late) as stranger:
        first = Peer(file, "a", bundle, keys=keys["a"])
        serving = threading.Thread(target=first.serve)
        serving.start()
        wait_until(lambda: stranger.poll() and first.node.counts["connections refused"], what="a refusal")
        first.stop()
        serving.join(10)
        assert not serving.is_alive()
        content = yaml.safe_load(file.path.read_text())
        content["sources"][0]["public_key"] = late.public.decode()
        file.path.write_text(yaml.safe_dump(content))
        serve(Peer(load_peers(file.path), "a", bundle, keys=keys["a"]))
        wait_until(lambda: stranger.poll().up, what="a link")


@pytest.mark.parametrize("who", ["b", "laptop", "nobody"])
def test_a_secret_key_of_somebody_else_is_a_clear_error(tiny_bundle, write_peers, keys, who):
    file = load_peers(write_peers(PLACEMENT, keys=keys, sources=["laptop"]))
    belongs = "is not in the file" if who == "nobody" else f"belongs to '{who}'"
    with pytest.raises(LinkError, match=f"the secret key does not belong to 'a': its public key {belongs}"):
        Peer(file, "a", Bundle.open(tiny_bundle), keys=keys.get(who) or new_pair())


def test_off_the_loopback_needs_keys_or_the_word_insecure(tiny_bundle, write_peers, serve, images, assert_replays):
    path = write_peers({"a": range(6)})
    address = load_peers(path).peer("a").address
    text = path.read_text().replace("blocks:", f"bind: {address.replace('127.0.0.1', '0.0.0.0')}\n  blocks:")
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not on the loopback and has no public_key"):
        load_peers(path)
    path.write_text("insecure: true\n" + text)
    file, bundle = load_peers(path), Bundle.open(tiny_bundle)
    serve(Peer(file, "a", bundle))
    with Source(file, bundle) as source:
        assert source.wait_ready(30) == ()
        assert_replays(tiny_bundle, images(1), [source.submit(images(1)[0]).result(10)])


def test_no_secret_is_written_or_shown(secured, tiny_bundle, keys, images, caplog, wait_until):
    file, peers = secured
    with caplog.at_level(logging.DEBUG), Stranger(file, "a", new_pair()) as stranger:
        with Source(file, Bundle.open(tiny_bundle), keys=keys["laptop"]) as source:
            source.wait_ready(30)
            source.submit(images(1)[0]).result(10)
        wait_until(lambda: stranger.poll() and peers["a"].node.counts["connections refused"], what="a refusal")
        with pytest.raises(LinkError) as caught:
            Peer(file, "a", Bundle.open(tiny_bundle), keys=keys["b"])
    assert "refused a connection" in caplog.text
    said = repr([vars(record) for record in caplog.records]) + caplog.text + str(caught.value)
    said += repr([Curve(pair, {}, {}) for pair in keys.values()])
    for pair in keys.values():
        assert pair.secret.decode() not in said


def test_a_connection_with_a_replaced_key_is_ended_even_if_it_has_not_greeted(secured, wait_until, keys):
    file, peers = secured
    with Stranger(file, "a", keys["laptop"]) as quiet:
        wait_until(lambda: quiet.poll().up, what="a link")
        content = yaml.safe_load(file.path.read_text())
        content["sources"][0]["public_key"] = new_pair().public.decode()
        file.path.write_text(yaml.safe_dump(content))
        peers["a"].reload()
        wait_until(lambda: quiet.poll().links.failed["a"], what="a refusal of the old key")
