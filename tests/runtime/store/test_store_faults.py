"""A peer with a store serves its bundle despite full disks, flipped bits, lost folders and power cuts."""

import json
import shutil
import threading

import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DigestMismatch
from ls_edge.runtime.clients.apply import Applier
from ls_edge.runtime.clients.sender import PushError
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.keys import load_secret
from tests.faults.applying import give

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")

BLOCKS = (1, 4)
MEGABYTES = 12


def fill_disk(disk):
    """Leave no byte free."""
    with (disk / "fill").open("ab", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                continue


def free_disk(disk):
    (disk / "fill").unlink(missing_ok=True)


def record(store):
    return json.loads((store / "store.json").read_text())


# A peer on a thread, whose disk fills up at an exact moment.


@pytest.fixture
def push(file, keys):
    """Push a bundle to the peer; return the result."""

    def push(bundle, **named):
        return give(file, bundle, keys["laptop"], **named)["a"]

    return push


@pytest.fixture
def look(file, keys, wait_until):
    """Wait until the peer has a state; return its status."""

    def look(state="alive"):
        with Observer(file, keys=keys["laptop"]) as observer:
            wait_until(lambda: observer.look(1.0)["a"].state == state, 30.0, f"a peer that is {state}")
            return observer.view()["a"]

    return look


class Moment:
    """Call ``act`` once, just before a method of the store runs."""

    def __init__(self, monkeypatch, name, act, when=lambda store: True):
        before = getattr(Store, name)
        self.seen = threading.Event()

        def method(store, *arguments, **named):
            if not self.seen.is_set() and when(store):
                act()
                self.seen.set()
            return before(store, *arguments, **named)

        monkeypatch.setattr(Store, name, method)


@pytest.mark.parametrize(("method", "first"), [("want", True), ("write", False), ("switch", False), ("change", True)])
def test_a_disk_that_fills_up_during_a_push_fails_only_the_push(
    serve, file, keys, tiny_bundle, half_bundle, small_disk, monkeypatch, push, look, method, first
):
    disk = small_disk(MEGABYTES)
    peer = serve(Peer(file, "a", store=disk / "store", keys=keys["a"]))
    if not first:
        push(tiny_bundle)
    served = look("cold" if first else "alive").bundle_id
    monkeypatch.setattr("ls_edge.runtime.store.files.SPARE_BYTES", -(1 << 40))  # as if the bundle fit
    moment = Moment(monkeypatch, method, lambda: fill_disk(disk))
    with pytest.raises(PushError, match=r"a: disk full at .*; make room; no peer was switched"):
        push(half_bundle)
    assert (moment.seen.is_set(), give.found["a"].state) == (True, "failed")
    assert look("cold" if first else "alive").bundle_id == served
    free_disk(disk)
    monkeypatch.undo()
    assert push(half_bundle).state == "active"
    assert peer.snapshot.bundle_id == Bundle.open(half_bundle).manifest.bundle_id


def test_a_push_waits_until_the_store_records_that_the_bundle_was_warm(
    serve, file, keys, tiny_bundle, half_bundle, small_disk, monkeypatch, push, look
):
    disk = small_disk(MEGABYTES)
    serve(Peer(file, "a", store=disk / "store", keys=keys["a"]))
    push(tiny_bundle)
    Moment(monkeypatch, "confirm", lambda: fill_disk(disk))
    with pytest.raises(PushError, match=r"a: disk full at .*; waited 3 s"):
        push(half_bundle, wait=3)
    assert look().bundle_id == Bundle.open(half_bundle).manifest.bundle_id  # it serves nevertheless
    assert record(disk / "store")["trial_starts"] == 1
    warned = []

    def make_room(text):
        warned.append(text)
        free_disk(disk)

    assert push(half_bundle, on_warning=make_room).state == "active"
    assert "disk full" in warned[0]
    assert record(disk / "store")["trial_starts"] is None
    assert look().reason is None


def test_a_file_that_becomes_shorter_during_a_push_is_named(serve, file, keys, tiny_bundle, tmp_path, push):
    """The peer waited for ten seconds, and blamed the laptop."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    part = bundle / Bundle.open(bundle).manifest.parts.blocks[BLOCKS[0]].file
    serve(Peer(file, "a", store=tmp_path / "store", keys=keys["a"]))
    with pytest.raises((DigestMismatch, PushError), match=r"01\.onnx"):  # by the moment at which it is read
        push(bundle, on_progress=lambda *_: part.write_bytes(b"short"))


def flip(store, bundle, file=None):
    """Change one bit of a part of a bundle in a store, or of a file of another name."""
    path = store / "files" / (file or Bundle.open(bundle).manifest.parts.blocks[BLOCKS[0]].sha256)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(bytes(raw))


# Real processes.


@pytest.fixture
def fleet(tmp_path, tiny_bundle):
    """Peers with keys and empty stores; their logs are on the same disk."""

    def make(folder=None, placement=None):
        return LocalCluster(
            folder or tmp_path / "fleet", tiny_bundle, placement or {"a": BLOCKS}, sources=["laptop"], keys=True,
            stores=True,
        )  # fmt: skip

    return make


def push_to(peers, bundle, **named):
    give(peers.file, bundle, peers.secret_key("laptop"), **named)


def status_of(peers, state="alive"):
    with Observer(peers.file, keys=load_secret(peers.secret_key("laptop"))) as observer:
        observer.wait_until(lambda: observer.view()["a"].state == state, 30.0)
        found = observer.look(1.0)["a"]
    assert found.state == state, found
    return found


def test_the_only_bundle_survives_power_cuts_while_it_warms_up(fleet, tiny_bundle, half_bundle, wait_until):
    with fleet() as peers:
        push_to(peers, tiny_bundle)
        store = peers.store("a")
        active = record(store)["active"]
        peers.terminate("a")
        before = json.dumps({**record(store), "trial_starts": 1})  # as if it had never been warm
        (store / "store.json").write_text(before)
        for _ in range(5):
            count = record(store)["trial_starts"]
            peers.start("a")
            if count < 3:
                wait_until(lambda c=count: not peers.alive("a") or record(store)["trial_starts"] != c, 60.0, "a start")
            peers.kill("a")
            if record(store)["trial_starts"] is None:  # it was warm already
                (store / "store.json").write_text(before.replace('"trial_starts": 1', '"trial_starts": 3'))
            assert record(store)["active"] == active
        (store / "store.json").write_text(before.replace('"trial_starts": 1', '"trial_starts": 3'))
        peers.start("a")
        assert status_of(peers).bundle_id == Bundle.open(tiny_bundle).manifest.bundle_id
        push_to(peers, half_bundle)
        assert record(store)["previous"] == active


@pytest.mark.parametrize("damaged", ["block", "gone"])
def test_a_damaged_bundle_is_replaced_by_the_previous_one(fleet, tiny_bundle, half_bundle, damaged):
    with fleet() as peers:
        push_to(peers, tiny_bundle)
        push_to(peers, half_bundle)
        peers.terminate("a")
        store = peers.store("a")
        active = record(store)["active"]
        if damaged == "gone":
            (store / "files" / active).unlink()
        else:
            flip(store, half_bundle, None if damaged == "block" else active)
        peers.start("a")
        status = status_of(peers)
        assert status.bundle_id == Bundle.open(tiny_bundle).manifest.bundle_id
        assert status.reason.startswith("went back to the previous bundle: ")
        push_to(peers, half_bundle)
        assert (record(store)["active"], status_of(peers).reason) == (active, None)


def test_a_flipped_bit_in_a_block_costs_only_that_block(fleet, tiny_bundle):
    """The other blocks of the board were gone, too, until somebody pushed the bundle again."""
    with fleet() as peers:
        push_to(peers, tiny_bundle)
        peers.terminate("a")
        flip(peers.store("a"), tiny_bundle)
        peers.start("a")
        found = status_of(peers)
        assert found.blocks == (4,)
        assert found.reason == "its store lacks block 1; send it again with 'ls-edge apply PEERS --bundle DIR'"
        push_to(peers, tiny_bundle)
        found = status_of(peers)
        assert (found.blocks, found.reason) == (BLOCKS, None)


def test_a_peer_with_a_garbled_record_takes_a_push(fleet, tiny_bundle):
    with fleet() as peers:
        push_to(peers, tiny_bundle)
        peers.terminate("a")
        (peers.store("a") / "store.json").write_text('{"active": ')
        peers.start("a")
        assert "store.json:1:12: not JSON" in status_of(peers, "cold").reason
        push_to(peers, tiny_bundle)
        assert status_of(peers).reason is None


def test_a_peer_survives_the_removal_of_its_store(fleet, tiny_bundle, half_bundle):
    with fleet() as peers:
        push_to(peers, tiny_bundle)
        store = peers.store("a")
        process = peers.processes["a"].pid
        shutil.rmtree(store)
        found = status_of(peers)
        assert found.bundle_id == Bundle.open(tiny_bundle).manifest.bundle_id
        assert found.reason.startswith("its store is not what it serves from memory (No such file or directory: ")
        with Applier(
            peers.file, peers.file, Bundle.open(tiny_bundle), keys=load_secret(peers.secret_key("laptop"))
        ) as applier:
            assert not applier.look().is_settled
        push_to(peers, tiny_bundle)
        assert status_of(peers).reason is None
        assert len(list((store / "files").iterdir())) == 2 + len(BLOCKS)
        shutil.rmtree(store)
        push_to(peers, half_bundle)
        assert status_of(peers).bundle_id == Bundle.open(half_bundle).manifest.bundle_id
        assert peers.processes["a"].pid == process
        peers.kill("a")
        peers.start("a")
        assert status_of(peers).bundle_id == Bundle.open(half_bundle).manifest.bundle_id
