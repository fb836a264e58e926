"""``predict``, ``run`` and ``serve`` without ``--bundle``: the peers run all of the model, and say which it is."""

import json

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster

from .serving import Server, picture


@pytest.fixture(scope="module")
def peers(tmp_path_factory, tiny_bundle):
    with LocalCluster(tmp_path_factory.mktemp("peers"), tiny_bundle, {"a": "all", "b": "stem, 0-5, head"}) as local:
        local.wait_warm()
        yield local


def test_predict_and_run_answer_as_with_the_bundle(peers, tiny_bundle, tmp_path, command):
    (tmp_path / "photo.jpg").write_bytes(picture(kind="JPEG"))
    (tmp_path / "torn.jpg").write_bytes(picture(kind="JPEG")[:300])
    words = ["predict", "--peers", peers.path, "--json", tmp_path / "photo.jpg", tmp_path / "torn.jpg"]
    code, out, err = command(*words)
    rows, (own, _) = (
        map(json.loads, out.splitlines()),
        map(json.loads, command(*words, "--bundle", tiny_bundle)[1].splitlines()),
    )
    answered, torn = rows
    assert [top["label"] for top in answered["top"]] == [top["label"] for top in own["top"]]
    assert (code, torn["top"]) == (3, [])
    assert "ImageRejected" in torn["error"] or "decode" in torn["error"]
    assert "the model is that of" in err
    code, out, _ = command("run", "--peers", peers.path, "--data", "digits", "--limit", "20", "--json")
    document = json.loads(out)
    assert (code, document["answered"]) == (0, 20)
    assert command("run", "--peers", peers.path, "--data", "digits", "--audit", "1")[0] == 2


def test_serve_sends_images_on_as_they_came(peers, ls_edge):
    server = Server(ls_edge, peers.path, None)
    assert server.predict(picture())[0] == 200
    status, document = server.predict(b"not an image")
    assert status == 400
    assert "cannot decode" in document["error"]
