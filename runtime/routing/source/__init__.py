"""Routing of a process that has images: its rules and ended requests."""
