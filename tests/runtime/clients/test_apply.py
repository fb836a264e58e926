"""A running fleet of real peers becomes what a new ``peers.yaml`` says."""

import json
import os
import shutil
import threading

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.apply import Applier, results_of
from ls_edge.runtime.clients.push import Pusher
from ls_edge.runtime.clients.sender import PushError
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.messages import FileVersion
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret, new_keys
from tests.data import bombs
from tests.runtime.clients.load import Load

pytestmark = [
    pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE"),
    pytest.mark.release,
]


@pytest.fixture
def fleet(tmp_path, tiny_bundle):
    """Start peers with keys and stores, push the bundle, and stop them at the end."""
    running = []

    def make(placement):
        peers = LocalCluster(
            tmp_path / "fleet", tiny_bundle, placement, sources=["laptop", "desk"], keys=True, stores=True
        )
        running.append(peers.__enter__())
        with Pusher(peers.file, keys=load_secret(peers.secret_key("laptop")), wait=60.0, connect=60.0) as pusher:
            pusher.push(Bundle.open(tiny_bundle))
        return peers

    yield make
    for peers in running:
        peers.close()


def edited(peers, change, name="new.yaml"):
    """Write a changed copy of a fleet's file, and return it."""
    document = yaml.safe_load(peers.path.read_text())
    change({one["name"]: one for one in (*document["peers"], *document["sources"])}, document)
    path = peers.folder / name
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return load_peers(path)


def new_entry(peers, name, blocks):
    """Return the entry of another board, with keys in the folder of the fleet."""
    key = new_keys(name, peers.folder)[0].public.decode()
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    return {"name": name, "address": address, "blocks": blocks, "public_key": key, "threads": 1}


def start_new(peers, new, name, bundle):
    """Start a board that only a new file lists."""
    before, peers.path = peers.path, new.path
    peers.bundles[name] = bundle
    peers.start(name)
    peers.path = before


def apply(peers, new, bundle=None, name="laptop", connect=60.0, wait=60.0, **named):
    """Apply a file, and return the change and the state of each peer."""
    keys = load_secret(peers.secret_key(name))
    opened = None if bundle is None else Bundle.open(bundle)
    with Applier(new, peers.file, opened, keys=keys, wait=wait, connect=connect, **named) as one:
        change = one.look()
        one.apply(change)
        return change, {peer: result.state for peer, result in results_of(one, change).items()}


def record(peers, name):
    return json.loads((peers.store(name) / "store.json").read_text())


def looked_at(peers, file):
    with Observer(file, keys=load_secret(peers.secret_key("laptop"))) as observer:
        return observer.look(10.0)


def served(peers, file):
    return {name: one.blocks for name, one in looked_at(peers, file).items()}


def test_blocks_move_and_a_reboot_keeps_them(fleet, tiny_bundle):
    peers = fleet({"a": "0-3", "b": "2-5", "c": "0-1,4-5"})

    def change(named, _document):
        named["a"]["blocks"], named["b"]["blocks"] = "0-4", "3-5"

    new = edited(peers, change)
    change, states = apply(peers, new, tiny_bundle)
    assert states == {"a": "active", "b": "active", "c": "active"}
    assert change.plan.outages == {}
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4), "b": (3, 4, 5), "c": (0, 1, 4, 5)}
    assert {name: record(peers, name)["file"]["version"] for name in "abc"} == dict.fromkeys("abc", 1)
    assert [record(peers, name)["accepts"] for name in "abc"] == [[], [], []]
    assert {one.reason for one in looked_at(peers, new).values()} == {None}
    before = looked_at(peers, peers.file)
    assert "it runs another peers.yaml, version 1; see 'ls-edge apply" in before["c"].reason
    assert "; it runs another peers.yaml, version 1 (blocks 0-4; here blocks 0-3)" in before["a"].reason  # refused, too
    peers.kill("a")  # it starts with the old file again, and with the applied one in its store
    peers.start("a")
    peers.wait_warm("a")
    assert served(peers, new)["a"] == (0, 1, 2, 3, 4)
    assert "uses the applied peers.yaml" in peers.log_path("a").read_text()
    with Applier(new, new, None, keys=load_secret(peers.secret_key("laptop")), connect=60.0) as one:
        assert one.look().is_settled


