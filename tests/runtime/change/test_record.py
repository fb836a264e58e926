"""Steps of the record of a peer."""

from ls_edge.runtime.change.record import AppliedFile, StoreRecord


def test_a_file_that_is_offered_again_with_another_version_ends_no_change():
    """A pusher sees another board that got the same number for another file."""
    before = AppliedFile(1, "before")
    record = StoreRecord(active="bundle", file=AppliedFile(2, "same"), accepts=(before,))
    offered = record.accepting(AppliedFile(3, "same"), before)
    assert offered.accepts == (before,)
    assert offered.switched("bundle", AppliedFile(3, "same")).accepts == (before,)
