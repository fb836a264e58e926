"""Sockets: links between processes, keys and admission."""
