"""A double for tests; see tests/doubles/README.md."""
