"""Bundles are pushed to real peers with empty stores, while real requests are answered."""

import hashlib
import json
import shutil
import threading

import pytest
import zmq

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import UsageError
from ls_edge.runtime.clients.push import Pusher
from ls_edge.runtime.clients.sender import PushError
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret
from tests.data import bombs
from tests.runtime.clients.load import Load

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")

TWICE = {"a": (0, 1, 2, 3), "b": (2, 3, 4, 5), "c": (0, 1, 4, 5)}
"""Every block has two holders."""


@pytest.fixture
def fleet(tmp_path, tiny_bundle):
    """Create peers with keys and empty stores, as a context manager."""

    def make(placement, **named):
        return LocalCluster(
            tmp_path / "fleet", tiny_bundle, placement, sources=["laptop", "desk"], keys=True, stores=True, **named
        )

    return make


def pusher(peers, name="laptop", **named):
    return Pusher(peers.file, keys=load_secret(peers.secret_key(name)), wait=60.0, connect=60.0, **named)


def push(peers, bundle, name="laptop", **named):
    with pusher(peers, name, **named) as one:
        try:
            one.push(Bundle.open(bundle))
        finally:
            found = one.results()
    return found


def record(peers, name):
    return json.loads((peers.store(name) / "store.json").read_text())


def active(peers, name):
    """Active bundle of a peer's store, and the names of its files."""
    files = peers.store(name) / "files"
    return Bundle.open(files, record(peers, name)["active"]), {path.name for path in files.iterdir()}


def whole(peers, name):
    """Whether the store of a peer has all of its parts with the right content."""
    files = peers.store(name) / "files"
    parts = [active(peers, name)[0].part(f"block {block}") for block in peers.file.peer(name).blocks]
    return all(hashlib.sha256((files / part.sha256).read_bytes()).hexdigest() == part.sha256 for part in parts)


def test_empty_peers_receive_their_parts_and_answer(fleet, tiny_bundle, images, assert_replays):
    with fleet(TWICE) as peers:
        found = push(peers, tiny_bundle)
        manifest = Bundle.open(tiny_bundle).manifest
        for name, blocks in TWICE.items():
            sizes = [manifest.parts.blocks[block].bytes for block in blocks]
            assert (found[name].state, found[name].reason) == ("active", None)
            assert (found[name].parts, found[name].bytes) == (len(blocks), sum(sizes))
            assert found[name].sent_bytes == sum(sizes) + (tiny_bundle / MANIFEST).stat().st_size
            _, files = active(peers, name)
            assert files == {record(peers, name)["active"], *(manifest.parts.blocks[block].sha256 for block in blocks)}
            assert whole(peers, name)
        with Source(peers.file, Bundle.open(tiny_bundle), keys=load_secret(peers.secret_key("desk"))) as source:
            assert source.wait_ready() == ()
            batch = images(4)
            answers = [future.result(10) for future in [source.submit(image) for image in batch]]
        assert_replays(tiny_bundle, batch, answers)
        again = push(peers, tiny_bundle)
        assert {one.state for one in again.values()} == {"active"}
        assert sum(one.sent_bytes for one in again.values()) == 0


def test_stem_and_head_are_pushed_like_blocks(fleet, tiny_bundle):
    with fleet({"a": "stem, 0-2", "b": "3-5, head"}) as peers:
        found = push(peers, tiny_bundle)
        assert {one.state for one in found.values()} == {"active"}
        with Source.open(peers.path, secret_key=peers.secret_key("laptop")) as source:
            assert source.wait_ready(30.0) == ()
            assert not source.submit(bombs.flat(40, "JPEG")).result(30).degraded


def test_a_refusal_is_named_before_peers_that_have_not_answered_yet(fleet, tiny_bundle):
    """Waiting for the first peer may help; nobody but its user can help the second one."""
    peers = fleet({"a": "0-2", "b": "3-5"})  # not started
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:  # without keys
        other.bind(peers.file.peer("b").address)
        with pytest.raises(PushError, match=r"b: no link to .*only one side uses keys.*; nothing was changed"):
            push(peers, tiny_bundle)


def test_a_push_loses_no_request_although_a_peer_is_killed(fleet, tiny_bundle, half_bundle, images, wait_until):
    with fleet(TWICE) as peers:
        push(peers, tiny_bundle)
        killed = threading.Event()

        def kill_once(name, state, missing, total):
            if name == "b" and state == "receiving" and 0 < missing < total and not killed.is_set():
                killed.set()
                peers.kill("b")
                peers.start("b")

        with Load(peers, tiny_bundle, images) as load:
            found = push(peers, half_bundle, on_change=kill_once)
            done = len(load.answers)
            wait_until(lambda: len(load.answers) > done + 20, what="answers after the push")
        assert killed.is_set()
        assert {name: one.state for name, one in found.items()} == dict.fromkeys(TWICE, "active")
        for name in TWICE:
            bundle, _ = active(peers, name)
            assert bundle.manifest.bundle_id == Bundle.open(half_bundle).manifest.bundle_id
            assert whole(peers, name)
        load.assert_whole()
        assert {holder for answer in load.answers[-20:] for holder in answer.record.holders} <= set(TWICE)


