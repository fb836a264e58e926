"""A source without a bundle follows the model of its peers without delay, and the next model's peers with it."""

import shutil
import threading
from types import SimpleNamespace

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.model_exchange import ModelExchange, ModelFollower
from ls_edge.runtime.source.requests import WaitingLine
from ls_edge.runtime.source.source import Source
from tests.data import bombs


class Monitor:
    """Snapshots that a test sets."""

    def __init__(self):
        self._changed = threading.Condition()
        self.set({})

    def set(self, other_models, missing=(0,)):
        with self._changed:
            self.snapshot = SimpleNamespace(other_models=other_models, peers="abc", missing_blocks=missing)
            self._changed.notify_all()

    def wait_for(self, predicate, timeout):
        with self._changed:
            self._changed.wait_for(lambda: predicate(self.snapshot), timeout)
            return self.snapshot


def test_a_model_that_could_not_be_fetched_is_asked_for_again_when_peers_change(monkeypatch, wait_until):
    """Both peers that served it are killed; the next ones must not wait for the end of a pause."""
    monkeypatch.setattr("ls_edge.runtime.source.model_exchange.AGAIN_S", 3600.0)
    asked, line = [], WaitingLine(1, lambda _inflight, _alone: None)

    def fetch(names):
        asked.append(sorted(names))
        raise (LinkError, OSError)[len(asked) % 2]("they have gone")

    monitor = Monitor()
    loop = loop_of(monitor, line.close, line)
    follower = ModelFollower(ModelExchange(loop, lambda *_: None, lambda *_: None), fetch)
    monitor.set({"a": "next", "b": "next"})
    wait_until(lambda: asked == [["a", "b"]])
    monitor.set({"b": "next", "c": "next"})
    wait_until(lambda: asked == [["a", "b"], ["b", "c"]])
    line.close()
    monitor.set({})
    follower._thread.join(10)
    assert not follower._thread.is_alive()


def loop_of(monitor, close, line=None):
    requests = SimpleNamespace(line=line or WaitingLine(1, lambda _inflight, _alone: None))
    return SimpleNamespace(
        monitor=monitor, requests=requests, is_own_thread=False, close=close, succeed=lambda _: None, model_id="m"
    )


def test_an_exchange_that_is_given_up_closes_the_loop_of_the_next_model():
    ended = []
    first, after = (loop_of(Monitor(), lambda name=name: ended.append(name)) for name in ("first", "after"))
    models = ModelExchange(first, lambda *_: after, lambda *_: None)
    bundle = SimpleNamespace(manifest=SimpleNamespace(bundle_id="next"))
    assert models.exchange(bundle, lambda: False, hands_over=False) == (0,)
    assert (models.loop, ended) == (first, ["after"])
    after.monitor.set({}, missing=())
    assert models.exchange(bundle, lambda: False, hands_over=False) == ()
    assert models.loop is after
    models.close()
    assert sorted(ended) == ["after", "after", "first"]


def test_a_reload_answers_with_another_bundle_and_loses_no_request(
    write_peers, serve, tiny_bundle, other_bundle, tmp_path, images
):
    """The peers change their model one by one; a bundle that no peer serves changes nothing."""
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    file = load_peers(write_peers({"a": "0-5", "b": "0-5"}))
    first = Peer(file, "a", Bundle.open(tiny_bundle))
    serving = threading.Thread(target=first.serve)
    serving.start()
    with Source.open(file, folder, budget_ms=20_000) as source:
        futures = [source.submit(image) for image in images(8)]
        shutil.rmtree(folder)
        shutil.copytree(other_bundle, folder)
        serve(Peer(file, "b", Bundle.open(other_bundle)))
        source.reload()
        assert source.bundle.manifest == Bundle.open(other_bundle).manifest
        assert len({future.result(30).request for future in [*futures, *map(source.submit, images(8))]}) == 16
        before = source.bundle.manifest.model_id
        shutil.rmtree(folder)
        shutil.copytree(tiny_bundle, folder)
        first.stop()
        serving.join(10)
        with pytest.raises(LinkError, match=r"no peer of .* has served blocks 0-5 of the new bundle within"):
            source.reload()
        assert source.bundle.manifest.model_id == before
        assert source.submit(images(1)[0]).result(30).classes == source.bundle.manifest.classes


def test_a_source_behind_one_peer_follows_its_model(write_peers, serve, tiny_bundle, other_bundle):
    """The other peers of the file are out of reach, so no second one can confirm the model, first and later."""
    file = load_peers(write_peers({"a": "all", "b": "all", "c": "all"}))
    first = Peer(file, "a", Bundle.open(tiny_bundle))
    serving = threading.Thread(target=first.serve)
    serving.start()
    with Source.open(file, budget_ms=30_000) as source:
        assert source.submit(bombs.flat(40, "JPEG")).result(30).classes == source.bundle.manifest.classes
        first.stop()
        serving.join(10)
        serve(Peer(file, "a", Bundle.open(other_bundle)))
        answer = source.submit(bombs.flat(40, "JPEG")).result(30)
        assert answer.classes == Bundle.open(other_bundle).manifest.classes


def test_a_loop_that_waits_for_the_next_model_follows_files(write_peers, serve, tiny_bundle, other_bundle, wait_until):
    file = load_peers(write_peers({"a": "all", "b": "all", "c": "0-5"}))
    before = msgspec.structs.replace(file, peers=file.peers[:2])
    for peer in "ab":
        serve(Peer(file, peer, Bundle.open(tiny_bundle)))
    with Source.open(before) as source:
        assert source.wait_ready(30) == ()
        after = source._reopen(Bundle.open(other_bundle), source._loop)
        try:
            assert set(after.monitor.snapshot.peers) == {"a", "b"}
            source._use(file)
            for loop in (source._loop, after):
                wait_until(lambda loop=loop: set(loop.monitor.snapshot.peers) == {"a", "b", "c"})
        finally:
            after.close()
