"""Time limit of a hop."""

import pytest

from ls_edge.runtime.routing.state.hop import HopLimit, call_seconds, kept_too_long, news_by

LIMIT = HopLimit(transfer=0.5)


@pytest.mark.parametrize(
    ("block_us", "link_us", "accepted", "failures", "seconds"),
    [
        (1000, 0, True, 0, 0.25),
        (200_000, 0, True, 0, 0.8),
        (1000, 100_000, True, 0, 0.65),
        (1000, 100_000, True, 1, 1.3),
        (1000, 100_000, True, 9, 2.0),
        (1_000_000, 100_000, True, 9, 4.0),
        (1000, 0, False, 0, 0.75),
        (1000, 1_000_000, False, 0, 2.5),
    ],
)
def test_the_deadline_follows_engine_link_and_failures(block_us, link_us, accepted, failures, seconds):
    assert LIMIT.seconds(block_us, link_us, accepted=accepted, failures=failures) == pytest.approx(seconds)


def test_progress_is_reported_for_as_long_as_others_wait():
    assert call_seconds(200_000, 3) == pytest.approx(3 * LIMIT.seconds(200_000, 0))


def test_a_holder_may_keep_a_request_for_its_share_of_the_budget():
    assert [kept_too_long(10.0, 20.0, now) for now in (14.9, 15.0)] == [False, True]
    assert [news_by(10.0, end) for end in (20.0, 11.5, 10.5)] == [15.0, 11.0, 10.5]
