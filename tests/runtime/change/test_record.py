"""Steps of the record of a peer."""

import pytest

from ls_edge.runtime.change.planner import version_of
from ls_edge.runtime.change.record import AppliedFile, StoreRecord


def test_a_file_that_is_offered_again_with_another_version_ends_no_change():
    """A pusher sees another board that got the same number for another file."""
    before = AppliedFile(1, "before")
    record = StoreRecord(active="bundle", file=AppliedFile(2, "same"), accepts=(before,))
    offered = record.accepting(AppliedFile(3, "same"), before)
    assert offered.accepts == (before,)
    assert offered.switched("bundle", AppliedFile(3, "same")).accepts == (before,)


@pytest.mark.parametrize(
    ("announced", "version"),
    [
        ([], 1),
        ([[(0, "old")], [(0, "older")]], 1),
        ([[(3, "new")], [(3, "new"), (2, "old")]], 3),
        ([[(3, "new")], [(3, "other")]], 4),
        ([[(3, "old")], [(2, "older")]], 4),
        ([[(0, "given")], [(0, "given")], [(60, "old")]], 61),
    ],
)
def test_the_version_of_a_file_follows_the_newest_one(announced, version):
    assert version_of("new", announced) == version
