"""``ls-edge apply``: the difference, the questions, and the exit codes."""

import contextlib
import json
import random
import subprocess
import threading

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret
from tests.data import bombs
from tests.runtime.clients.load import Load

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
        assert ls_edge.run("push", "--peers", peers.path, *words, timeout=90).returncode == 0
        yield peers, words


@pytest.mark.slow
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
        assert (done.returncode, found["version"], found["outage"]) == (0, 1, None)
        size = Bundle.open(tmp_path / "bundle").part("block 3").bytes
        assert found["changes"]["c"] == {"change": "switch", "gains": [3], "loses": [0, 1], "bytes": size}
        assert found["changes"]["a"]["change"] == "follow"
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
        assert (done.returncode, "version 1" in done.stdout) == (0, True)
        status = ls_edge.run("status", "--peers", moved, "--secret-key", peers.secret_key("laptop"), "--json")
        assert {name: one["blocks"] for name, one in json.loads(status.stdout)["peers"].items()} == {
            "a": [0, 1, 2, 3], "b": [0, 1], "c": [2, 3],
        }  # fmt: skip

        done = ls_edge.run("doctor", "--peers", peers.path, *bundle[2:], "--json", timeout=90)
        rows = json.loads(done.stdout)["peers"]["c"]["findings"]
        (detail,) = [row["detail"] for row in rows if row["what"] == "peers.yaml"]
        assert detail.startswith("it runs another peers.yaml, version 1 (blocks 2-3; here blocks 0-2)")

        # The peers tell that c belongs to the fleet, although the new file does not.
        smaller = write(peers, "smaller.yaml", lambda named: None)
        document = yaml.safe_load(smaller.read_text())
        document["peers"] = [one for one in document["peers"] if one["name"] != "c"]
        smaller.write_text(yaml.safe_dump(document, sort_keys=False))
        done = ls_edge.run("apply", smaller, *bundle, "--yes", "--json", timeout=90)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["changes"]["c"]["change"] == "remove"
        assert json.loads(done.stdout)["peers"]["c"]["state"] == "removed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_changes_that_are_killed_at_random_moments_lose_no_request(tmp_path, tiny_bundle, images, ls_edge):
    """The pusher, or a peer, is killed; the last command completes the change."""
    draw = random.Random(0)
    placement = {"a": "0-5", "b": "0-2", "c": "3-5", "d": "0-5"}
    with pushed_cluster(tmp_path, tiny_bundle, placement, ls_edge) as (peers, bundle):
        files = [
            write(peers, "even.yaml", lambda named: None),
            write(peers, "odd.yaml", lambda named: (named["b"].update(blocks="3-5"), named["c"].update(blocks="0-2"))),
        ]
        words = ["--peers", peers.path, *bundle, "--yes"]
        with Load(peers, tiny_bundle, images) as load:
            for turn in range(8):
                process = ls_edge.start("apply", files[turn % 2], *words)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0.5, 8.0))
                if turn % 2:
                    victim = draw.choice("abc")
                    peers.kill(victim)
                    peers.start(victim)
                process.kill()
                process.wait()
            done = ls_edge.run("apply", files[1], *words, timeout=120)
            assert done.returncode == 0, done.stderr
        load.assert_whole()
        status = ls_edge.run("status", "--peers", files[1], *bundle[2:], "--json")
        found = json.loads(status.stdout)["peers"]
        assert {name: one["blocks"] for name, one in found.items()} == {
            "a": [0, 1, 2, 3, 4, 5], "b": [3, 4, 5], "c": [0, 1, 2], "d": [0, 1, 2, 3, 4, 5],
        }  # fmt: skip
        assert {one["reason"] for one in found.values()} == {None}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_changes_of_the_model_that_are_killed_lose_no_request(tmp_path, tiny_bundle, other_bundle, ls_edge):
    """A source without a bundle is on one model or the other, whichever peers hold all of it."""
    draw = random.Random(0)
    placement = {"a": "all", "b": "stem, 0-5", "c": "2-5, head", "d": "stem, 0-3, head"}
    with pushed_cluster(tmp_path, tiny_bundle, placement, ls_edge) as (peers, bundle):
        words = [*bundle[2:], "--bundle"]
        answers, halt = [], threading.Event()

        def ask():
            while not halt.wait(0.05):
                future = thin.submit(bombs.flat(40, "JPEG"), budget_ms=60_000)
                answers.append(future.exception(90) or future.result().degraded)

        with Source(peers.file, keys=load_secret(peers.secret_key("desk"))) as thin:
            assert thin.wait_ready(30.0) == ()
            load = threading.Thread(target=ask)
            load.start()
            for turn in range(6):
                bundle = (other_bundle, tiny_bundle)[turn % 2]
                process = ls_edge.start("apply", peers.path, *words, bundle, "--yes")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(1.0, 8.0))
                if turn % 3 == 2:
                    victim = draw.choice("abcd")
                    peers.kill(victim)
                    peers.start(victim)
                process.kill()
                process.wait()
            done = ls_edge.run("apply", peers.path, *words, other_bundle, "--yes", timeout=120)
            halt.set()
            load.join(90)
            assert (done.returncode, set(answers)) == (0, {False}), done.stderr
            assert thin.bundle.manifest.model_id == Bundle.open(other_bundle).manifest.model_id
