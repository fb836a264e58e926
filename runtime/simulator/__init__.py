"""Processes, links and engines in simulated time."""
