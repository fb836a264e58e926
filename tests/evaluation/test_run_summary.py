"""Summaries of runs: exact values of small cases, and missing values."""

import json
import math

import msgspec
import pytest

from ls_edge.core.peer_reports import PeerState, TrackSpan, Visit
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.evaluation.run_summary import (
    PeerContext,
    RunContext,
    summarize,
    wilson,
)


def plain(*steps):
    return ((steps,),) if steps else ()


def record(number, **changes):
    base = RequestRecord(
        id=number,
        image=f"{number}.png",
        label=1,
        prediction=1,
        latency_us=10_000,
        degraded=False,
        error=None,
        waves=plain((0, "a"), (1, "b")),
        skipped=(),
        attempts=1,
        logits=None,
        submitted_us=10_000 * number,
        stem_us=1000,
        head_us=1000,
        visits=(Visit("a", (0,), 500, 2000, 100), Visit("b", (1,), 1500, 2000, 100)),
    )
    return msgspec.structs.replace(base, **changes)


def failed(number, error="BudgetExceeded: 10 ms are over"):
    return record(number, error=error, prediction=None, waves=(), visits=(), latency_us=50_000)


def test_the_keys_of_the_document_match_the_contract():
    document = json.loads(summarize([record(0)], [], RunContext()).to_json())
    assert {
        "bundle_id", "policy", "requests", "answered", "failed", "degraded", "top1", "throughput", "latency_ms",
        "skips", "retries", "duplicates_dropped", "hops", "peers",
    } <= document.keys()  # fmt: skip
    assert document["latency_ms"].keys() == {"mean", "p50", "p95", "p99", "max"}
    assert document["skips"].keys() == {"mean", "max", "reasons"}
    assert document["hops"].keys() == {"mean", "wire_ms_p50", "queue_ms_p50", "engine_ms_p50", "codec_ms_p50"}
    assert {"blocks", "requests", "busy", "state"} <= document["peers"]["a"].keys()


def test_statistics_of_a_small_run_are_exact():
    records = [
        record(0),
        record(1, latency_us=20_000, prediction=2, attempts=3),
        record(2, latency_us=30_000, degraded=True, skipped=(1,), waves=plain((0, "a"))),
        failed(3),
    ]
    context = RunContext(
        bundle_id="id",
        policy="nearest",
        classes=tuple("abcd"),
        seed=7,
        peers={"a": PeerContext((0, 1)), "b": PeerContext((1,), PeerState.LOST), "c": PeerContext((0,))},
        preprocess_ms=[1.0, 3.0],
        settings={"max_skips": 1},
        duplicates_dropped=2,
    )
    summary = summarize(records, [PeerEvent(5000, "b", PeerState.LOST), PeerEvent(0, "a", PeerState.ALIVE)], context)
    assert (summary.requests, summary.answered, summary.failed, summary.degraded) == (4, 3, 1, 1)
    assert summary.top1 == pytest.approx(2 / 3)
    assert summary.latency_ms.mean == 20.0
    assert summary.latency_ms.p50 == 20.0
    assert summary.latency_ms.max == 30.0
    # First submission at 0 ms, last answer at 50 ms, last error at 80 ms.
    assert summary.throughput == pytest.approx(60.0)
    assert summary.duration_s == pytest.approx(0.08)
    assert (summary.skips.mean, summary.skips.max) == (pytest.approx(1 / 3), 1)
    assert (summary.retries, summary.duplicates_dropped) == (2, 2)
    assert summary.hops.mean == 3.0
    # What remains of 10, 20 and 30 ms after 8.2 ms, over 3 hops.
    assert summary.hops.wire_ms_p50 == pytest.approx((20 - 8.2) / 3)
    assert summary.hops.queue_ms_p50 == 1.0
    assert summary.hops.engine_ms_p50 == 2.0
    assert summary.hops.codec_ms_p50 == pytest.approx(0.1)
    assert list(summary.peers) == ["a", "b", "c"]
    assert summary.peers["a"].requests == 3
    assert summary.peers["a"].busy == pytest.approx(6 / 80)
    assert summary.peers["a"].state == "alive"
    assert (summary.peers["b"].state, summary.peers["b"].lost) == ("lost", 1)
    assert (summary.peers["c"].requests, summary.peers["c"].busy) == (0, 0.0)
    assert (summary.chance, summary.top1_by_class) == (1.0, {"b": pytest.approx(2 / 3)})  # all are of one class
    assert summary.preprocess_ms.mean == 2.0
    assert summary.errors == {"BudgetExceeded": 1}
    assert [(row.skipped, row.answers, row.top1) for row in summary.accuracy_by_skips] == [(0, 2, 0.5), (1, 1, 1.0)]
    assert summary.settings == {"max_skips": 1}


