"""A run opened to look inside: attention weights, gradients, and maps over its images, for ``ls_edge.analysis``."""
