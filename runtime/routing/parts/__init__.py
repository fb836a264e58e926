"""Parts of the routing machine: each keeps its own state and is called by public methods."""
