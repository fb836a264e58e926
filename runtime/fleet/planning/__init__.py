"""Placement of blocks on devices for an objective, its estimates, and those of simpler placements."""
