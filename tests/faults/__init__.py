"""Faults on purpose, for tests and benchmarks: of engines, links, members and whole processes."""
