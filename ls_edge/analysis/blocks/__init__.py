"""Kinds of analysis that exist for every model, runs and bundles."""
