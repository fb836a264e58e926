"""Real peers keep to the bands of a model, and refuse processes with other bands or blocks out of bands."""

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded
from ls_edge.runtime.source.source import Source

PLACEMENT = {"a": [1, 2, 3, 4, 5], "b": [0], "c": [2, 4, 1]}
WHY = "block 0 of band [0] (1 of 3) had no reachable holder"


@pytest.fixture
def banded(start_peers, banded_bundle):
    return start_peers(PLACEMENT, banded_bundle)


def test_answers_stay_within_the_bands_and_other_bands_are_refused(
    banded, banded_bundle, tiny_bundle, images, assert_replays
):
    bands, shown = Bundle.open(banded_bundle).bands, images(12)
    orders = set()
    for policy in ("random", "fastest", "parallel"):
        with Source.open(banded.path, banded_bundle, policy=policy, audit=1.0) as source:
            assert source.wait_ready(30) == ()
            answers = [future.result() for future in [source.submit(image) for image in shown]]
            audits = source.finish_audits(10.0)
        for answer in answers:
            assert not bands.fault(answer.arrangement)
            orders.add(answer.arrangement.order)
        assert_replays(banded_bundle, shown, answers)
        assert (audits.mismatched, source.snapshot.rejected) == (0, {})
    assert len(orders) > 5
    assert {(order[0], order[5]) for order in orders} == {(0, 5)}
    ours, theirs = (Bundle.open(folder).manifest.model_id[:12] for folder in (tiny_bundle, banded_bundle))
    with Source.open(banded.path, tiny_bundle) as source:
        assert len(source.wait_ready(0.5)) == 6
        for why in source.snapshot.mismatched.values():
            assert ours in why
            assert theirs in why
            assert "with the same bands" in why


def test_the_block_of_a_first_band_is_skipped_when_its_only_holder_is_killed(
    banded, banded_bundle, images, assert_replays
):
    shown = images(6)
    with (
        Source.open(banded.path, banded_bundle, max_skips=1) as lenient,
        Source.open(banded.path, banded_bundle, policy="sequential", budget_ms=700) as strict,
    ):
        assert lenient.wait_ready(30) == strict.wait_ready(30) == ()
        assert not lenient.submit(shown[0]).result().degraded
        banded.kill("b")
        answers = [future.result() for future in [lenient.submit(image) for image in shown]]
        for answer in answers:
            assert answer.degraded
            assert answer.record.skipped == (0,)
            assert answer.record.why_skipped == WHY
            assert answer.arrangement.order[-1] == 5
        assert_replays(banded_bundle, shown, answers)
        with pytest.raises(BudgetExceeded, match=r"block 0 of band \[0\] \(1 of 3\) had no reachable holder") as error:
            strict.submit(shown[0]).result()
        assert error.value.record.waves == ()
    banded.start("b")
    banded.wait_warm("b")
    with Source.open(banded.path, banded_bundle) as source:
        assert source.wait_ready(30) == ()
        assert not source.submit(shown[0]).result().degraded
