"""Changes of a fleet: pure plans of the steps by which running peers follow another ``peers.yaml``."""
