"""Sockets: links between processes, keys, and who is let in."""
