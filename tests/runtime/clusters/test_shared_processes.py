"""Real peers with the one block of a shared model lose no request while one of them lives."""

import shutil

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source

EVERYTHING = {name: [0, 1, 2, 3] for name in "abc"}
IMAGES = 90


def test_no_request_is_lost_when_two_of_three_peers_die(tmp_path, shared_bundle, assert_replays):
    bundle = Bundle.open(shared_bundle)
    preprocess = Preprocessor(bundle.manifest.image)
    refs = open_data("digits", "eval").take(IMAGES).images
    pixels = [preprocess(ref.read(), ref.name) for ref in refs]
    labels = np.array([ref.label for ref in refs])
    local = LocalCluster(tmp_path / "peers", shared_bundle, EVERYTHING)
    for name in EVERYTHING:  # all that a board needs: the manifest and one block
        folder = tmp_path / name
        (folder / "blocks").mkdir(parents=True)
        shutil.copy(shared_bundle / "manifest.json", folder)
        shutil.copy(shared_bundle / "blocks" / "00.onnx", folder / "blocks")
        local.bundles[name] = folder
    with local:
        local.wait_warm()
        with Source.open(local.file, bundle, policy="random", budget_ms=20_000) as source:
            assert source.wait_ready(30) == ()
            before = [source.submit(image).result(20) for image in pixels]
            futures = [source.submit(image) for image in pixels[: IMAGES // 3]]
            local.kill("c")
            futures += [source.submit(image) for image in pixels[IMAGES // 3 : 2 * IMAGES // 3]]
            local.kill("a")
            futures += [source.submit(image) for image in pixels[2 * IMAGES // 3 :]]
            after = [future.result(20) for future in futures]
    top1 = [float(np.mean([a.prediction == label for a, label in zip(answers, labels, strict=True)]))
            for answers in (before, after)]  # fmt: skip
    assert top1[0] > 0.5
    assert top1[1] == top1[0]
    assert not any(answer.degraded or answer.record.skipped for answer in (*before, *after))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other.logits, one.logits, rtol=0, atol=1e-4 * np.abs(one.logits).max())
    orders = {tuple(answer.arrangement.order) for answer in before}
    assert len(orders) > 10
    assert_replays(shared_bundle, pixels, after)
