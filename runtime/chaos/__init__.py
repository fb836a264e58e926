"""Faults on purpose: what ``ls-edge chaos`` does to peers, and what the fault tests do."""
