"""Classes that ls-edge finds by the entry points of this package."""
