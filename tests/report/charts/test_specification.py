"""All charts: valid for any times, bounded, and drawn without side effects."""

import copy
import json

from altair.utils.schemapi import debug_mode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ls_edge.core.peer_reports import PeerState, Visit
from ls_edge.core.records import PeerEvent
from ls_edge.report import charts
from ls_edge.report.charts.specification import svg_of
from ls_edge.report.theme import CHART_CONFIG
from tests.report.drawing import data_of, data_of_run, histogram, narrative, record, rows_of, spec_of


def test_specifications_of_long_runs_are_bounded(simulated):
    data = data_of_run(simulated(3000, seed=1))
    for draw, limit in ((charts.latency_over_time, 1700), (histogram, 300)):
        assert len(rows_of(spec_of(draw(data)))) <= limit


times = st.integers(0, 10**10)


requests = st.builds(
    record,
    latency_us=times,
    submitted_us=times,
    stem_us=times,
    error=st.sampled_from([None, None, "Overloaded: x"]),
    label=st.sampled_from([None, 1, 2]),
    attempts=st.integers(1, 3),
)


events = st.builds(PeerEvent, times, st.sampled_from("abc"), st.sampled_from(PeerState))


DRAWN = histogram, charts.latency_over_time, charts.accuracy_by_skips


@given(st.lists(requests, max_size=6), st.lists(events, max_size=6))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([record(latency_us=0, visits=(Visit("a", (0,), 0, 0, 0),))], [])
def test_specifications_of_any_times_hold_only_numbers(records, happened):
    """Other tests compare specifications with the schema, which takes most of the time and ignores their values."""
    data = data_of(records, happened)
    with debug_mode(False):
        drawn = [draw(data) for draw in DRAWN]
        for chart in drawn:
            if chart is not None:
                json.dumps(chart.to_dict(validate=False), allow_nan=False)
    narrative(data)


def test_drawing_a_file_leaves_the_configuration_unchanged():
    before = copy.deepcopy(CHART_CONFIG)
    svg_of(histogram(data_of([record()])))
    assert before == CHART_CONFIG
