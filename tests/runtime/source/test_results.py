"""Probabilities of an answer, and the counts of requests by their end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.errors import BudgetExceeded, Overloaded
from ls_edge.runtime.source.results import InFlightRequest, RequestCounts, likeliest, softmax

logits = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20).map(lambda v: np.array(v, np.float32))


@given(logits)
def test_probabilities_add_up_and_follow_the_logits(values):
    found = softmax(values)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found.sum(), 1.0)
    assert (np.diff(found[np.argsort(values, kind="stable")]) >= 0).all()


@given(logits, st.integers(1, 25))
def test_the_likeliest_classes_are_the_largest_logits_in_order(values, count):
    found = likeliest(values, count)
    assert len(found) == min(count, len(values))
    probabilities = softmax(values)
    assert [probability for _, probability in found] == sorted(probabilities, reverse=True)[:count]
    assert all(probabilities[index] == probability for index, probability in found)


def test_every_submitted_request_is_in_flight_until_it_ends():
    counts = RequestCounts()
    request = InFlightRequest(0, None, 0.0, 1.0, 0, "", None)
    counts.submitted = 4
    counts.add_answer(request.record(None, logits=np.float32([0.0, 1.0])))
    counts.add_error(Overloaded("late"), request.record(None, error=Overloaded("late")))
    counts.canceled += 1
    assert (counts.answered, counts.failed["Overloaded"], counts.failed["BudgetExceeded"]) == (1, 1, 0)
    assert counts.in_flight == 1
    counts.add_error(BudgetExceeded("late"), request.record(None, error=BudgetExceeded("late")))
    assert counts.in_flight == 0
    assert sum(counts.latency.counts) == 1
