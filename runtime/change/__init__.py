"""Changes of a fleet: pure plans of what running peers do to serve what another file says."""
