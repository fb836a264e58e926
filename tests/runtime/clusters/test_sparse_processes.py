"""Liars with keys as real processes in a sparse network: each process has addresses of its links alone.

``tests/runtime/routing/test_sparse_liars.py`` plays the same in simulated time.
"""

import contextlib
import time
from concurrent.futures import wait

import pytest
import yaml
import zmq

from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster

pytestmark = [pytest.mark.release, pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")]

LAPTOP, LIAR = "laptop", "mallory"
BUDGET_MS = 10_000.0
"""Half of it has to be enough for a request on a busy machine."""


class SparseCluster(FaultyCluster):
    """Real peers and a liar; only the pairs in ``links`` know the addresses of one another."""

    def __init__(self, folder, bundle, placement, links):
        self.links = {frozenset(link) for link in links}
        honest = {name: blocks for name, blocks in placement.items() if name != LIAR}
        members = {LIAR: placement[LIAR]}
        super().__init__(folder, bundle, honest, members=members, sources=[LAPTOP], keys=True)

    def view_of(self, name):
        """Return the ``peers.yaml`` of a process: nothing listens at the other addresses that it has."""
        listed = yaml.safe_load((self.folder / "peers.yaml").read_text())
        for number, peer in enumerate(listed["peers"]):
            if peer["name"] != name and frozenset((name, peer["name"])) not in self.links:
                peer["address"] = f"tcp://127.0.0.1:{1 + number}"
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(listed))
        return path

    @contextlib.contextmanager
    def _seen_by(self, name):
        whole, self.path = self.path, self.view_of(name)
        yield
        self.path = whole

    def start(self, *names):
        for name in names:
            with self._seen_by(name):
                super().start(name)

    def start_liar(self, name, lie, *, seed=0):
        with self._seen_by(name):
            super().start_liar(name, lie, seed=seed)

    def open_source(self, bundle, policy):
        """Return a source with the links of ``laptop``."""
        settings = {"policy": policy, "max_skips": 0, "budget_ms": BUDGET_MS}
        return Source.open(self.view_of(LAPTOP), bundle, secret_key=self.secret_key(LAPTOP), **settings)


def linked(source):
    """Return the peers to which a source has links."""
    return {name for name, view in source.snapshot.peers.items() if view.state != "lost"}


@pytest.mark.parametrize("policy", ["fastest", "parallel"])
@pytest.mark.parametrize("lie", ["releases", "progress", "growth", "silent", "unreachable", "credit"])
def test_a_liar_out_of_the_source_s_reach_fails_no_request(
    lie, policy, tmp_path, tiny_bundle, images, assert_replays, wait_until
):
    placement = dict.fromkeys(("p", "q", LIAR), "0-5")
    links = [(LAPTOP, "p"), (LAPTOP, "q"), ("p", "q"), ("p", LIAR)]
    with SparseCluster(tmp_path, tiny_bundle, placement, links) as peers:
        peers.wait_warm()
        peers.start_liar(LIAR, lie)
        wait_until(lambda: peers.liar_counts(LIAR).linked == 1, 20.0, "the only link of the liar")
        with peers.open_source(tiny_bundle, policy) as source:
            wait_until(lambda: linked(source) == {"p", "q"}, 20.0, "the links of the source")
            pictures = images(4)
            for _ in range(10):
                answers = [future.result(30) for future in [source.submit(picture) for picture in pictures]]
                assert_replays(tiny_bundle, pictures, answers)
                if peers.liar_counts(LIAR).received:
                    break
            assert peers.liar_counts(LIAR).received
            assert not any(answer.degraded for answer in answers)


@pytest.mark.parametrize("at", [("a",), ("b", "c")])
def test_a_line_answers_again_after_a_flood_of_work_without_a_source(
    at, tmp_path, tiny_bundle, images, assert_replays, wait_until
):
    placement = {"a": "0-1", "b": "2-3", "c": "4-5", LIAR: "0-5"}
    links = [(LAPTOP, "a"), ("a", "b"), ("b", "c"), *((LIAR, name) for name in at)]
    with SparseCluster(tmp_path, tiny_bundle, placement, links) as peers:
        peers.wait_warm()
        peers.start_liar(LIAR, "floods")
        wait_until(lambda: peers.liar_counts(LIAR).sent > 2_000, 60.0, "a flood")
        peers.stop_liar(LIAR)
        with peers.open_source(tiny_bundle, "nearest") as source:
            wait_until(lambda: linked(source) == {"a"}, 20.0, "the link of the source")
            pictures, end = images(8), time.monotonic() + 60
            while time.monotonic() < end:  # what of the flood has run goes within a second after that
                futures = [source.submit(picture) for picture in pictures]
                assert not wait(futures, 30).not_done
                if not any(future.exception() for future in futures):
                    break
            assert_replays(tiny_bundle, pictures, [future.result() for future in futures])