def test_a_board_is_added_and_another_one_removed(fleet, tiny_bundle):
    peers = fleet({"a": "0-5", "b": "0-5"})

    def change(named, document):
        document["peers"].remove(named["b"])
        document["peers"].append(new_entry(peers, "d", "1-5"))

    new = edited(peers, change)
    start_new(peers, new, "d", tiny_bundle)
    _, states = apply(peers, new, tiny_bundle)
    assert states == {"a": "active", "b": "removed", "d": "active"}
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4, 5), "d": (1, 2, 3, 4, 5)}
    assert "removed from the fleet by version 1" in record(peers, "b")["reason"]


def test_a_removed_board_can_be_added_again_immediately(fleet, tiny_bundle):
    peers = fleet({"a": "0-5", "b": "0-5"})
    new = edited(peers, lambda named, document: document["peers"].remove(named["b"]))
    assert apply(peers, new, tiny_bundle)[1] == {"a": "active", "b": "removed"}
    assert apply(peers, peers.file, tiny_bundle)[1] == {"a": "active", "b": "active"}


@pytest.mark.parametrize("when", ["receiving", "ready", "switching"])
def test_an_interrupted_change_serves_and_is_completed_by_the_same_command(fleet, tiny_bundle, when):
    class Cut(Exception):
        pass

    def cut(name, state, _missing, _total):
        if name == "b" and state.startswith(when):
            raise Cut

    peers = fleet({"a": "0-5", "b": "0-2", "c": "3-5"})
    new = edited(peers, lambda named, _: (named["b"].update(blocks="3-5"), named["c"].update(blocks="0-2")))
    with pytest.raises(Cut):
        apply(peers, new, tiny_bundle, on_change=cut)
    peers.kill("a")
    peers.start("a")
    peers.wait_warm("a")
    blocks = {tuple(range(3)), tuple(range(3, 6))}
    found = served(peers, peers.file.accepting((new,)))
    assert (found["a"], {found["b"], found["c"]} <= blocks) == (tuple(range(6)), True)
    _, states = apply(peers, new, tiny_bundle)
    assert states == {"a": "active", "b": "active", "c": "active"}
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4, 5), "b": (3, 4, 5), "c": (0, 1, 2)}
    assert [len(record(peers, name)["accepts"]) for name in "abc"] == [0, 0, 0]
    # Rolled back without the bundle: the parts still lie in the stores.
    old = edited(peers, lambda _named, _document: None, "old.yaml")
    assert set(apply(peers, old)[1].values()) == {"active"}
    assert served(peers, old) == {"a": (0, 1, 2, 3, 4, 5), "b": (0, 1, 2), "c": (3, 4, 5)}
    assert {record(peers, name)["file"]["version"] for name in "abc"} == {2}


def test_a_source_without_the_right_to_push_changes_nothing(fleet, tiny_bundle):
    peers = fleet({"a": "0-5"})
    new = edited(peers, lambda named, _: named["desk"].update(may_push=False))
    apply(peers, new)
    peers.path, peers.file = new.path, new
    back = edited(peers, lambda named, _: named["desk"].update(may_push=True), "back.yaml")
    # The file of the pusher gives it the right; that of the peer does not.
    keys = load_secret(peers.secret_key("desk"))
    with Applier(back, back, None, keys=keys, connect=60.0) as one, pytest.raises(LinkError, match="may not push to a"):
        one.look()
    assert record(peers, "a")["file"]["version"] == 1

    def forbid(named, _document):
        named["laptop"]["may_push"] = named["desk"]["may_push"] = False

    with pytest.raises(PushError, match="the fleet could not be changed again"):
        apply(peers, edited(peers, forbid, "nobody.yaml"))
    assert record(peers, "a")["file"]["version"] == 1


