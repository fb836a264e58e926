"""The summary of a simulated fleet."""

from collections import Counter

import numpy as np
import pytest

from ls_edge.evaluation.simulation_summary import (
    DEGRADED,
    FAILED,
    WHOLE,
    SimulationContext,
    SiteOutcome,
    summarize_simulation,
)

CONTEXT = SimulationContext(
    bundle_id="f" * 64, devices=3, requests=6, replicas=1, concurrency=4, churn="up=1m,down=1s", sites=2,
    placement={"a": (0, 1)}, assumptions=[], max_skips=2,
)  # fmt: skip


def test_sites_are_added_up():
    """Two devices for ten seconds, of which one is lost for four, and one device for five seconds."""
    one = SiteOutcome(
        submitted_s=np.arange(4.0), latency_s=np.full(4, 2.0), states=np.array([WHOLE, WHOLE, DEGRADED, FAILED]),
        devices=Counter({"a": 1, "b": 1}), seconds=10.0, skipped=2, most_skipped=2, retries=3, hops=6, losses=1,
        errors=Counter({"BudgetExceeded": 1}), busy_s={"a": 5.0, "b": 1.0}, up=[(0.0, 2), (5.0, 1), (9.0, 2)],
    )  # fmt: skip
    two = SiteOutcome(
        submitted_s=np.zeros(2), latency_s=np.full(2, 4.0), states=np.full(2, WHOLE), devices=Counter({"a": 1}),
        seconds=5.0, hops=4, busy_s={"a": 1.0}, up=[(0.0, 1)],
    )  # fmt: skip
    found = summarize_simulation([one, two], CONTEXT)
    assert (found.answered, found.degraded, found.failed, found.errors) == (5, 1, 1, {"BudgetExceeded": 1})
    assert found.throughput == pytest.approx(3 / 4 + 2 / 4)
    assert (found.latency_ms.p50, found.latency_ms.max) == (2000.0, 4000.0)
    assert (found.skips.mean, found.skips.max, found.hops, found.retries, found.losses) == (0.4, 2, 2.0, 3, 1)
    assert found.up_share == pytest.approx(21 / 25)
    assert found.busy == {"a": 0.4, "b": 0.1}
    assert found.answer == "66.7 % of the requests get a complete answer, 1 answer skipped blocks, 1 request failed"


def test_a_fleet_without_answers_has_no_latency():
    site = SiteOutcome(np.zeros(1), np.ones(1), np.full(1, FAILED), Counter({"a": 1}), seconds=1.0, busy_s={"a": 0.0})
    found = summarize_simulation([site], CONTEXT)
    assert (found.answered, found.throughput, found.latency_ms.p50, found.hops) == (0, None, None, None)
