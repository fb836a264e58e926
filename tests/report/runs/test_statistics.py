import numpy as np
import pytest
from hypothesis import strategies as st

from ls_edge.core.records import PeerEvent, PeerState
from ls_edge.report.runs.statistics import Away, RunData, coverage, pick_window
from tests.report.drawing import data_of, narrative, record
from tests.report.waves import OTHER, OWN, UNUSED, joined_record


def test_stage_means_are_by_hop_and_by_holder():
    rows = data_of([record(), record(visits=record().visits[:1], latency_us=8500)]).stage_means
    assert [(group, name, count) for group, name, count, _ in rows] == [
        ("All answers", "one request", 2),
        ("By hop", "hop 1", 2),
        ("By hop", "hop 2", 1),
        ("By hop", "back to the source", 2),
        ("By holder, visits", "a", 2),
        ("By holder, visits", "b", 1),
    ]
    assert rows[0][3]["engine"] == pytest.approx(5.0)
    assert sum(rows[0][3].values()) == pytest.approx((12.0 + 8.5) / 2)
    assert rows[4][3] == {"wire": pytest.approx((2.5 / 3 + 0.75) / 2), "queue": 1.0, "codec": 0.5, "engine": 4.0}


def test_slots_are_counted_for_plain_orders_and_waves():
    data = data_of(
        [
            record(waves=((((2, "a"), (0, "a")),),), skipped=(1,)),
            record(waves=((((0, "a"),), ((1, "b"),)), (((2, "a"),),))),
        ]
    )
    counts, skipped = data.slots
    assert counts.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert skipped.tolist() == [0, 1, 0]


def test_coverage_is_exact_and_adds_overlaps():
    edges = np.array([0.0, 10.0, 20.0, 30.0])
    start, end = np.array([2.0, 5.0, 8.0]), np.array([4.0, 25.0, 9.0])
    assert coverage(start, end, edges).tolist() == pytest.approx([(2 + 5 + 1) / 10, 1.0, 0.5])


def test_the_time_away_ends_with_the_return_or_the_run():
    events = [
        PeerEvent(0, "a", PeerState.ALIVE),
        PeerEvent(0, "b", PeerState.ALIVE),
        PeerEvent(5000, "a", PeerState.LOST),
        PeerEvent(6000, "a", PeerState.LOST),
        PeerEvent(9000, "a", PeerState.ALIVE),
        PeerEvent(20000, "b", PeerState.LOST),
    ]
    data = data_of([record(submitted_us=0, latency_us=50_000)], events)
    assert data.away == [Away("a", 5.0, 9.0, returned=True), Away("b", 20.0, 50.0)]
    assert [event.at_us for event in data.changes] == [5000, 9000, 20_000]
    assert "a was lost at 0.01 s and was back 4.0 ms later" in narrative(data)
    assert "b was lost at 0.02 s and did not come back" in narrative(data)


def test_the_window_holds_the_first_loss_and_few_enough_blocks(run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    window = pick_window(data, 120)
    lost = next(event.at_us / 1e3 for event in data.changes if event.state == PeerState.LOST)
    assert window.start < lost < window.end
    inside = ((data.engines.start >= window.start) & (data.engines.start < window.end)).sum()
    assert 90 <= inside <= 120
    assert pick_window(data, 10**9) == (data.start_ms, data.end_ms)


def test_chosen_requests_have_a_reason_and_are_listed_once(run_with_loss):
    data = RunData(run_with_loss.summary, run_with_loss.records, run_with_loss.events)
    chosen = dict(data.chosen)
    assert chosen["Retried"].attempts > 1
    assert chosen["Median"].latency_us / 1e3 == pytest.approx(run_with_loss.summary.latency_ms.p50, rel=0.02)
    assert len({id(r) for r in chosen.values()}) == len(chosen)


times = st.integers(0, 10**10)


events = st.builds(PeerEvent, times, st.sampled_from("abc"), st.sampled_from(PeerState))


def test_an_answer_counts_its_critical_path_and_each_holder_its_own_times():
    data = data_of([joined_record(OWN, OTHER, UNUSED)])
    rows = {(group, name): means for group, name, _, means in data.stage_means}
    whole = {"stem": 1.0, "wire": 5.0, "queue": 1.5, "codec": 1.0, "engine": 4.0, "head": 0.5}
    assert rows["All answers", "one request"] == whole
    assert sum(whole.values()) == 13.0
    assert sum(rows["By hop", "hop 1"].values()) == 13.0 - 1.0 - 0.5 - 1.5
    assert rows["By holder, visits", "a"] == {"wire": 1.5, "queue": 1.5, "codec": 0.5, "engine": 2.5, "wait": 4.0}
    assert rows["By holder, tracks", "b"] == {"wire": 2.0, "queue": 0.5, "codec": 0.5, "engine": 4.0}
    assert {data.lanes[lane] for lane in data.engines.lane} == {"a", "b"}
    assert data.summary.peers["b"].busy == pytest.approx(4.0 / 13.0)
    assert data.summary.peers["a"].busy == pytest.approx(2.5 / 13.0)
