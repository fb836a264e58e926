"""TensorRT: engines built on the device that runs them, kept in a cache of this user."""
