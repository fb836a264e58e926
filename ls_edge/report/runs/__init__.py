"""Statistics, intervals, tracks, mistakes and trace events of a recorded run."""
