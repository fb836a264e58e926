"""A source without a bundle sends images and receives logits: peers run stem and head."""

import contextlib
import io
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded, DataError, ImageRejected, LinkError, UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.peers_file import load_peers
from ls_edge.data.datasets import open_data
from ls_edge.data.decoders import Decoders
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import relative_error
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.payload import MAX_IMAGE
from ls_edge.runtime.source.run_dataset import run_dataset
from ls_edge.runtime.source.source import Source
from tests.data import bombs
from tests.faults.engines import Faults

CHAIN = {"a": "stem, 0-2", "b": "3-5, head"}


def photo(seed=0, kind="JPEG", size=(40, 30)):
    """The bytes of an encoded image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, kind)
    return encoded.getvalue()


@pytest.fixture
def expected(tiny_bundle):
    """Logits of an encoded image in the arrangement of an answer, computed in this process."""
    bundle = Bundle.open(tiny_bundle)
    preprocess = Preprocessor(bundle.manifest.image)
    with Pipeline.open(bundle, threads=1) as pipeline:
        yield lambda encoded, order: pipeline.forward(preprocess(encoded)[None], order)[0]


@pytest.mark.parametrize(
    "placement",
    [CHAIN, {"a": "all"}, {"a": "stem", "b": "0-5", "c": "head"}, {"a": "all", "b": "all", "c": "1-4"}],
    ids=["chain", "one", "apart", "copies"],
)
def test_a_source_without_a_bundle_gets_the_logits_of_its_images(serve_peers, expected, placement):
    with Source.open(serve_peers(placement)) as source:
        assert source.wait_ready(30) == ()
        for seed, kind in enumerate(["JPEG", "PNG", "WEBP"]):
            answer = source.submit(photo(seed, kind)).result(10)
            assert relative_error(answer.logits, expected(photo(seed, kind), answer.arrangement)) < 1e-4
            assert answer.arrangement.order == tuple(range(6))
            assert answer.class_name == source.bundle.manifest.classes[answer.logits.argmax()]
            ran = [part for visit in answer.record.visits for part in visit.blocks]
            assert (ran[0], ran[-1]) == (STEM, HEAD)
        pixels = np.random.default_rng(9).integers(0, 256, (20, 24, 3), np.uint8)
        array, picture = source.submit(pixels).result(10), source.submit(Image.fromarray(pixels)).result(10)
        assert np.array_equal(array.logits, picture.logits)


def test_bands_of_the_model_stay_between_stem_and_head(banded_bundle, serve_peers):
    with Source.open(serve_peers(CHAIN, banded_bundle), policy="random") as source:
        assert source.wait_ready(30) == ()
        orders = {source.submit(photo(seed)).result(10).arrangement.order for seed in range(12)}
    assert {(order[0], order[-1]) for order in orders} == {(0, 5)}


def test_a_source_with_the_bundle_runs_stem_and_head_itself(serve_peers, tiny_bundle):
    path = serve_peers(CHAIN)
    with Source.open(path, tiny_bundle) as own, Source.open(path) as thin:
        assert (own.wait_ready(30), thin.wait_ready(30)) == ((), ())
        pair = own.submit(photo()).result(10), thin.submit(photo()).result(10)
        assert np.allclose(pair[0].logits, pair[1].logits, atol=1e-5)
        assert pair[0].record.stem_us > 0 == pair[1].record.stem_us
        assert not {STEM, HEAD} & {part for visit in pair[0].record.visits for part in visit.blocks}


def test_an_undecodable_image_ends_once_with_its_own_error(serve_peers):
    with Source.open(serve_peers({"a": "all", "b": "all"})) as source:
        assert source.wait_ready(30) == ()
        for name, (make, _) in bombs.BOMBS.items():
            encoded = make()
            if len(encoded) > MAX_IMAGE:
                with pytest.raises(DataError, match="bytes, from 1 to 1048576 can be sent"):
                    source.submit(encoded)
                continue
            with pytest.raises(ImageRejected) as error:
                source.submit(encoded, name=name).result(20)
            assert error.value.record.attempts == 1
        assert source.submit(photo()).result(10).prediction >= 0
        assert source.counts.failed["ImageRejected"] >= 3


def test_decoding_does_not_block_the_links(serve_peers, expected, monkeypatch):
    began, goes_on = threading.Event(), threading.Event()
    decode = Decoders.decode

    def slow(*arguments):
        began.set()
        assert goes_on.wait(20)
        return decode(*arguments)

    with Source.open(serve_peers({"a": "all"})) as source:
        assert source.wait_ready(30) == ()
        monkeypatch.setattr(Decoders, "decode", slow)
        first = source.submit(photo(), budget_ms=20_000)
        assert began.wait(10)
        with Source.open(source.peers.path) as second:  # the peer greets it meanwhile
            assert second.wait_ready(30) == ()
        assert not first.done()
        goes_on.set()
        answer = first.result(20)
    monkeypatch.undo()
    assert relative_error(answer.logits, expected(photo(), answer.arrangement)) < 1e-4


def test_stem_and_head_need_a_holder(serve_peers, tiny_bundle, wait_until):
    path = serve_peers({"a": range(6)})
    with Source.open(path, budget_ms=300) as source:
        wait_until(lambda: source.wait_ready(0.1) == (STEM, HEAD), 30.0, "the blocks")
        assert not source.may_skip((HEAD,))
        with pytest.raises(BudgetExceeded, match="the stem had no reachable holder"):
            source.submit(photo()).result(10)
    with Source.open(path, tiny_bundle) as source:
        assert source.wait_ready(30) == ()


def test_invalid_uses_without_a_bundle_are_errors(serve_peers, write_peers):
    path = serve_peers({"a": "all"})
    for settings, why in (
        ({"audit": 0.5}, "an audit recomputes answers, which needs the bundle; give it, or omit audit"),
    ):
        with pytest.raises(UsageError, match=why):
            Source.open(path, **settings)
    with Source.open(path) as source:
        with pytest.raises(UsageError, match="give pixels as uint8"):
            source.submit(np.zeros((3, 16, 16), np.float32))
        with pytest.raises(DataError, match="cannot read"):
            source.submit("missing.jpg")
    with pytest.raises(LinkError, match="has sent the manifest"):
        Source.open(write_peers({"nobody": "all"}))


def test_a_source_without_a_bundle_needs_no_engine_library_and_no_decoder(serve_peers, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(photo())
    code = (
        "import sys\nfrom ls_edge import Source\n"
        "with Source.open(sys.argv[1]) as source:\n"
        "    source.wait_ready(30)\n"
        "    print(source.submit(sys.argv[2]).result(10).class_name)\n"
        "top = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in top if not name.startswith('_')))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(serve_peers(CHAIN).path), str(tmp_path / "photo.jpg")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    allowed = {"ls_edge", "zmq", "msgspec", "numpy", "yaml", "packaging"}  # what it installs with
    allowed |= {"typing_extensions", "cython_runtime", "sitecustomize"}
    assert set(eval(ran.stdout.splitlines()[-1])) <= allowed, ran.stdout


@pytest.fixture
def processes(start_peers):
    return start_peers({"a": "stem", "b": "all", "c": "0-5, head"})


def test_another_peer_replaces_a_hanging_holder_of_the_stem(processes, expected):
    processes.set_faults("a", Faults(hang=True))
    with Source.open(processes.path, budget_ms=20_000) as source:
        assert source.wait_ready(30) == ()
        for seed in range(4):
            answer = source.submit(photo(seed)).result(20)
            assert relative_error(answer.logits, expected(photo(seed), answer.arrangement)) < 1e-4


@pytest.mark.release
def test_image_bombs_take_no_memory_of_a_peer_and_delay_no_other_image(start_peers):
    peers = start_peers({"a": "all"})

    def peak():
        status = Path(f"/proc/{peers.processes['a'].pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    sent = [one for one in (make() for make in bombs.COSTLY.values()) if len(one) <= MAX_IMAGE]
    assert len(sent) >= 8
    with Source.open(peers.path, budget_ms=60_000) as source:
        assert source.wait_ready(30.0) == ()
        source.submit(photo(size=(1000, 1000))).result(20)
        before = peak()
        futures = [source.submit(one) for one in sent for _ in range(2)]
        others = [source.submit(photo(seed)) for seed in range(6)]
        for future in futures:
            with contextlib.suppress(ImageRejected):
                assert future.result(60).record.attempts <= 3  # a loaded machine may stall for a hop
        assert all(not future.result(30).degraded for future in others)
        assert peak() - before < 64 << 20
        assert [event for event in source.events if event.state == "lost"] == []


def test_peers_forget_a_source_that_is_killed_before_its_answers(serve_peers, tiny_bundle, wait_until, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(photo())
    path = serve_peers({"a": "stem, 0-2"}).path  # no peer has the other parts, so the tokens wait
    code = (
        "import sys\nfrom ls_edge import Source\nsource = Source.open(sys.argv[1], budget_ms=60000)\n"
        "source.wait_ready(1.0)\n"
        "[source.submit(sys.argv[2]) for _ in range(5)]\nprint('sent', flush=True)\nsys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", code, str(path), str(tmp_path / "photo.jpg")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout.readline() == "sent\n"
        victim.kill()
    with Source.open(path, tiny_bundle, max_skips=6) as source:
        wait_until(lambda: source.snapshot.peers["a"].credits == 8)
        assert source.submit(photo()).result(10).degraded


def test_a_request_waits_for_the_next_model_when_all_peers_change(
    write_peers, serve, tiny_bundle, other_bundle, wait_until
):
    file = load_peers(write_peers({"a": "all", "b": "all"}))
    old, new = Bundle.open(tiny_bundle), Bundle.open(other_bundle)
    first = [Peer(file, name, old) for name in "ab"]
    threads = [threading.Thread(target=peer.serve) for peer in first]
    for thread in threads:
        thread.start()
    events = []
    with Source.open(file, on_event=events.append) as source:
        assert source.wait_ready(30) == ()
        before = source.submit(photo()).result(10)
        for peer in first:
            peer.stop()
        for thread in threads:
            thread.join(10)
        future = source.submit(photo(), budget_ms=30_000)
        for name in "ab":
            serve(Peer(file, name, new))
        answer = future.result(30)
        assert not answer.degraded
        assert answer.record.id == before.record.id + 1
        assert source.bundle.manifest.model_id == new.manifest.model_id
        assert (len(before.classes), answer.classes) == (10, new.manifest.classes)
        assert source.snapshot.missing_blocks == ()

        def states():  # at the end; whether a peer is seen at all before the change depends on time
            return {event.peer: event.state for event in events}

        wait_until(lambda: states() == {"a": "alive", "b": "alive"}, timeout=60.0)


def test_a_run_ends_with_its_answers_when_the_peers_change_to_other_classes(
    write_peers, serve, tiny_bundle, other_bundle
):
    file = load_peers(write_peers({"a": "all", "b": "all"}))
    first = [Peer(file, name, Bundle.open(tiny_bundle)) for name in "ab"]
    threads = [threading.Thread(target=peer.serve) for peer in first]
    for thread in threads:
        thread.start()

    def change(_record):
        for peer in first:
            peer.stop()
        for name, thread in zip("ab", threads, strict=True):
            thread.join(10)
            if name not in changed:
                serve(Peer(file, name, Bundle.open(other_bundle)))
                changed.append(name)

    changed = []
    with Source.open(file, budget_ms=30_000) as source:
        assert source.wait_ready(30) == ()
        run = run_dataset(source, open_data("digits", "eval").take(40), concurrency=1, on_record=change)
    assert [record.error for record in run.records] == [None]
    with pytest.raises(UsageError, match="a model of other classes, 8 instead of 10; run again"):
        raise run.error
