"""No request is lost under all kinds of faults, one after the other."""

import pytest
import zmq

from ls_edge.data.datasets import open_data
from tests.faults.chaos import run_chaos


@pytest.mark.release
def test_nothing_is_lost_under_every_kind_of_fault(tiny_bundle, other_bundle, tmp_path):
    images = open_data("digits", "eval").take(50)
    assert run_chaos(tiny_bundle, other_bundle, images, tmp_path, keys=zmq.has("curve"), seed=1) > 100


@pytest.mark.release
def test_nothing_is_lost_under_faults_of_peers_that_run_bands_in_waves(banded_bundle, tiny_bundle, tmp_path):
    images = open_data("digits", "eval").take(50)
    kinds = ("kill", "stop", "hang", "all_gone", "other_bundle")
    assert run_chaos(
        banded_bundle, tiny_bundle, images, tmp_path, kinds=kinds, policy="parallel", block_ms=2.0, seed=4
    ) > 100  # fmt: skip
