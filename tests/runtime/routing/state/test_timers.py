"""Timers look at every request in time, and forget those that have ended."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ls_edge.runtime.routing.state.timers import Timer, Timers


def test_entries_of_ended_requests_do_not_pile_up():
    timers = Timers()
    first = Timer(0)
    timers.set(first, 600.0)
    for number in range(1, 2001):
        timer = Timer(number)
        timers.set(timer, 600.0 - number / 1e4)
        timers.end(timer, 1)
    assert len(timers._heap) < 100
    assert timers.due(599.99) == []
    assert timers.due(600.0) == [first]
    timers.end(first, 0)
    assert timers.next == math.inf


def test_a_request_that_was_swept_out_can_be_set_again():
    timers, paused = Timers(), Timer(0)
    timers.set(paused, 5.0)
    timers.end(paused, 0)
    for number in range(1, 200):
        timer = Timer(number)
        timers.set(timer, 9.0)
        timers.end(timer, 0)
    timers.set(paused, 5.0)
    assert timers.next == 5.0
    assert timers.due(5.0) == [paused]


def test_a_request_comes_up_again_until_its_time_is_changed():
    timers, early, late = Timers(), Timer(1), Timer(0)
    timers.set(early, 1.0)
    timers.set(late, 2.0)
    assert timers.due(3.0) == [late, early]
    timers.set(early, 4.0)
    assert timers.due(3.0) == [late]


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 50))), max_size=200))
def test_due_requests_are_those_whose_time_was_set(steps):
    timers, requests, times = Timers(), [Timer(number) for number in range(10)], {}
    for now, (number, at) in enumerate(steps):
        if at is None:
            times.pop(number, None)
            timers.end(requests[number], len(times))
        else:
            times[number] = now + at
            timers.set(requests[number], now + at)
        assert [one.number for one in timers.due(now)] == sorted(one for one, when in times.items() if when <= now)
        assert timers.next == min(times.values(), default=math.inf)
