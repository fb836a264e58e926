"""No request is lost under all kinds of faults at once."""

import msgspec
import pytest
import zmq

from ls_edge.data.datasets import open_data
from tests.faults.course import KINDS
from tests.faults.suite import ChaosResult, ChaosSettings, run_chaos

BANDED = ("kill", "stop", "hang", "all_gone", "other_bundle")


@pytest.mark.release
@pytest.mark.parametrize("settings", [
    ChaosSettings(seed=1, requests=150, seconds=8.0, keys=zmq.has("curve")),
    ChaosSettings(seed=4, requests=100, seconds=6.0, policy="parallel", block_ms=2.0, kinds=BANDED),
], ids=["all kinds", "bands"])  # fmt: skip
def test_nothing_is_lost_under_every_kind_of_fault(tiny_bundle, other_bundle, banded_bundle, tmp_path, settings):
    """With bands, the first and the last block have a fixed place, and the other bundle has other bands."""
    bundle, other = (banded_bundle, tiny_bundle) if settings.kinds == BANDED else (tiny_bundle, other_bundle)
    result = run_chaos(bundle, other, open_data("digits", "eval"), tmp_path, settings)
    assert result.holds, result
    assert (result.answered, result.degraded) == (settings.requests, 0)
    assert {fault.kind for fault in result.faults} == set(settings.kinds) <= set(KINDS)


@pytest.mark.unit
def test_a_result_holds_without_losses_and_errors():
    fine = ChaosResult(3, 0, {}, lost=0, twice=0, not_replayed=0, ended=[], faults=[])
    assert fine.holds
    for wrong in ({"lost": 1}, {"failed": {"Overloaded": 1}}, {"twice": 1}, {"not_replayed": 1}, {"ended": ["anna"]}):
        assert not msgspec.structs.replace(fine, **wrong).holds
