"""Dishonest and unauthorized pushers: no bundle is half installed, and the peer continues to serve."""

import hashlib
import os
import random

import pytest
import zmq

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.clients.apply import Applier
from ls_edge.runtime.clients.sender import PushError
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Chunk, Complaint, Hello, Install, Offer, Stored, Want
from ls_edge.runtime.transport.connections import Incoming, Link, LinkUp
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.zap import Curve
from tests.faults.applying import give

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")

FRAMES = int(os.environ.get("LS_EDGE_HOSTILE_FRAMES", "5000")) // 2
MANIFEST_DIGEST = hashlib.sha256(b"manifest").digest()


@pytest.fixture
def peer(serve, file, keys, tmp_path):
    """A peer with an empty store, on a thread."""
    return serve(Peer(file, "a", store=tmp_path / "store", keys=keys["a"]))


class Hand:
    """A process that dials the peer and sends any message."""

    def __init__(self, file, keys, name="laptop", role="pusher", *, greet=True):
        curve = Curve(keys[name], {"a": file.peer("a").public_key.encode()}, {})
        self.links = Links(
            {"a": file.peer("a").address}, bind=None, heartbeat=HeartbeatSettings(), max_frame=framing.MAX_HEADER,
            curve=curve,
        )  # fmt: skip
        self.name, self.role, self.greet = name, role, greet
        self.heard = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.links.close()

    def says(self, *messages):
        for message in messages:
            self.links.send(Link("a"), [message if isinstance(message, bytes) else framing.encode(message)])

    def poll(self):
        """Messages since the last call."""
        new = []
        for event in self.links.poll(0.02):
            if isinstance(event, LinkUp) and self.greet:
                self.says(Hello(f"{self.name}.00000000", self.role, 1, 1, "", ""))
            if isinstance(event, Incoming):
                new.extend(framing.decode(event.frames[0].bytes))
        self.heard += new
        return new

    def last(self, kind):
        self.poll()
        return next((one for one in reversed(self.heard) if isinstance(one, kind)), None)


def serve_files(hand, bundle, answer):
    """Offer a bundle and answer each WANT by ``answer(want, right bytes)``, until the peer is ready or has failed."""
    raw = (bundle / MANIFEST).read_bytes()
    files = {hashlib.sha256(raw).digest(): raw}
    for _, part in Bundle.open(bundle).manifest.part_names():
        files[bytes.fromhex(part.sha256)] = (bundle / part.file).read_bytes()
    hand.says(Offer(hashlib.sha256(raw).digest(), len(raw)))
    answered = len(hand.heard)

    def step():
        nonlocal answered
        hand.poll()
        while answered < len(hand.heard):
            message = hand.heard[answered]
            answered += 1
            if isinstance(message, Want):
                right = files[message.digest][message.offset : message.offset + message.size]
                hand.says(*answer(message, right))
        said = next((one for one in reversed(hand.heard) if isinstance(one, Stored)), None)
        return said is not None and said.state in ("ready", "failed")

    return step


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def greeted(hand):
    return lambda: hand.last(Stored) is not None


def test_a_tampered_chunk_is_refused_and_nothing_is_installed(peer, file, keys, tiny_bundle, tmp_path, wait_until):
    part = bytes.fromhex(Bundle.open(tiny_bundle).manifest.parts.blocks[4].sha256)

    def tamper(want, right):
        changed = bytes([right[0] ^ 1]) + right[1:]
        return [Chunk(want.digest, want.offset, changed if want.digest == part else right)]

    with Hand(file, keys) as hand:
        wait_until(greeted(hand))
        wait_until(serve_files(hand, tiny_bundle, tamper), what="the end of the push")
        said = hand.last(Stored)
        assert said.state == "failed"
        assert "not the file that the manifest names" in said.reason
        hand.says(Install(said.manifest))  # says so, and is not done
        count = len(hand.heard)
        wait_until(lambda: hand.poll() and len(hand.heard) > count)
        assert (hand.last(Stored).state, hand.last(Stored).active) == ("failed", b"")
    found = files_in(tmp_path / "store")
    assert not any(name.endswith(part.hex()) for name in found)
    assert not (tmp_path / "store" / "store.json").exists()
    found = give(file, tiny_bundle, keys["laptop"])["a"]
    assert found.state == "active"
    assert found.sent_bytes < sum(
        Bundle.open(tiny_bundle).manifest.parts.blocks[block].bytes for block in (1, 4)
    )  # what was right is not sent again


