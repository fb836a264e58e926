"""A source without a bundle follows the model of its peers without delay, and the next model's peers with it."""

import threading
from types import SimpleNamespace

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.model_follower import ModelFollower
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
    monkeypatch.setattr("ls_edge.runtime.source.model_follower.AGAIN_S", 3600.0)
    asked, line = [], WaitingLine(1, lambda _inflight, _alone: None)

    def fetch(names):
        asked.append(sorted(names))
        raise LinkError("they have gone")

    monitor = Monitor()
    loop = SimpleNamespace(monitor=monitor, requests=SimpleNamespace(line=line), is_own_thread=False)
    follower = ModelFollower(loop, ("a", "b"), fetch=fetch, reopen=lambda *_: None, use=lambda *_: "")
    monitor.set({"a": "next", "b": "next"})
    wait_until(lambda: asked == [["a", "b"]])
    monitor.set({"b": "next", "c": "next"})
    wait_until(lambda: asked == [["a", "b"], ["b", "c"]])
    line.close()
    monitor.set({})
    follower._thread.join(10)
    assert not follower._thread.is_alive()


def test_a_loop_that_replaces_another_one_while_that_is_closed_is_closed_too():
    model, used = SimpleNamespace(manifest=SimpleNamespace(bundle_id="next")), threading.Event()

    def loop_of(monitor, close):
        requests = SimpleNamespace(line=WaitingLine(1, lambda _inflight, _alone: None))
        return SimpleNamespace(
            monitor=monitor, requests=requests, is_own_thread=False, close=close, succeed=lambda _: None
        )

    def close_first():
        if not is_closing.is_set():
            is_closing.set()
            after.monitor.set({}, missing=())
            assert used.wait(10)
            follower._thread.join(0.2)  # it has ended, or follows the next loop
            first.requests.line.close()

    def use(_loop, _model):
        used.set()
        return "first"

    def reopen(_bundle, _before):
        is_reopened.set()
        return after

    is_closing, is_reopened, is_closed = (threading.Event() for _ in range(3))
    first, after = loop_of(Monitor(), close_first), loop_of(Monitor(), is_closed.set)
    follower = ModelFollower(first, ("a", "b"), fetch=lambda _: (model, ("a", "b")), reopen=reopen, use=use)
    first.monitor.set({"a": "next", "b": "next"})
    assert is_reopened.wait(10)
    follower.close()
    assert is_closed.wait(10)


def test_a_source_behind_one_peer_follows_its_model(write_peers, serve, tiny_bundle, other_bundle, wait_until):
    """The other peers of the file are out of reach, so no second one can confirm the model, first and later."""
    file = load_peers(write_peers({"a": "all", "b": "all", "c": "all"}))
    first = Peer(file, "a", Bundle.open(tiny_bundle))
    serving = threading.Thread(target=first.serve)
    serving.start()
    with Source.open(file, budget_ms=30_000) as source:
        assert source.witnesses == ("a",)
        assert source.submit(bombs.flat(40, "JPEG")).result(30).classes == source.bundle.manifest.classes
        first.stop()
        serving.join(10)
        serve(Peer(file, "a", Bundle.open(other_bundle)))
        answer = source.submit(bombs.flat(40, "JPEG")).result(30)
        assert answer.classes == Bundle.open(other_bundle).manifest.classes
        assert source.witnesses == ("a",)


def test_a_loop_that_waits_for_the_next_model_follows_files(write_peers, serve, tiny_bundle, other_bundle, wait_until):
    file = load_peers(write_peers({"a": "all", "b": "all", "c": "0-5"}))
    before = msgspec.structs.replace(file, peers=file.peers[:2])
    for peer in "ab":
        serve(Peer(file, peer, Bundle.open(tiny_bundle)))
    with Source.open(before) as source:
        assert source.wait_ready() == ()
        after = source._reopen(Bundle.open(other_bundle), source._loop)
        try:
            assert set(after.monitor.snapshot.peers) == {"a", "b"}
            source._follow(file)
            for loop in (source._loop, after):
                wait_until(lambda loop=loop: set(loop.monitor.snapshot.peers) == {"a", "b", "c"})
        finally:
            after.close()
