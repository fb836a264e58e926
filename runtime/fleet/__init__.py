"""Several peers: local clusters, planning, simulation and emulated boards."""
