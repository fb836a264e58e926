"""What a fleet should be, and the order of the steps to it: pure."""
