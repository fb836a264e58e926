"""Kinds of analysis that look inside a run: its weights, its attention and its gradients."""
