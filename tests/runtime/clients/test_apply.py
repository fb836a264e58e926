"""A running fleet of real peers becomes what a new ``peers.yaml`` says."""

import hashlib
import json
import shutil
import threading

import msgspec
import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle, bundle_id_of, write_manifest
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.sender import PushError
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret, new_keys
from tests.data import bombs
from tests.faults.applying import give
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
        give(peers.file, tiny_bundle, peers.secret_key("laptop"))
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


def apply(peers, new, bundle=None, **named):
    """Apply a file, and return the state of each peer."""
    found = give(peers.file, bundle, peers.secret_key("laptop"), new, **named)
    return {peer: result.state for peer, result in found.items()}


def record(peers, name):
    return json.loads((peers.store(name) / "store.json").read_text())


def looked_at(peers, file):
    with Observer(file, keys=load_secret(peers.secret_key("laptop"))) as observer:
        return observer.look(10.0)


def served(peers, file):
    return {name: one.blocks for name, one in looked_at(peers, file).items()}


def test_empty_peers_are_loaded_change_precision_under_load_and_roll_back(
    tmp_path, tiny_bundle, half_bundle, images, wait_until
):
    """A peer is killed while it receives the second bundle."""
    twice = {"a": (0, 1, 2, 3), "b": (2, 3, 4, 5), "c": (0, 1, 4, 5)}
    first, second = (Bundle.open(bundle).manifest for bundle in (tiny_bundle, half_bundle))
    with LocalCluster(
        tmp_path / "fleet", tiny_bundle, twice, sources=["laptop", "desk"], keys=True, stores=True
    ) as peers:
        key, killed = peers.secret_key("laptop"), threading.Event()
        found = give(peers.file, tiny_bundle, key)
        for name, blocks in twice.items():
            sizes = sum(first.parts.blocks[block].bytes for block in blocks)
            assert (found[name].state, found[name].reason) == ("active", None)
            assert (found[name].parts, found[name].bytes) == (len(blocks), sizes)
        assert {one.sent_bytes for one in give(peers.file, tiny_bundle, key).values()} == {0}

        def kill_once(percent, _total, text):
            if text.startswith("b: receiving") and 0 < percent < 100 and not killed.is_set():
                killed.set()
                peers.kill("b")
                peers.start("b")

        with Load(peers, tiny_bundle, images) as load:
            assert set(apply(peers, peers.file, half_bundle, on_progress=kill_once).values()) == {"active"}
            done = len(load.answers)
            wait_until(lambda: len(load.answers) > done + 20, what="answers after the change")
        load.assert_whole()
        assert killed.is_set()
        for expected in (first, second):
            back = give(peers.file, "previous", key)
            assert {one.state for one in back.values()} == {"active"}
            assert sum(one.sent_bytes for one in back.values()) == 0
            assert {one.bundle_id for one in looked_at(peers, peers.file).values()} == {expected.bundle_id}


def test_peers_go_back_from_a_bundle_that_does_not_load(fleet, tiny_bundle, tmp_path, images, wait_until):
    """Its digests are right, but its content is not: only the switch finds out."""
    broken, good = tmp_path / "broken", Bundle.open(tiny_bundle)
    shutil.copytree(tiny_bundle, broken)
    raw = b"not a model"
    (broken / good.manifest.parts.blocks[1].file).write_bytes(raw)
    parts = list(good.manifest.parts.blocks)
    parts[1] = msgspec.structs.replace(parts[1], sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))
    parts = msgspec.structs.replace(good.manifest.parts, blocks=tuple(parts))
    changed = bundle_id_of(good.interface, good.manifest.precision, parts)
    write_manifest(broken, msgspec.structs.replace(good.manifest, parts=parts, bundle_id=changed))
    peers = fleet({"a": "0-3", "b": "2-5", "c": "0-1,4-5"})
    with Load(peers, tiny_bundle, images) as load:
        with pytest.raises(PushError, match=r"a: went back to the previous bundle: .*no peer was switched"):
            apply(peers, peers.file, broken)
        assert {name: one.state for name, one in give.found.items()} == {"a": "failed", "b": "ready", "c": "ready"}
        wait_until(lambda: len(load.answers) >= 25, 30.0, "answers")
    load.assert_whole()
    assert {one.bundle_id for one in looked_at(peers, peers.file).values()} == {good.manifest.bundle_id}


