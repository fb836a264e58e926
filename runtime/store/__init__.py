"""Bundles on a peer's disk: installing, switching and verifying them."""