def test_the_warning_of_an_outage_names_the_blocks_that_no_peer_serves(fleet, other_bundle):
    peers, warned = fleet({"a": "0-2", "b": "3-5"}), []
    apply(peers, peers.file, other_bundle, on_warning=warned.append)
    assert warned == [
        f"while {name} switches, no peer serves blocks {blocks}: requests wait or skip blocks"
        for name, blocks in (("a", "0-2"), ("b", "0-5"))
    ]


def test_settings_that_do_not_work_are_undone_with_the_file(fleet, wait_until):
    peers = fleet({"a": "0-5"})
    new = edited(peers, lambda named, _: named["a"].update(address=f"tcp://127.0.0.1:{free_ports(1)[0]}"))
    change, states = apply(peers, new)  # it moves
    assert (change.plan.outages, states) == ({"a": frozenset(range(6))}, {"a": "active"})
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4, 5)}
    peers.path, peers.file = new.path, new
    bad = edited(peers, lambda named, _: named["a"].update(bind="tcp://192.0.2.1:5555"), "bad.yaml")
    with pytest.raises(PushError, match=r"went back to the previous peers.yaml: .*192.0.2.1"):
        apply(peers, bad)
    wait_until(lambda: looked_at(peers, new)["a"].warm, timeout=30)
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4, 5)}
    assert record(peers, "a")["file"]["version"] == 1


def test_sources_follow_and_no_answer_is_lost_or_degraded(fleet, tiny_bundle, images, wait_until):
    peers = fleet({"a": "0-2", "b": "0-2", "c": "3-5", "d": "stem, 3-5, head", "e": "stem, 0-5, head"})

    def change(named, document):
        for name, blocks in {"a": "3-5", "b": "0-3", "c": "0-2"}.items():
            named[name]["blocks"] = blocks
        document["peers"].remove(named["d"])
        document["peers"].append(new_entry(peers, "f", "stem, 3-5, head"))

    new = edited(peers, change)
    start_new(peers, new, "f", tiny_bundle)
    warned = []
    thin = Source.open(peers.path, secret_key=peers.secret_key("laptop"))
    with Load(peers, tiny_bundle, images) as load, thin:
        change, states = apply(peers, new, tiny_bundle, on_warning=warned.append)
        assert states == {"a": "active", "b": "active", "c": "active", "d": "removed", "e": "active", "f": "active"}
        assert change.plan.outages == {}
        for source in (load.source, thin):
            wait_until(lambda source=source: sorted(source.snapshot.peers) == ["a", "b", "c", "e", "f"])
            wait_until(lambda source=source: {one.state for one in source.snapshot.peers.values()} == {"alive"})
        count = len(load.answers)
        wait_until(lambda: len(load.answers) > count + 20, timeout=30)
        assert not thin.submit(bombs.flat(40, "JPEG")).result(30).degraded
    load.assert_whole()
    assert warned == []
    late = load.answers[count + 8 :]
    holders = {(block, holder) for one in late for block, holder in one.record.steps}
    assert not {holder for _, holder in holders} & {"d"}
    assert {block for block, holder in holders if holder == "a"} <= {3, 4, 5}


def test_a_board_that_was_away_for_two_changes_is_told_and_is_changed_by_the_same_command(fleet, wait_until):
    peers = fleet({"a": "0-5", "b": "0-5", "c": "0-2"})
    with Observer(
        edited(peers, lambda named, _: named["c"].update(blocks="0-1")), keys=load_secret(peers.secret_key("laptop"))
    ) as one:
        reasons = {name: status.reason for name, status in one.look(10.0).items()}
    assert "it runs another peers.yaml (blocks 0-2; here blocks 0-1)" in reasons["c"]  # edited, not applied
    peers.kill("c")
    for turn in range(2):
        new = edited(peers, lambda named, _, turn=turn: named["b"].update(blocks=f"0-{4 - turn}"), f"{turn}.yaml")
        change, states = apply(peers, new, connect=5.0)
        assert (set(change.missing), states) == ({"c"}, {"a": "active", "b": "active", "c": "missing"})
    peers.start("c")
    peers.wait_warm("c")
    told = "a, b have version 2 of peers.yaml, this peer 0; run 'ls-edge apply' again"
    wait_until(lambda: told in str(looked_at(peers, new)["c"].reason), timeout=30)
    apply(peers, new)
    assert {record(peers, name)["file"]["version"] for name in "abc"} == {2}
    assert [record(peers, name)["accepts"] for name in "abc"] == [[], [], []]
    assert {status.reason for status in looked_at(peers, new).values()} == {None}


