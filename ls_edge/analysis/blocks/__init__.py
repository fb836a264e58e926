"""Kinds of analysis that exist for both runs and bundles."""
