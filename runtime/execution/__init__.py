"""Threads, cores and engine calls that peers and sources share."""
