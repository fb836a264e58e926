"""``predict``, ``run`` and ``serve`` without ``--bundle``: the peers run all of the model, and say which it is."""

import json
import re

import pytest

from tests.runtime.serve.serving import Server, picture, turned

PLACEMENT = {"a": "all", "b": "stem, 0-5, head"}


def test_predict_and_run_answer_as_with_a_bundle(peers, tiny_bundle, tmp_path, command):
    (tmp_path / "photo.jpg").write_bytes(picture(kind="JPEG"))
    (tmp_path / "torn.jpg").write_bytes(picture(kind="JPEG")[:300])
    words = ["predict", "--peers", peers.path, "--json", tmp_path / "photo.jpg", tmp_path / "torn.jpg"]
    code, out, _ = command(*words)
    rows, (own, _) = (
        map(json.loads, out.splitlines()),
        map(json.loads, command(*words, "--bundle", tiny_bundle)[1].splitlines()),
    )
    answered, torn = rows
    assert [top["label"] for top in answered["top"]] == [top["label"] for top in own["top"]]
    assert (code, torn["top"], "decode" in torn["error"]) == (3, [], True)
    code, out, _ = command("run", "--peers", peers.path, "--data", "digits", "--limit", "20", "--json")
    document = json.loads(out)
    assert (code, document["answered"]) == (0, 20)
    assert command("run", "--peers", peers.path, "--data", "digits", "--audit", "1")[0] == 2


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_stem_and_head_are_named_wherever_parts_are_shown(peers, tmp_path, command):
    files = {name: tmp_path / name for name in ("trace", "events.json", "run.html", "run.json", "all.html")}
    words = ["--peers", peers.path, "--data", "digits", "--limit", "30", "--policy", "parallel", "--json"]
    outputs = ["--trace", files["trace"], "--trace-events", files["events.json"], "--report", files["run.html"]]
    code, out, _ = command("run", *words, *outputs)
    files["run.json"].write_text(out)
    assert (code, json.loads(out)["peers"]["b"]["blocks"]) == (0, ["stem", *range(6), "head"])
    visits = [visit for line in files["trace"].read_text().splitlines() for visit in json.loads(line)["visits"]]
    assert {part for visit in visits for part in visit["blocks"]} == {"stem", *range(6), "head"}
    code, compared, _ = command("report", files["run.json"], "--out", files["all.html"])
    assert code == 0
    status, checked = (command("status", "--peers", peers.path, *more)[1] for more in (["--json"], ["--check"]))
    assert json.loads(status)["peers"]["a"]["blocks"] == ["stem", *range(6), "head"]
    texts = [out, compared, status, checked, *(path.read_text() for path in files.values())]
    # In data that are not times; a report's JavaScript has 65535 as well.
    number = re.compile(r'"(?!ts"|dur")\w*(?<!_us)(?<!_ms)": ?6553[45]\b(?!\.)|[\[,] ?6553[45][\],]')
    assert not [found for text in texts for found in number.findall(text) if text[:2] != "<!" or ": " in found]


def test_serve_sends_images_on_as_they_came(peers, ls_edge):
    server = Server(ls_edge, peers.path, None)
    assert server.get("/status")[1]["peers"]["a"]["blocks"] == ["stem", *range(6), "head"]
    assert server.predict(picture())[0] == 200
    assert "EXIF orientation" in server.predict(turned(6))[1]["notes"][0]
    status, document = server.predict(b"not an image")
    assert (status, "cannot decode" in document["error"]) == (400, True)
    found = server.get("/v2/models/vit_16x32_depth6")[1]
    assert [one["name"] for one in found["inputs"]] == ["image", "pixels"]