@pytest.mark.parametrize("records", [[], [failed(0)], [failed(0), failed(1, "weird")]])
def test_a_run_without_answers_has_nulls_instead_of_nan(records):
    text = summarize(records, [], RunContext()).to_json()
    assert "NaN" not in text
    document = json.loads(text)
    assert document["answered"] == 0
    assert document["top1"] is None
    assert document["throughput"] is None
    assert set(document["latency_ms"].values()) == {None}
    assert set(document["hops"].values()) == {None}
    assert document["skips"] == {"mean": None, "max": None, "reasons": {}}


def test_a_run_without_labels_has_no_accuracy():
    summary = summarize([record(0, label=None)], [], RunContext())
    assert summary.top1 is None
    assert summary.top1_interval is None
    assert summary.accuracy_by_skips[0].answers == 1
    assert summary.accuracy_by_skips[0].top1 is None


def test_an_answer_that_took_no_time_has_no_throughput():
    assert summarize([record(0, latency_us=0)], [], RunContext()).throughput is None


def test_wilson_intervals_equal_published_values():
    # Agresti and Coull, 1998: 0 of 10 and 9 of 10.
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson(9, 10) == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert wilson(0, 0) is None
    low, high = wilson(10, 10)
    assert low < 1.0
    assert math.isclose(high, 1.0)


def test_parallel_blocks_count_for_all_their_holders():
    waves = ((((0, "a"), (1, "a")), ((2, "b"),)), (((3, "c"),),))
    summary = summarize([record(0, waves=waves, visits=())], [], RunContext())
    assert {name: peer.requests for name, peer in summary.peers.items()} == {"a": 1, "b": 1, "c": 1}


def wave_record():
    """One visit to ``a``, which joined a wave of three tracks; that of ``c`` was lost."""
    tracks = (
        TrackSpan(0, "a", (0, 1), 0, 4000, 4000, 200, 3000, 100),
        TrackSpan(0, "b", (2, 3), 0, 6000, 5000, 400, 3500, 100),
        TrackSpan(0, "c", (), 0, 5000, 4500, why="lost"),
    )
    visit = Visit("a", (0, 1, 4), 200, 4500, 300, 2000, tracks)
    waves = ((((0, "a"), (1, "a")), ((2, "b"), (3, "b"))), (((4, "a"),),))
    return record(0, waves=waves, visits=(visit,), latency_us=11_000)


def test_work_of_a_wave_counts_once_for_its_holder():
    summary = summarize([wave_record()], [], RunContext(peers={"d": PeerContext((0,))}))
    assert {name: (p.requests, p.blocks_run, p.blocks) for name, p in summary.peers.items()} == {
        "d": (0, 0, (0,)),
        "a": (1, 3, (0, 1, 4)),
        "b": (1, 2, (2, 3)),
    }
    assert summary.peers["a"].busy == pytest.approx(4.5 / 11)
    assert summary.peers["b"].busy == pytest.approx(3.5 / 11)
    # There, back, and the track of b there and back.
    assert summary.hops.mean == 4
    assert summary.hops.wire_ms_p50 == pytest.approx(1.0)
    assert summary.hops.engine_ms_p50 == pytest.approx((4.5 + 3.5) / 2)
