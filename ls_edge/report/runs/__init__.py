"""A recorded run: its statistics, its intervals on a time axis, its tracks, its mistakes, and its trace events."""
