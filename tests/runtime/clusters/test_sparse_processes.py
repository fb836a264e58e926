"""Real processes in a sparse network: each process has addresses of its links alone."""

import contextlib

import yaml

from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster

LAPTOP = "laptop"


class SparseCluster(FaultyCluster):
    """Real peers; only the pairs in ``links`` know the addresses of one another."""

    def __init__(self, folder, bundle, placement, links):
        self.links = {frozenset(link) for link in links}
        super().__init__(folder, bundle, placement, sources=[LAPTOP])

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


def test_blocks_behind_one_peer_are_reached_through_it_and_survive_a_kill(
    tmp_path, tiny_bundle, images, assert_replays
):
    placement = {"hub": "0, 3", "b": "1, 4", "c": "2, 5", "spare": "1, 2, 4, 5"}
    links = [(LAPTOP, "hub"), ("hub", "b"), ("hub", "c"), ("hub", "spare")]
    with SparseCluster(tmp_path, tiny_bundle, placement, links) as peers:
        peers.wait_warm()
        for policy in ("nearest", "parallel"):
            with Source.open(
                peers.view_of(LAPTOP), tiny_bundle, policy=policy, max_skips=0, budget_ms=20_000
            ) as source:
                assert source.wait_ready(20) == ()
                pictures = images(8)
                futures = [source.submit(picture) for picture in pictures]
                assert_replays(tiny_bundle, pictures, [future.result(30) for future in futures])
                futures = [source.submit(picture) for picture in pictures]
                peers.kill("c")
                answers = [future.result(30) for future in futures]
                assert_replays(tiny_bundle, pictures, answers)
                assert not any(answer.degraded for answer in answers)
            peers.start("c")
            peers.wait_warm("c")
