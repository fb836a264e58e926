"""The process that serves blocks."""
