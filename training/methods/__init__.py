"""Training methods: in which order the blocks run in each step, and the loss."""