def test_settings_that_do_not_work_are_undone_with_the_file(fleet, wait_until):
    peers = fleet({"a": "0-5"})
    new = edited(peers, lambda named, _: named["a"].update(address=f"tcp://127.0.0.1:{free_ports(1)[0]}"))
    assert apply(peers, new) == {"a": "active"}  # it moves
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4, 5)}
    peers.path, peers.file = new.path, new
    bad = edited(peers, lambda named, _: named["a"].update(bind="tcp://192.0.2.1:5555"), "bad.yaml")
    with pytest.raises(PushError, match=r"went back to the previous peers.yaml: .*192.0.2.1"):
        apply(peers, bad)
    wait_until(lambda: looked_at(peers, new)["a"].warm, timeout=30)
    assert served(peers, new) == {"a": (0, 1, 2, 3, 4, 5)}
    assert record(peers, "a")["file"]["version"] == 2


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
        states = apply(peers, new, tiny_bundle, on_warning=warned.append)
        assert states == {"a": "active", "b": "active", "c": "active", "d": "removed", "e": "active", "f": "active"}
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


def test_a_board_that_was_away_is_told_and_is_changed_by_the_same_command(fleet, wait_until):
    peers = fleet({"a": "0-5", "b": "0-5", "c": "0-2"})
    with Observer(
        edited(peers, lambda named, _: named["c"].update(blocks="0-1")), keys=load_secret(peers.secret_key("laptop"))
    ) as one:
        reasons = {name: status.reason for name, status in one.look(10.0).items()}
    assert "it runs another peers.yaml, version 1 (blocks 0-2; here blocks 0-1)" in reasons["c"]  # edited, not applied
    peers.kill("c")
    for turn in range(2):
        new = edited(peers, lambda named, _, turn=turn: named["b"].update(blocks=f"0-{4 - turn}"), f"{turn}.yaml")
        assert apply(peers, new, connect=5.0) == {"a": "active", "b": "active", "c": "missing"}
    peers.start("c")
    peers.wait_warm("c")
    told = "a, b have version 3 of peers.yaml, this peer 1; run 'ls-edge apply' again"
    wait_until(lambda: told in str(looked_at(peers, new)["c"].reason), timeout=30)
    apply(peers, new)
    assert {record(peers, name)["file"]["version"] for name in "abc"} == {3}
    assert [record(peers, name)["accepts"] for name in "abc"] == [[], [], []]
    assert {status.reason for status in looked_at(peers, new).values()} == {None}
    # A source may remove itself.
    alone = edited(peers, lambda named, document: document["sources"].remove(named["laptop"]), "alone.yaml")
    assert set(apply(peers, alone).values()) == {"active"}
    with Observer(alone, keys=load_secret(peers.secret_key("desk"))) as observer:
        assert {status.state for status in observer.look(10.0).values()} == {"alive"}
    with Observer(peers.file, keys=load_secret(peers.secret_key("laptop"))) as observer:
        assert {status.key for status in observer.look(10.0).values()} == {"refused"}


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
            states = apply(peers, peers.file, other_bundle, on_warning=warned.append)
            count = len(answers)
            wait_until(lambda: len(answers) > count + 5)
        finally:
            halt.set()
            load.join(30)
        assert set(states.values()) == {"active"}
        assert thin.bundle.manifest.bundle_id == new.bundle_id != old.bundle_id
        assert not [answer for answer in answers if answer.degraded]
        assert len({answer.record.id for answer in answers}) == len(answers)
        assert sorted(thin.snapshot.peers) == ["a", "b", "c", "d"]
        # Only the source with the previous bundle is left behind, and says why.
        assert [text.partition(" ")[0].partition(".")[0] for text in warned] == ["laptop"]
        assert new.model_id[:12] in own.snapshot.mismatched["a"]
        before = edited(peers, lambda _named, _document: None, "before.yaml")
        apply(peers, before, "previous", on_warning=warned.append)  # both sources answer
        wait_until(lambda: thin.bundle.manifest.bundle_id == old.bundle_id, timeout=30)
        assert own.wait_ready(30.0) == thin.wait_ready(30.0) == ()
        assert not own.submit(bombs.flat(40, "JPEG")).result(30).degraded