def test_one_of_two_simultaneous_applies_succeeds(fleet):
    peers = fleet({"a": "0-5", "b": "0-5", "c": "0-5"})
    files = {name: edited(peers, lambda named, _, i=i: named["b"].update(blocks=f"{i}-5"), f"{name}.yaml")
             for i, name in enumerate(("laptop", "desk"), 1)}  # fmt: skip
    ended, begin = {}, threading.Barrier(2)

    def run(name):
        with Applier(
            files[name], peers.file, None, keys=load_secret(peers.secret_key(name)), wait=60.0, connect=60.0
        ) as one:
            change = one.look()
            begin.wait(60)
            try:
                one.apply(change)
                ended[name] = ""
            except PushError as error:
                ended[name] = str(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    (winner,) = [name for name, why in ended.items() if not why]
    (loser,) = [name for name in ended if name != winner]
    assert f"{winner}." in ended[loser]
    assert "is pushing a bundle; try again" in ended[loser]
    assert {status.reason for status in looked_at(peers, files[winner]).values()} == {None}
    apply(peers, files[loser], name=loser)  # tried again when the other one has finished
    assert {record(peers, name)["file"]["version"] for name in "abc"} == {2}
    assert {status.reason for status in looked_at(peers, files[loser]).values()} == {None}


def test_a_source_removes_itself(fleet):
    peers = fleet({"a": "0-5", "b": "0-5"})
    new = edited(peers, lambda named, document: document["sources"].remove(named["laptop"]))
    _, states = apply(peers, new)
    assert states == {"a": "active", "b": "active"}
    with Observer(new, keys=load_secret(peers.secret_key("desk"))) as observer:
        assert {status.state for status in observer.look(10.0).values()} == {"alive"}
    with Observer(peers.file, keys=load_secret(peers.secret_key("laptop"))) as observer:
        assert {status.key for status in observer.look(10.0).values()} == {"refused"}


def test_a_board_that_lies_cannot_prevent_its_removal_nor_use_up_the_versions(fleet):
    """A captured board announces the last version, takes part in nothing, and is cut off nevertheless."""
    peers = fleet({"a": "0-5", "b": "0-5", "c": "0-5"})
    peers.kill("c")
    liar = Peer(peers.file, "c", store=peers.store("c"), keys=load_secret(peers.secret_key("c")))
    liar._stored.installer.receive = lambda *_: None
    liar._stored.installer.files = Lies(liar._stored.installer.files)
    thread = threading.Thread(target=liar.serve)
    thread.start()
    try:
        peers_left = edited(peers, lambda named, document: document["peers"].remove(named["c"]))
        warned = []
        change, states = apply(peers, peers_left, wait=3.0, on_warning=warned.append)
        assert (change.version, states) == (1, {"a": "active", "b": "active", "c": "removed"})
        assert [text for text in warned if text.startswith("c: ") and "removed anyway" in text]
        found = served(peers, peers_left)
        assert found == {"a": tuple(range(6)), "b": tuple(range(6))}
        assert {name: record(peers, name)["accepts"] for name in "ab"} == {"a": [], "b": []}
    finally:
        liar.stop()
        liar.stop()
        thread.join(10)


class Lies:
    """Announced files of a peer that lies."""

    def __init__(self, files):
        self._files = files

    def __getattr__(self, name):
        return getattr(self._files, name)

    @property
    def own(self):
        return (FileVersion((1 << 32) - 1, bytes(32)),)


def test_a_key_that_a_board_does_not_have_changes_nothing(fleet):
    peers = fleet({"a": "0-5", "b": "0-5"})
    key = new_keys("other", peers.folder)[0].public.decode()
    new = edited(peers, lambda named, _: named["b"].update(public_key=key, blocks="0-4"))
    change, states = apply(peers, new, connect=5.0)
    assert (states["a"], "b" in change.missing) == ("active", True)  # as long as the board with that key is away
    assert served(peers, new)["a"] == tuple(range(6))
    assert set(apply(peers, edited(peers, lambda _named, _document: None, "old.yaml"), connect=20.0)[1].values()) == {
        "active"
    }


def test_a_full_disk_ends_a_change_and_the_fleet_serves(fleet, tiny_bundle, small_disk):
    peers = fleet({"a": "0-5", "b": "0-2", "c": "0-5"})
    disk = small_disk(megabytes=8)
    peers.kill("b")
    shutil.copytree(peers.store("b"), disk / "store")
    shutil.rmtree(peers.store("b"))
    peers.store("b").symlink_to(disk / "store")
    peers.start("b")
    peers.wait_warm("b")
    free = os.statvfs(disk)
    (disk / "fill").write_bytes(bytes(free.f_bavail * free.f_bsize))
    new = edited(peers, lambda named, _: named["b"].update(blocks="3-5"))
    with pytest.raises(PushError, match=r"b: .*disk full.*no peer was switched"):
        apply(peers, new, tiny_bundle)
    assert served(peers, peers.file) == {"a": tuple(range(6)), "b": (0, 1, 2), "c": tuple(range(6))}
    (disk / "fill").unlink()
    assert set(apply(peers, new, tiny_bundle)[1].values()) == {"active"}
    assert served(peers, new)["b"] == (3, 4, 5)


def test_a_new_model_reaches_sources_without_a_bundle_and_loses_no_answer(fleet, tiny_bundle, other_bundle, wait_until):
    peers = fleet({"a": "all", "b": "stem, 0-5", "c": "2-5, head", "d": "0-3, head"})
    old, new = (Bundle.open(one).manifest for one in (tiny_bundle, other_bundle))
    warned, answers, halt = [], [], threading.Event()
    picture = bombs.flat(40, "JPEG")

    def ask(source):
        while not halt.is_set():
            answers.append(source.submit(picture, budget_ms=20_000).result(30))

    keys = load_secret(peers.secret_key("desk"))
    with (
        Source(peers.file, keys=keys) as thin,
        Source(peers.file, Bundle.open(tiny_bundle), keys=load_secret(peers.secret_key("laptop"))) as own,
    ):
        assert thin.wait_ready(30.0) == own.wait_ready(30.0) == ()
        load = threading.Thread(target=ask, args=(thin,))
        load.start()
        try:
            wait_until(lambda: len(answers) > 5)
            change, states = apply(peers, peers.file, other_bundle, on_warning=warned.append)
            count = len(answers)
            wait_until(lambda: len(answers) > count + 5)
        finally:
            halt.set()
            load.join(30)
        assert set(states.values()) == {"active"}
        assert (change.plan.outages, change.other_model.count("another model")) == ({}, 1)
        assert thin.bundle.manifest.bundle_id == new.bundle_id != old.bundle_id
        assert not [answer for answer in answers if answer.degraded]
        assert len({answer.record.id for answer in answers}) == len(answers)
        assert sorted(thin.snapshot.peers) == ["a", "b", "c", "d"]
        # Only the source with the previous bundle is left behind, and says why.
        assert [text.partition(" ")[0].partition(".")[0] for text in warned] == ["laptop"]
        assert new.model_id[:12] in own.snapshot.mismatched["a"]
        before = edited(peers, lambda _named, _document: None, "before.yaml")
        apply(peers, before, tiny_bundle, on_warning=warned.append)  # rolled back: both sources answer
        wait_until(lambda: thin.bundle.manifest.bundle_id == old.bundle_id, timeout=30)
        assert own.wait_ready(30.0) == thin.wait_ready(30.0) == ()
        assert not own.submit(bombs.flat(40, "JPEG")).result(30).degraded
