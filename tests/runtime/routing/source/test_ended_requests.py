"""Late answers of a source that runs for months."""

from ls_edge.runtime.routing.source.ended_requests import MAX_REMEMBERED, EndedRequests


def test_late_answers_are_all_counted_and_only_the_latest_by_request():
    ended = EndedRequests()
    for number in [*range(MAX_REMEMBERED), 0, MAX_REMEMBERED]:
        ended.count_late(number)
    assert ended.late_answers == MAX_REMEMBERED + 2
    assert len(ended.duplicates) == MAX_REMEMBERED
    assert (ended.duplicates[0], ended.duplicates[MAX_REMEMBERED], ended.duplicates.get(1)) == (2, 1, None)