def test_a_rollback_switches_to_the_previous_bundle(fleet, tiny_bundle, half_bundle):
    with fleet({"a": range(6), "b": range(6)}) as peers:
        push(peers, tiny_bundle)
        with pusher(peers) as one, pytest.raises(PushError, match="has no previous bundle"):
            one.roll_back()
        push(peers, half_bundle)
        for expected in (tiny_bundle, half_bundle):
            with pusher(peers) as one:
                one.roll_back()
                assert {result.state for result in one.results().values()} == {"active"}
                assert sum(result.sent_bytes for result in one.results().values()) == 0
            for name in ("a", "b"):
                assert active(peers, name)[0].manifest == Bundle.open(expected).manifest


def test_a_rollback_after_half_a_push_leaves_the_other_peers(fleet, tiny_bundle, half_bundle):
    with fleet({"a": range(6), "b": range(6)}) as peers:
        push(peers, tiny_bundle)
        assert push(peers, half_bundle, only=["a"]).keys() == {"a"}
        with pusher(peers) as one:
            one.roll_back()
            assert one.results().keys() == {"a"}
        assert {record(peers, name)["active"] for name in "ab"} == {record(peers, "b")["active"]}


def test_one_of_two_simultaneous_pushes_succeeds(fleet, tiny_bundle, half_bundle):
    with fleet(TWICE) as peers:
        refused = []

        def push_too(_name, state, _missing, _total):
            if state == "receiving" and not refused:
                refused.append(None)
                with pytest.raises(PushError, match=r"a: laptop\.\w+ is pushing a bundle.*no peer was"):
                    push(peers, half_bundle, "desk")
                refused.append("said so")

        found = push(peers, tiny_bundle, on_change=push_too)
        assert refused == [None, "said so"]
        assert {one.state for one in found.values()} == {"active"}
        assert {active(peers, name)[0].manifest.precision for name in TWICE} == {"fp32"}
        push(peers, half_bundle, "desk")


def test_peers_go_back_from_a_bundle_that_does_not_load(fleet, tiny_bundle, tmp_path, images, wait_until):
    """Its digests are right, but its content is not: only the switch finds out."""
    import msgspec

    from ls_edge.core.bundle import bundle_id_of, write_manifest

    broken = tmp_path / "broken"
    shutil.copytree(tiny_bundle, broken)
    good = Bundle.open(tiny_bundle)
    raw = b"not a model"
    (broken / good.manifest.parts.blocks[1].file).write_bytes(raw)
    parts = list(good.manifest.parts.blocks)
    parts[1] = msgspec.structs.replace(parts[1], sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))
    parts = msgspec.structs.replace(good.manifest.parts, blocks=tuple(parts))
    changed = bundle_id_of(good.interface, good.manifest.precision, parts)
    write_manifest(broken, msgspec.structs.replace(good.manifest, parts=parts, bundle_id=changed))
    with fleet(TWICE) as peers:
        push(peers, tiny_bundle)
        with Load(peers, tiny_bundle, images) as load:
            with pusher(peers) as one:
                with pytest.raises(PushError, match=r"a: went back to the previous bundle: .*no peer was switched"):
                    one.push(Bundle.open(broken))
                states = {name: result.state for name, result in one.results().items()}
            assert states == {"a": "failed", "b": "ready", "c": "ready"}
            wait_until(lambda: len(load.answers) >= 25, 30.0, "answers")
        load.assert_whole()
        assert {active(peers, name)[0].manifest.bundle_id for name in TWICE} == {good.manifest.bundle_id}


def test_an_interrupted_push_continues_where_it_stopped(fleet, wide_bundle):
    """57 MB, and the peer is killed in the middle of a file: received pieces are not sent again."""
    from ls_edge.runtime.protocol.messages import MAX_CHUNK
    from ls_edge.runtime.store.installer import WINDOW

    with fleet({"a": (0, 1)}) as peers:
        killed = []

        def kill_once(name, _state, missing, total):
            if not killed and 0 < missing < total // 3:
                killed.append(missing)
                peers.kill(name)
                peers.start(name)

        found = push(peers, wide_bundle, on_change=kill_once)["a"]
        assert (killed != [], found.state) == (True, "active")
        whole = found.bytes + (wide_bundle / MANIFEST).stat().st_size
        assert whole <= found.sent_bytes <= whole + WINDOW * MAX_CHUNK


def test_a_push_of_another_model_is_refused(fleet, tiny_bundle, other_bundle):
    with fleet({"a": range(6)}) as peers:
        push(peers, tiny_bundle)
        with pytest.raises(UsageError, match=r"serve another model .*'ls-edge apply .*--bundle"):
            push(peers, other_bundle)
        assert active(peers, "a")[0].manifest.model_id == Bundle.open(tiny_bundle).manifest.model_id
