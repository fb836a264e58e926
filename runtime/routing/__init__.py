"""Who runs which block next: a pure state machine, without sockets, clocks or threads."""
