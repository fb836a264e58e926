"""HTTP: the inference service and the metrics endpoint."""
