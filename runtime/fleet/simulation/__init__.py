"""Sites of a fleet in simulated time."""
