"""``ls-edge apply``: the difference, the questions, and the exit codes."""

import contextlib
import json
import re

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.faults.killed_changes import kill_changes

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def write(cluster, name, change):
    document = yaml.safe_load(cluster.path.read_text())
    change({one["name"]: one for one in document["peers"]})
    path = cluster.folder / name
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@contextlib.contextmanager
def pushed_cluster(tmp_path, bundle, placement, ls_edge):
    """Start peers with stores and push a bundle; yield the cluster, and the words for bundle and key."""
    sources = ["laptop", "desk"]
    with LocalCluster(tmp_path / "fleet", bundle, placement, sources=sources, keys=True, stores=True) as peers:
        words = ["--bundle", bundle, "--secret-key", peers.secret_key("laptop")]
        done = ls_edge.run("apply", peers.path, *words, "--yes", "--json", timeout=90)
        assert done.returncode == 0, done.stderr
        assert set(json.loads(done.stdout)["peers"]["a"]) == {"parts", "bytes", "sent_bytes", "state", "reason"}
        yield peers, words


@pytest.mark.release
@pytest.mark.timeout(240)
def test_a_change_is_shown_refused_degraded_and_completed(tmp_path, make_bundle, ls_edge, complaints):
    make_bundle(tmp_path / "bundle", blocks=4)
    placement = {"a": "0-3", "b": "0-1", "c": "0-2"}
    with pushed_cluster(tmp_path, tmp_path / "bundle", placement, ls_edge) as (peers, bundle):

        def apply(path, *more):
            return ls_edge.run("apply", path, "--peers", peers.path, *bundle, *more, timeout=90)

        moved = write(peers, "moved.yaml", lambda named: named["c"].update(blocks="2-3"))
        done = apply(moved, "--dry-run", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["version"], found["outage"]) == (0, 2, None)
        size = Bundle.open(tmp_path / "bundle").part("block 3").bytes
        holders = {"0": 2, "1": 2, "2": 1, "3": 1}
        assert found["changes"]["c"] == {
            "change": "switch", "gains": [3], "loses": [0, 1], "bytes": size, "holders": holders
        }  # fmt: skip
        assert found["changes"]["a"]["change"] == "follow"
        assert re.search(r"\nc +changed +block 3 +blocks 0-1 ", apply(moved, "--dry-run").stdout)
        done = apply(moved)  # nobody answers the question
        assert (done.returncode, "--yes" in complaints(done)[-1]) == (2, True)

        outage = write(peers, "outage.yaml", lambda named: named["a"].update(blocks="0-2"))
        done = apply(outage, "--yes")
        assert done.returncode == 2
        assert "while a switches, no peer serves block 3" in complaints(done)[-1]

        peers.kill("b")
        done = apply(moved, "--yes")
        assert done.returncode == 3, done.stderr
        assert "b: not reached" in done.stderr
        peers.start("b")
        peers.wait_warm("b")
        done = apply(moved, "--yes", "--json")
        assert done.returncode == 0, done.stderr
        assert {one["state"] for one in json.loads(done.stdout)["peers"].values()} == {"active"}
        done = apply(moved)
        assert (done.returncode, "version 2" in done.stdout) == (0, True)
        status = ls_edge.run("status", "--peers", moved, "--secret-key", peers.secret_key("laptop"), "--json")
        assert {name: one["blocks"] for name, one in json.loads(status.stdout)["peers"].items()} == {
            "a": [0, 1, 2, 3], "b": [0, 1], "c": [2, 3],
        }  # fmt: skip

        done = ls_edge.run("apply", peers.path, *bundle[2:], "--rollback", "--yes", timeout=90)
        assert (done.returncode, "no peer can return to a previous bundle" in complaints(done)[-1]) == (2, True)

        status = ls_edge.run("status", "--peers", peers.path, *bundle[2:], "--json", timeout=90)
        reason = json.loads(status.stdout)["peers"]["c"]["reason"]
        assert "it runs another peers.yaml, version 2 (blocks 2-3; here blocks 0-2)" in reason

        # The peers tell that c belongs to the fleet, although the new file, which is in LS_EDGE_PEERS, does not.
        smaller = write(peers, "smaller.yaml", lambda named: None)
        document = yaml.safe_load(smaller.read_text())
        document["peers"] = [one for one in document["peers"] if one["name"] != "c"]
        smaller.write_text(yaml.safe_dump(document, sort_keys=False))
        done = ls_edge.run("apply", smaller, "--peers", smaller, *bundle, "--yes", "--json", timeout=90)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["changes"]["c"]["change"] == "remove"
        assert json.loads(done.stdout)["peers"]["c"]["state"] == "removed"


@pytest.mark.release
@pytest.mark.timeout(600)
def test_changes_that_are_killed_at_random_moments_lose_no_request(tmp_path, tiny_bundle, other_bundle):
    kill_changes(tmp_path / "fleet", (tiny_bundle, other_bundle), kills=10)


def test_a_change_that_cannot_begin_is_one_line(tmp_path, make_bundle, ls_edge, complaints, write_peers):
    make_bundle(tmp_path / "bundle", blocks=4)
    file, bundle = write_peers({"a": (0, 1, 2, 3)}), ["--bundle", tmp_path / "bundle"]
    for words, said in (
        (["apply", file, *bundle, "--rollback"], "leave out --bundle"),
        (["apply", file, *bundle], "has no keys, so anybody could push"),
        (["peer", "--peers", file, "--name", "a"], "give either --bundle FOLDER, or --store FOLDER"),
        (["peer", "--peers", file, "--name", "a", "--store", tmp_path / "store"], "no source of"),
    ):
        done = ls_edge.run(*words)
        assert (done.returncode, len(complaints(done))) == (2, 1), done.stderr
        assert said in complaints(done)[0]
