"""A second implementation, written in JavaScript from PROTOCOL.md alone, beside real peers and a real source.

It needs ``node`` and nothing else: ZMTP with CURVE, MessagePack and the few ONNX operators of the bundle are its own.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle
from ls_edge.core.parts import HEAD, STEM
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline, relative_error
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.source.source import Source

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))
BLOCKS = 6


# The vectors.


@pytest.fixture(scope="module")
def report(node):
    """How the second implementation reads and writes the vectors."""
    command = [node, str(HERE / "check_vectors.mjs"), str(HERE / "vectors.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_messages_are_read_as_the_vectors_say(report):
    for vector, read in zip(VECTORS["messages"], report["messages"], strict=True):
        assert read["message"] == vector["message"], vector["name"]


def test_several_messages_are_read_as_the_vectors_say(report):
    for vector, read in zip(VECTORS["several"], report["several"], strict=True):
        assert read == vector["messages"], vector["name"]


def test_messages_that_it_writes_are_read_here(report):
    for vector, written in zip(VECTORS["messages"], report["messages"], strict=True):
        ours = framing.decode(bytes.fromhex(vector["hex"]))
        assert framing.decode(bytes.fromhex(written["hex"])) == ours, vector["name"]


def test_malformed_headers_and_tokens_are_refused(report):
    for kind in ("malformed", "malformed_tokens"):
        for vector, why in zip(VECTORS[kind], report[kind], strict=True):
            assert why, vector["name"]


def test_tokens_are_read_and_written_as_the_vectors_say(report):
    for vector, read in zip(VECTORS["tokens"], report["tokens"], strict=True):
        assert read["values"] == [value for row in vector["values"] for value in row], vector["name"]
        assert read["hex"] == vector["hex"], vector["name"]


# Beside real ones.


def holders(answers):
    """Who ran blocks of each answer."""
    waves = [answer.record.waves for answer in answers]
    return [{holder for wave in one for track in wave for _, holder in track} for one in waves]


def test_answers_of_every_policy_replay(mixed, tiny_bundle, images, assert_replays):
    with mixed({"a": range(4), "b": [0, 1], "js": [4, 5]}, "js") as peers:
        peers.wait_warm()
        pictures = images(8)
        policies = [policy for policy in POLICIES if policy != "quality"]  # which needs costs that this bundle lacks
        for policy in policies:
            with Source.open(peers.path, tiny_bundle, policy=policy, max_skips=0, budget_ms=30_000) as source:
                assert source.wait_ready(30) == ()
                answers = [future.result(40) for future in [source.submit(picture) for picture in pictures]]
            assert all(not answer.record.skipped for answer in answers)
            assert all("js" in names and names & {"a", "b"} for names in holders(answers)), policy
            assert_replays(tiny_bundle, pictures, answers)
        assert peers.terminate("js") == 0
        assert peers.left("js")["blocks"] >= 2 * len(pictures) * len(policies)
        assert peers.left("js")["complaints"] == 0
        complained = [line for line in peers.log_path("a").read_text().splitlines() if "complain" in line]
        assert complained == []


def test_answers_stay_within_the_bands(mixed, banded_bundle, images, assert_replays):
    bands, pictures = Bundle.open(banded_bundle).bands, images(6)
    with mixed({"a": [1, 2, 3, 5], "js": [0, 2, 4]}, "js", bundle=banded_bundle) as peers:
        peers.wait_warm()
        for policy in ("nearest", "random", "parallel"):
            with Source.open(peers.path, banded_bundle, policy=policy, max_skips=0, budget_ms=30_000) as source:
                assert source.wait_ready(30) == ()
                answers = [future.result(40) for future in [source.submit(picture) for picture in pictures]]
                assert source.snapshot.rejected == {}
            assert not any(bands.fault(answer.arrangement) for answer in answers)
            assert all(names == {"a", "js"} for names in holders(answers))
            assert_replays(banded_bundle, pictures, answers)
        assert peers.terminate("js") == 0
        assert peers.left("js")["complaints"] == 0


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "CURVE"])
def test_two_of_them_answer_without_any_other_peer(mixed, tiny_bundle, images, assert_replays, keys):
    placement, named = {"js-0": [0, 2, 4], "js-1": [1, 3, 5]}, {"keys": keys, "sources": ["laptop"]}
    with mixed(placement, "js-0", "js-1", each={"codec": "fp16"}, **named) as peers:
        peers.wait_warm()
        pictures, key = images(4), peers.secret_key("laptop")
        with Source.open(peers.path, tiny_bundle, policy="sequential", budget_ms=30_000, secret_key=key) as source:
            assert source.wait_ready(30) == ()
            answers = [future.result(40) for future in [source.submit(picture) for picture in pictures]]
        order = tuple((block, f"js-{block % 2}") for block in range(BLOCKS))
        assert [answer.record.steps for answer in answers] == [order] * len(answers)
        assert_replays(tiny_bundle, pictures, answers, tolerance=codecs.REPLAY_TOLERANCE["fp16"])


def test_requests_live_through_kills_and_drains_of_others_and_its_own(mixed, tiny_bundle, images, assert_replays):
    placement = {"a": [0, 1, 4, 5], "b": [0, 1, 4, 5], "js": [2, 3], "c": [2, 3]}
    with mixed(placement, "js") as peers:
        peers.wait_warm()
        pictures = images(120)
        with Source.open(peers.path, tiny_bundle, max_skips=0, budget_ms=60_000, max_inflight=8) as source:
            assert source.wait_ready(30) == ()
            answers = []

            def ask(first, what):
                futures = [source.submit(picture) for picture in pictures[first : first + 40]]
                what()
                answers.extend(future.result(70) for future in futures)

            ask(0, lambda: peers.kill("a"))
            peers.start("a")
            peers.wait_warm("a")
            ask(40, lambda: peers.terminate("b"))
            ask(80, lambda: peers.kill("js"))
        assert len(answers) == len(pictures)
        assert sum("js" in names for names in holders(answers)) > 5
        assert_replays(tiny_bundle, pictures, answers)


def test_it_drains(mixed, tiny_bundle, images, assert_replays):
    with mixed({"js": range(BLOCKS), "a": range(BLOCKS)}, "js") as peers:
        peers.wait_warm()
        pictures = images(60)
        with Source.open(peers.path, tiny_bundle, max_skips=0, budget_ms=60_000, max_inflight=16) as source:
            assert source.wait_ready(30) == ()
            futures = [source.submit(picture) for picture in pictures]
            futures[5].result(70)
            assert peers.terminate("js") == 0
            answers = [future.result(70) for future in futures]
        assert_replays(tiny_bundle, pictures, answers)
        left = peers.left("js")
        assert left["home"] == left["accepted"] > 0


# A source that has no model.


@pytest.fixture
def ask(node):
    """Start the source in JavaScript with images."""

    def start(peers, *paths):
        command = [node, HERE / "minimal_source.mjs", peers.json, "laptop", peers.secret_key("laptop") or "-", *paths]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def photos(tmp_path):
    """Write JPEG files."""

    def write(count):
        paths = [tmp_path / f"{index}.jpg" for index in range(count)]
        for index, path in enumerate(paths):
            Image.effect_noise((40, 30), 20 + index).convert("RGB").save(path)
        return paths

    return write


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "CURVE"])
def test_a_source_without_a_model_gets_the_logits_of_its_images(mixed, tiny_bundle, ask, photos, tmp_path, keys):
    (broken := tmp_path / "broken.jpg").write_bytes(b"no picture")
    paths, bundle = photos(4), Bundle.open(tiny_bundle)
    with mixed({"a": "stem, 0-2", "b": "3-5, head"}, keys=keys, sources=["laptop"]) as peers:
        peers.wait_warm()
        with ask(peers, *paths, broken) as source:
            said, _ = source.communicate(timeout=40)
        log = peers.log_path("a").read_text()
    assert source.returncode == 1
    lines = {line["image"]: line for line in map(json.loads, said.splitlines())}
    assert lines.pop(str(broken))["error"].startswith("no image: ")
    order = [[STEM, "a"], [0, "a"], [1, "a"], [2, "a"], [3, "b"], [4, "b"], [5, "b"], [HEAD, "b"]]
    preprocess = Preprocessor(bundle.manifest.image)
    with Pipeline.open(bundle, threads=1) as pipeline:
        for path in paths:
            logits = pipeline.forward(preprocess(path.read_bytes())[None])[0]
            line = lines.pop(str(path))
            assert line["steps"] == order
            assert relative_error(np.float32(line["logits"]), logits) < 1e-4
    assert not lines
    assert "dropped" not in log


def test_images_of_a_source_without_a_model_live_through_the_death_of_a_peer(mixed, ask, photos):
    with mixed({"a": "stem, 0-2", "b": "3-5, head", "c": "3-5, head"}) as peers:
        peers.wait_warm()
        with ask(peers, *photos(60)) as source:
            first = source.stdout.readline()
            peers.kill(json.loads(first)["steps"][-1][1])
            rest = source.stdout.read()
        assert source.returncode == 0
        assert len({json.loads(line)["image"] for line in (first + rest).splitlines()}) == 60
