"""Processes that only ask peers: status, push and link probes."""
