"""Messages between processes, and how tokens are encoded; PROTOCOL.md is the specification."""
