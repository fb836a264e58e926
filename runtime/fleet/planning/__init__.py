"""Which blocks on which device: a placement for a goal, what it promises, and what simpler placements promise."""
