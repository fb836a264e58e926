"""CUDA: the runtime library, and the memory that the engines of one thread share."""
