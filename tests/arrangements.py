"""Arrangements in the notation of nested lists."""

from ls_edge.core.arrangement import Arrangement


def arrangement_of(value):
    """A flat list of blocks is a plain order, a nested one holds waves of tracks of blocks."""
    if all(isinstance(item, int) for item in value):
        return Arrangement.plain(value)
    return Arrangement(tuple(tuple(map(tuple, wave)) for wave in value))
