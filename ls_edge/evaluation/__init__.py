"""Accuracy of a model over block orders, and the summary of a run. Knows neither torch nor engines."""