def test_an_invalid_manifest_is_refused(peer, file, keys, tmp_path, wait_until):
    (tmp_path / "junk").mkdir()
    for raw in (b"{}", b"\xff" * 1000, b'{"schema": 1}'):
        digest = hashlib.sha256(raw).digest()
        with Hand(file, keys) as hand:
            wait_until(greeted(hand))
            hand.says(Offer(digest, len(raw)))
            wait_until(lambda hand=hand: hand.last(Want), what="a want")
            hand.says(Chunk(digest, 0, raw))
            wait_until(lambda hand=hand: hand.last(Stored).state == "failed", what="a refusal")
            assert len(hand.last(Stored).reason) > 20
    assert not (tmp_path / "store" / "store.json").exists()


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("camera", "pusher", "use the key of laptop"),
        ("laptop", "source", "has no bundle yet"),
        ("a", "pusher", "not a process"),
    ],
)
def test_a_process_that_may_not_push_is_told_so(peer, file, keys, wait_until, name, role, said):
    hand = Hand(file, keys, name, role, greet=name != "a")
    with hand:
        if name == "a":  # the peer's own key, under its own name
            wait_until(lambda: any(isinstance(event, LinkUp) for event in hand.links.poll(0.02)))
            hand.says(Hello("a", "pusher", 1, 1, "", ""))
        wait_until(lambda: hand.last(Complaint), what="a complaint")
        assert said in hand.last(Complaint).what
        hand.says(Offer(MANIFEST_DIGEST, 10))
        count = len(hand.heard)
        wait_until(lambda: hand.poll() and len(hand.heard) > count)
        assert hand.last(Stored) is None


def test_a_stranger_is_refused_before_its_first_message(peer, file, keys, wait_until):
    with Hand(file, keys, "stranger") as hand:
        wait_until(lambda: hand.poll() or hand.links.failed["a"], what="a refusal")
        assert hand.heard == []
    with pytest.raises(UsageError, match="belongs to no source"):
        Applier(file, file, None, keys=keys["stranger"])
    with pytest.raises(UsageError, match="'camera' may not push"):
        Applier(file, file, None, keys=keys["camera"])
    with pytest.raises(UsageError, match="give --secret-key"):
        Applier(file, file, None, keys=None)


def test_an_observer_and_a_source_cannot_offer(serve, file, keys, tiny_bundle, wait_until):
    serve(Peer(file, "a", Bundle.open(tiny_bundle), keys=keys["a"]))
    manifest = Bundle.open(tiny_bundle).manifest
    with Hand(file, keys, role="observer") as hand:
        wait_until(lambda: hand.last(wire.Welcome))
        for message in (Offer(MANIFEST_DIGEST, 10), Chunk(MANIFEST_DIGEST, 0, b"x"), Install(MANIFEST_DIGEST),
                        Stored("idle"), wire.Findings(()), wire.Inspect()):  # fmt: skip
            count = len(hand.heard)
            hand.says(message)
            wait_until(lambda hand=hand, count=count: any(
                isinstance(one, Complaint) for one in (hand.poll(), hand.heard[count:])[1]
            ))  # fmt: skip
        # It may only read the manifest that the peer serves.
        served = bytes.fromhex(manifest.bundle_id)
        for want in (Want(MANIFEST_DIGEST, 0, 1), Want(served, 1 << 30, 1), Want(served, 0, 1)):
            hand.says(want)
        wait_until(lambda: hand.poll() or hand.last(Chunk))
        assert [one for one in hand.heard if isinstance(one, Chunk)] == [Chunk(served, 0, b"{")]
    with Hand(file, keys, greet=False) as hand:
        wait_until(lambda: any(isinstance(event, LinkUp) for event in hand.links.poll(0.02)))
        hand.says(Hello("laptop.00000000", "source", 1, 1, manifest.model_id, manifest.bundle_id))
        wait_until(lambda: hand.last(wire.Welcome))
        hand.says(Offer(MANIFEST_DIGEST, 10))
        wait_until(lambda: hand.last(Complaint))
        assert "not a pusher" in hand.last(Complaint).what
    with pytest.raises(LinkError, match="start it with --store"):
        give(file, tiny_bundle, keys["laptop"])


