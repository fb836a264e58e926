"""Routing of requests: a pure state machine without sockets, clocks or threads."""
