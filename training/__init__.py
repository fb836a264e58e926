"""Fine-tuning with shuffled block order: models with an explicit order, methods, data, and the loop."""