def test_a_peer_survives_thousands_of_broken_pushes(peer, file, keys, tiny_bundle, mutate, wait_until, tmp_path):
    rng = random.Random(5)
    raw = (tiny_bundle / MANIFEST).read_bytes()
    digest = hashlib.sha256(raw).digest()
    good = [
        framing.encode(message)
        for message in (
            Offer(digest, len(raw)), Offer(MANIFEST_DIGEST, 0), Offer(MANIFEST_DIGEST, wire.MAX_MANIFEST),
            Chunk(digest, 0, raw[:100]), Chunk(MANIFEST_DIGEST, 0, b"x" * wire.MAX_CHUNK), Install(digest),
            Want(digest, 0, 10), Stored("ready", digest), wire.Bye("x"),
        )
    ]  # fmt: skip
    with Hand(file, keys) as hand:
        wait_until(greeted(hand))
        for index in range(FRAMES):
            hand.says(rng.choice(good) if index % 4 == 0 else mutate(rng.choice(good), rng))
            if index % 50 == 0:
                hand.says(Hello("laptop.00000000", "pusher", 1, 1, "", ""))
                hand.poll()
                hand.heard.clear()
    assert give(file, tiny_bundle, keys["laptop"])["a"].state == "active"
    assert sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file()) < 20 * 1024 * 1024


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_full_disk_is_reported_and_no_bundle_is_installed(
    serve, file, keys, tiny_bundle, small_disk, monkeypatch, when
):
    disk = small_disk(megabytes=6)
    if when == "meanwhile":  # another process fills it after the check of the free space
        monkeypatch.setattr("ls_edge.runtime.store.files.SPARE_BYTES", -(1 << 40))
    fill = disk / "fill"
    serve(Peer(file, "a", store=disk / "store", keys=keys["a"]))
    free = os.statvfs(disk)
    fill.write_bytes(bytes(free.f_bavail * free.f_frsize - 20_000))
    with pytest.raises(PushError, match=r"a: disk full.*no peer was switched"):
        give(file, tiny_bundle, keys["laptop"])
    assert not (disk / "store" / "store.json").exists()
    fill.unlink()
    assert give(file, tiny_bundle, keys["laptop"])["a"].state == "active"


def test_the_right_to_push_ends_with_the_file_also_on_a_link(peer, file, keys, tiny_bundle, wait_until):
    with Hand(file, keys) as hand:
        wait_until(greeted(hand))
        text = file.path.read_text().replace("  may_push: true\n", "")
        file.path.write_text(text.replace("- name: camera\n", "- name: camera\n  may_push: true\n"))
        peer.reload()
        wait_until(lambda: hand.last(Hello), what="the greeting with the new file")
        raw = (tiny_bundle / MANIFEST).read_bytes()
        hand.says(Offer(hashlib.sha256(raw).digest(), len(raw)))
        wait_until(lambda: hand.last(Complaint) or hand.last(Want), what="an answer")
        assert hand.last(Want) is None
        assert "'laptop' may not push to a; use the key of camera" in hand.last(Complaint).what
