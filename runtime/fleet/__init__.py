"""Several peers: local clusters, planning and simulation."""
