from ls_edge.core.peer_reports import PeerState
from ls_edge.core.records import PeerEvent
from ls_edge.report.runs.statistics import Away
from tests.report.drawing import data_of, narrative, record


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
