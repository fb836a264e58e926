"""Processes that only ask peers: status and apply."""
