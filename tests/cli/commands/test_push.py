"""``ls-edge push``: what it prints, and what it says where it cannot begin."""

import json
import re

import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.text import short_id
from ls_edge.runtime.fleet.local_cluster import LocalCluster

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


@pytest.mark.release
def test_a_push_and_a_failed_push_have_json(tmp_path, make_bundle, ls_edge, complaints):
    make_bundle(tmp_path / "bundle", blocks=4)
    cluster = LocalCluster(
        tmp_path / "fleet", tmp_path / "bundle", {"a": (0, 1), "b": (2, 3)}, sources=["laptop"], keys=True, stores=True
    )
    with cluster as peers:
        to = ["--peers", peers.path, "--secret-key", peers.secret_key("laptop"), "--json"]
        done = ls_edge.run("push", "--bundle", tmp_path / "bundle", *to, timeout=90)
        found = json.loads(done.stdout)["peers"]
        assert (done.returncode, {one["state"] for one in found.values()}) == (0, {"active"})
        assert set(found["a"]) == {"parts", "bytes", "sent_bytes", "state", "reason"}
        shown = short_id(Bundle.open(tmp_path / "bundle").manifest.bundle_id)
        status = ls_edge.run("status", *to[:-1], timeout=90)
        assert status.stdout.count(shown) == 2, status.stdout
        logged = set(re.findall(r"bundle=(\S+)", peers.log_path("a").read_text(encoding="utf-8")))
        assert logged == {shown}
        done = ls_edge.run("push", "--rollback", *to, timeout=90)
        assert done.returncode == 1
        assert "has no previous bundle" in complaints(done)[0]
        peers.kill("b")
        done = ls_edge.run("push", "--bundle", tmp_path / "bundle", *to, timeout=90)
        assert (done.returncode, len(complaints(done))) == (1, 1)
        assert "b: nobody answers at" in complaints(done)[0]
        assert json.loads(done.stdout)["peers"]["b"]["state"] == "failed"


def test_a_push_that_cannot_begin_is_one_line(tmp_path, make_bundle, ls_edge, complaints, write_peers):
    make_bundle(tmp_path / "bundle", blocks=4)
    file = write_peers({"a": (0, 1, 2, 3)})
    for words, said in (
        (["push", "--peers", file], "give --bundle FOLDER, or --rollback"),
        (["push", "--peers", file, "--bundle", tmp_path / "bundle"], "has no keys, so anybody could push"),
        (["peer", "--peers", file, "--name", "a"], "give either --bundle FOLDER, or --store FOLDER"),
        (["peer", "--peers", file, "--name", "a", "--store", tmp_path / "store"], "no source of"),
    ):
        done = ls_edge.run(*words)
        assert (done.returncode, len(complaints(done))) == (2, 1), done.stderr
        assert said in complaints(done)[0]
