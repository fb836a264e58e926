"""Training methods: the order in which blocks run in each step, and the loss."""
