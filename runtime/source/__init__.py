"""The process that has images and sends their tokens to peers."""
