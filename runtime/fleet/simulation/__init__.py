"""The routing machines in simulated time."""
