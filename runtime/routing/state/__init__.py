"""State of a routing machine: held requests, neighbors, credits; its events, instructions and limits."""
